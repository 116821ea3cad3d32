"""Hidden states after each of the first blocks; the shared beginning of prompts is computed once.

What the prompts share runs once, by engines or by modules; of the last of these blocks, engines compute only its keys
and values.
"""

from collections.abc import Sequence

import torch

from experiment_core_utils.engines.cuda_graphs import refused_without_memory
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.paused_runner import TracedPrefill
from experiment_core_utils.engines.reference.decoder import ReferencePrefill
from experiment_core_utils.engines.runner import EngineStages
from experiment_core_utils.models.molmoe.eager.paused_prefill import trace_prompts
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration, MolmoeImageFeatures
from experiment_core_utils.primitives.device import release_cached_memory
from experiment_core_utils.primitives.errors import ConfigurationError


class PromptTraces:
    """Traces by the same stages as whole requests, one at a time: engines use the KV cache of those.

    Args:
        stages: None where the modules run.

    Attributes:
        reason: why modules run though there are engines; None where engines run, or there are none.
    """

    def __init__(self, model: MolmoeForConditionalGeneration, stages: EngineStages | None) -> None:
        self.reason: str | None = None
        self._model = model
        self._stages = stages
        self._suffix: ReferencePrefill | None = None
        if stages is not None:
            # The blocks of whole prefills, if those are the reference.
            prefill = stages.engines.prefill
            self._suffix = prefill if isinstance(prefill, ReferencePrefill) else ReferencePrefill(stages.decoder)

    def trace(
        self,
        shared: torch.Tensor,
        features: MolmoeImageFeatures | None,
        texts: Sequence[torch.Tensor],
        blocks: int,
        rows: torch.Tensor,
    ) -> list[TracedPrefill]:
        """The result of `trace_prefill` for each of the prompts; earlier states can no longer be decoded from.

        Where engines cannot be warmed up, modules run from then on.

        The arguments are those of `trace_prompts`.
        """
        stages, suffix = self._stages, self._suffix
        if stages is not None and suffix is not None and self.reason is None:
            max_seq_len = shared.shape[1] + max(map(len, texts), default=0) + len(rows)
            try:
                with refused_without_memory(max_seq_len, 0):
                    before = _prefilled_prefix(stages, shared, features, blocks, max_seq_len)
                    return [_suffix_states(stages, suffix, before, text, blocks, rows) for text in texts]
            except ConfigurationError as error:
                self.reason = str(error)
            # Not in the handler: until its end the error keeps what was half made.
            stages.release_unused()
            release_cached_memory(shared.device)
        return trace_prompts(self._model, shared, features, texts, blocks, rows)


@torch.inference_mode()
def _prefilled_prefix(
    stages: EngineStages, shared: torch.Tensor, features: MolmoeImageFeatures | None, blocks: int, max_seq_len: int
) -> torch.Tensor:
    """Embeddings [T, H] of all shared tokens but the last, which are now in the first positions of the KV cache.

    The last one goes with each text, which may be empty. Of the last block a prefill computes one position beside the
    keys and values.
    """
    stages.reserve(max_seq_len)
    embedded, before = stages.embedded(shared, features), shared.shape[1] - 1
    if before:
        knobs = EngineKnobs(stages.decoder.default_top_k, tuple(range(blocks)))
        stages.engines.prefill.warm_up(knobs, stages.kv_cache, before)
        stages.engines.prefill.prefill(embedded[:before], knobs, stages.kv_cache)
    return embedded


@torch.inference_mode()
def _suffix_states(
    stages: EngineStages,
    suffix: ReferencePrefill,
    before: torch.Tensor,
    text: torch.Tensor,
    blocks: int,
    rows: torch.Tensor,
) -> TracedPrefill:
    own = torch.cat([before[-1:], stages.embedded(text[None], None)])
    states = suffix.suffix_states(own, rows, len(before) - 1, blocks, stages.kv_cache)
    return TracedPrefill(states[:, len(own) - 1], states[:, len(own) :])
