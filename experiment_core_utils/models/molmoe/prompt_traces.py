"""In: prompts that begin alike, with a picture or without, and rows; out: what stands behind each of the first blocks.

By engines or by modules, what the prompts share runs once; by engines of the last of these blocks its keys and values
alone.
"""

from collections.abc import Sequence

import torch

from experiment_core_utils.models.graph_capture import refused_without_memory
from experiment_core_utils.models.molmoe.engines import DecoderKnobs
from experiment_core_utils.models.molmoe.execution import LaunchFreeStages
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration, MolmoeImageFeatures
from experiment_core_utils.models.molmoe.shared_prefill import trace_prompts
from experiment_core_utils.models.molmoe.split_prefill import TracedPrefill
from experiment_core_utils.models.molmoe.straight_decoder import StraightPrefill
from experiment_core_utils.models.molmoe.straight_tail import StraightTail
from experiment_core_utils.primitives.device import release_cached_memory
from experiment_core_utils.primitives.errors import ConfigurationError


class PromptTraces:
    """Traces by what runs whole requests, one at a time: engines use the store of those.

    Args:
        stages: None where the modules run.

    Attributes:
        reason: why modules run though there are engines; None where engines run, or there are none.
    """

    def __init__(self, model: MolmoeForConditionalGeneration, stages: LaunchFreeStages | None) -> None:
        self.reason: str | None = None
        self._model = model
        self._stages = stages
        self._tail = None if stages is None else _tail_of(stages)

    def trace(
        self,
        shared: torch.Tensor,
        features: MolmoeImageFeatures | None,
        texts: Sequence[torch.Tensor],
        blocks: int,
        rows: torch.Tensor,
    ) -> list[TracedPrefill]:
        """What `trace_prefill` gives for each of the prompts; a state from before can no longer be decoded from.

        Where engines cannot be made ready, modules run from then on.

        The arguments are those of `trace_prompts`.
        """
        stages, tail = self._stages, self._tail
        if stages is not None and tail is not None and self.reason is None:
            slots = shared.shape[1] + max(map(len, texts), default=0) + len(rows)
            try:
                with refused_without_memory(slots, 0):
                    before = _begun(stages, shared, features, blocks, slots)
                    return [_behind(stages, tail, before, text, blocks, rows) for text in texts]
            except ConfigurationError as error:
                self.reason = str(error)
            # Not in the handler: until its end the error holds what was half made.
            stages.drop_unready()
            release_cached_memory(shared.device)
        return trace_prompts(self._model, shared, features, texts, blocks, rows)


def _tail_of(stages: LaunchFreeStages) -> StraightTail:
    """By the blocks of whole prefills, where those are straight."""
    prefill, decoder = stages.engines.prefill, stages.decoder
    return StraightTail(decoder, prefill if isinstance(prefill, StraightPrefill) else StraightPrefill(decoder))


@torch.inference_mode()
def _begun(
    stages: LaunchFreeStages, shared: torch.Tensor, features: MolmoeImageFeatures | None, blocks: int, slots: int
) -> torch.Tensor:
    """All of the shared tokens but the last in the first slots; returns their embeddings [T, H].

    The last one goes with each text, which may be empty. Of the last block a prefill computes one position beside the
    keys and values.
    """
    stages.reserve(slots)
    embedded, before = stages.embedded(shared, features), shared.shape[1] - 1
    if before:
        knobs = DecoderKnobs(stages.decoder.default_top_k, tuple(range(blocks)))
        stages.engines.prefill.make_ready(knobs, stages.store, before)
        stages.engines.prefill.prefill(embedded[:before], knobs, stages.store)
    return embedded


@torch.inference_mode()
def _behind(
    stages: LaunchFreeStages,
    tail: StraightTail,
    before: torch.Tensor,
    text: torch.Tensor,
    blocks: int,
    rows: torch.Tensor,
) -> TracedPrefill:
    own = torch.cat([before[-1:], stages.embedded(text[None], None)])
    states = tail.behind_each(own, rows, len(before) - 1, blocks, stages.store)
    return TracedPrefill(states[:, len(own) - 1], states[:, len(own) :])
