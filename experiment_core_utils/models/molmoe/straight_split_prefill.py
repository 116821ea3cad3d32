"""In: a prompt's embeddings and a row behind them; out: the prefill in two parts, by the blocks of the whole one."""

import torch

from experiment_core_utils.models.molmoe.engines import DecoderKnobs
from experiment_core_utils.models.molmoe.key_value_store import KeyValueStore
from experiment_core_utils.models.molmoe.packed_blocks import PackedDecoder
from experiment_core_utils.models.molmoe.split_engines import refuse_without_room
from experiment_core_utils.models.molmoe.straight_decoder import StraightPrefill


class StraightSplitPrefill:
    """A `SplitPrefillEngine` where whole prefills are straight.

    Args:
        blocks: that run the whole ones; what they note of experts is of the last call.
    """

    def __init__(self, decoder: PackedDecoder, blocks: StraightPrefill) -> None:
        self._decoder = decoder
        self._blocks = blocks
        self._paused = decoder.embedding[:0]
        self._ran = 0

    def make_ready(self, pause: int, knobs: DecoderKnobs, store: KeyValueStore, tokens: int) -> None:
        """See `SplitPrefillEngine.make_ready`."""
        refuse_without_room(tokens, store)
        self._blocks.make_ready(knobs, store, tokens + 1)

    @torch.inference_mode()
    def begin(
        self, embeddings: torch.Tensor, appended: torch.Tensor | None, pause: int, store: KeyValueStore
    ) -> torch.Tensor:
        """See `SplitPrefillEngine.begin`."""
        tokens = len(embeddings)
        refuse_without_room(tokens, store)
        given = embeddings if appended is None else torch.cat([embeddings, appended[None].to(embeddings.dtype)])
        first = DecoderKnobs(self._decoder.default_top_k, tuple(range(pause)))
        states = self._blocks.through(given, first, store)
        self._paused, self._ran = states[:tokens], pause
        return states[tokens - 1 :]

    @torch.inference_mode()
    def finish(self, knobs: DecoderKnobs, store: KeyValueStore) -> torch.Tensor:
        """See `SplitPrefillEngine.finish`."""
        return self._blocks.logits_behind(self._paused, knobs, store, ran=self._ran)
