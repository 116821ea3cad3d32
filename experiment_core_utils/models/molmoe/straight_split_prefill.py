"""In: a prompt's embeddings and a row behind them; out: the prefill in two parts, by the blocks of the whole one."""

import torch

from experiment_core_utils.models.molmoe.engines import DecoderKnobs
from experiment_core_utils.models.molmoe.key_value_store import KVCache
from experiment_core_utils.models.molmoe.packed_blocks import DecoderWeights
from experiment_core_utils.models.molmoe.split_engines import refuse_without_free_rows
from experiment_core_utils.models.molmoe.straight_decoder import ReferencePrefill


class ReferencePausedPrefill:
    """A `PausedPrefillEngine` where whole prefills are straight.

    Args:
        blocks: that run the whole ones; what they note of experts is of the last call.
    """

    def __init__(self, decoder: DecoderWeights, blocks: ReferencePrefill) -> None:
        self._decoder = decoder
        self._blocks = blocks
        self._paused = decoder.embedding[:0]
        self._ran = 0

    def warm_up(self, pause: int, knobs: DecoderKnobs, kv_cache: KVCache, tokens: int) -> None:
        """See `PausedPrefillEngine.warm_up`."""
        refuse_without_free_rows(tokens, kv_cache)
        self._blocks.warm_up(knobs, kv_cache, tokens + 1)

    @torch.inference_mode()
    def begin(
        self, embeddings: torch.Tensor, appended: torch.Tensor | None, pause: int, kv_cache: KVCache
    ) -> torch.Tensor:
        """See `PausedPrefillEngine.begin`."""
        tokens = len(embeddings)
        refuse_without_free_rows(tokens, kv_cache)
        given = embeddings if appended is None else torch.cat([embeddings, appended[None].to(embeddings.dtype)])
        first = DecoderKnobs(self._decoder.default_top_k, tuple(range(pause)))
        states = self._blocks.through(given, first, kv_cache)
        self._paused, self._ran = states[:tokens], pause
        return states[tokens - 1 :]

    @torch.inference_mode()
    def finish(self, knobs: DecoderKnobs, kv_cache: KVCache) -> torch.Tensor:
        """See `PausedPrefillEngine.finish`."""
        return self._blocks.suffix_logits(self._paused, knobs, kv_cache, ran=self._ran)
