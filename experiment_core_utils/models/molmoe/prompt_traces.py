"""In: prompts that begin alike, with a picture or without, and rows; out: what is behind each of the first blocks.

By engines or by modules, what the prompts share runs once; by engines of the last of these blocks its keys and values
alone.
"""

from collections.abc import Sequence

import torch

from experiment_core_utils.models.graph_capture import refused_without_memory
from experiment_core_utils.models.molmoe.engines import DecoderKnobs
from experiment_core_utils.models.molmoe.execution import EngineStages
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration, MolmoeImageFeatures
from experiment_core_utils.models.molmoe.shared_prefill import trace_prompts
from experiment_core_utils.models.molmoe.split_prefill import TracedPrefill
from experiment_core_utils.models.molmoe.straight_decoder import ReferencePrefill
from experiment_core_utils.models.molmoe.straight_tail import ReferenceSuffix
from experiment_core_utils.primitives.device import release_cached_memory
from experiment_core_utils.primitives.errors import ConfigurationError


class PromptTraces:
    """Traces by what runs whole requests, one at a time: engines use the store of those.

    Args:
        stages: None where the modules run.

    Attributes:
        reason: why modules run though there are engines; None where engines run, or there are none.
    """

    def __init__(self, model: MolmoeForConditionalGeneration, stages: EngineStages | None) -> None:
        self.reason: str | None = None
        self._model = model
        self._stages = stages
        self._suffix = None if stages is None else _suffix_of(stages)

    def trace(
        self,
        shared: torch.Tensor,
        features: MolmoeImageFeatures | None,
        texts: Sequence[torch.Tensor],
        blocks: int,
        rows: torch.Tensor,
    ) -> list[TracedPrefill]:
        """What `trace_prefill` gives for each of the prompts; a state from before can no longer be decoded from.

        Where engines cannot be warmed up, modules run from then on.

        The arguments are those of `trace_prompts`.
        """
        stages, suffix = self._stages, self._suffix
        if stages is not None and suffix is not None and self.reason is None:
            max_seq_len = shared.shape[1] + max(map(len, texts), default=0) + len(rows)
            try:
                with refused_without_memory(max_seq_len, 0):
                    before = _begun(stages, shared, features, blocks, max_seq_len)
                    return [_suffix_states(stages, suffix, before, text, blocks, rows) for text in texts]
            except ConfigurationError as error:
                self.reason = str(error)
            # Not in the handler: until its end the error holds what was half made.
            stages.drop_unready()
            release_cached_memory(shared.device)
        return trace_prompts(self._model, shared, features, texts, blocks, rows)


def _suffix_of(stages: EngineStages) -> ReferenceSuffix:
    """The suffix engine: the blocks of whole prefills, if those are plain torch."""
    prefill, decoder = stages.engines.prefill, stages.decoder
    return ReferenceSuffix(decoder, prefill if isinstance(prefill, ReferencePrefill) else ReferencePrefill(decoder))


@torch.inference_mode()
def _begun(
    stages: EngineStages, shared: torch.Tensor, features: MolmoeImageFeatures | None, blocks: int, max_seq_len: int
) -> torch.Tensor:
    """All of the shared tokens but the last in the first slots; returns their embeddings [T, H].

    The last one goes with each text, which may be empty. Of the last block a prefill computes one position beside the
    keys and values.
    """
    stages.reserve(max_seq_len)
    embedded, before = stages.embedded(shared, features), shared.shape[1] - 1
    if before:
        knobs = DecoderKnobs(stages.decoder.default_top_k, tuple(range(blocks)))
        stages.engines.prefill.warm_up(knobs, stages.kv_cache, before)
        stages.engines.prefill.prefill(embedded[:before], knobs, stages.kv_cache)
    return embedded


@torch.inference_mode()
def _suffix_states(
    stages: EngineStages,
    suffix: ReferenceSuffix,
    before: torch.Tensor,
    text: torch.Tensor,
    blocks: int,
    rows: torch.Tensor,
) -> TracedPrefill:
    own = torch.cat([before[-1:], stages.embedded(text[None], None)])
    states = suffix.states_of_each(own, rows, len(before) - 1, blocks, stages.kv_cache)
    return TracedPrefill(states[:, len(own) - 1], states[:, len(own) :])
