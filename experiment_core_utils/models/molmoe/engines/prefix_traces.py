"""States after each of the first blocks, for prompts that share a beginning and for appended rows.

What the prompts share runs once, by engines or by modules; of the last of these blocks, engines compute only its keys
and values.
"""

from collections.abc import Sequence

import torch

from experiment_core_utils.models.common.cuda_graphs import refused_without_memory
from experiment_core_utils.models.molmoe.eager.paused_prefill import TracedPrefill, trace_prompts
from experiment_core_utils.models.molmoe.engines.api import EngineKnobs
from experiment_core_utils.models.molmoe.engines.kv_cache import KVCache, suffix_mask, suffix_positions
from experiment_core_utils.models.molmoe.engines.reference.decoder import ReferencePrefill, RotaryTable
from experiment_core_utils.models.molmoe.engines.runner import EngineStages
from experiment_core_utils.models.molmoe.engines.weights import DecoderWeights
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration, MolmoeImageFeatures
from experiment_core_utils.primitives.device import release_cached_memory
from experiment_core_utils.primitives.errors import ConfigurationError


class ReferenceSuffix:
    """Runs suffixes of a prompt whose prefill has filled the first positions of request 0.

    Args:
        blocks: that run it; what they note of experts is of the last call.
    """

    def __init__(self, decoder: DecoderWeights, blocks: ReferencePrefill) -> None:
        self._decoder = decoder
        self._blocks = blocks
        self._rotary = RotaryTable.of(decoder, 0)

    @torch.inference_mode()
    def states_of_each(
        self, text: torch.Tensor, rows: torch.Tensor, shared: int, blocks: int, kv_cache: KVCache
    ) -> torch.Tensor:
        """States [P, S + R, H] after blocks 0 to P - 1, not normalised, of embeddings [S, H] and [R, H].

        Every block uses the model's own number of experts. Positions from `shared` on are overwritten.

        Args:
            text: the prompt's last tokens, at least one.
            rows: each comes after the prompt as if it were alone there.
            shared: tokens of the prompt before them, whose keys and values are in the first `blocks` blocks.

        Raises:
            ConfigurationError: the KV cache is too short.
        """
        last, end = shared + len(text), shared + len(text) + len(rows)
        if end > kv_cache.max_seq_len:
            raise ConfigurationError(
                f"a prompt of {last} tokens and {len(rows)} rows do not fit into a KV cache "
                f"of {kv_cache.max_seq_len} tokens"
            )
        if len(self._rotary.cosine) <= last:
            self._rotary = RotaryTable.of(self._decoder, kv_cache.max_seq_len)
        sizes, device = (shared, len(text), len(rows)), kv_cache.keys.device
        rotary, seen = self._rotary.rows(suffix_positions(*sizes).to(device)), suffix_mask(*sizes).to(device)
        states, suffix = torch.cat([text, rows.to(text.dtype)]), []
        for index in range(blocks):
            kept = kv_cache.keys[index, 0, :, :end], kv_cache.values[index, 0, :, :end]
            states = self._blocks.suffix_block(index, states, kept, rotary, seen)
            suffix.append(states)
        return torch.stack(suffix)


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
        self._suffix = None if stages is None else _suffix_of(stages)

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
                    before = _begun(stages, shared, features, blocks, max_seq_len)
                    return [_suffix_states(stages, suffix, before, text, blocks, rows) for text in texts]
            except ConfigurationError as error:
                self.reason = str(error)
            # Not in the handler: until its end the error keeps what was half made.
            stages.drop_unready()
            release_cached_memory(shared.device)
        return trace_prompts(self._model, shared, features, texts, blocks, rows)


def _suffix_of(stages: EngineStages) -> ReferenceSuffix:
    """The suffix engine: the blocks of whole prefills, if those are the reference."""
    prefill, decoder = stages.engines.prefill, stages.decoder
    return ReferenceSuffix(decoder, prefill if isinstance(prefill, ReferencePrefill) else ReferencePrefill(decoder))


@torch.inference_mode()
def _begun(
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
    suffix: ReferenceSuffix,
    before: torch.Tensor,
    text: torch.Tensor,
    blocks: int,
    rows: torch.Tensor,
) -> TracedPrefill:
    own = torch.cat([before[-1:], stages.embedded(text[None], None)])
    states = suffix.states_of_each(own, rows, len(before) - 1, blocks, stages.kv_cache)
    return TracedPrefill(states[:, len(own) - 1], states[:, len(own) :])
