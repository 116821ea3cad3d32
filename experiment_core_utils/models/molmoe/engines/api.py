"""The interfaces of MolmoE's engines, each of which runs one stage in place of the modules.

An engine is made once, for one decoder with fused weights or one vision tower. `warm_up` does everything that a later
call would otherwise do for the first time (compiling, capturing, allocating) and is never timed; it may be called again
for what is ready already, at no cost. It raises ConfigurationError, with the reason as its message, for what the engine
cannot run; such a stage then runs in another way. A KV cache that was warmed up with an engine lives as long as the
engine, because CUDA graphs may contain its addresses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from experiment_core_utils.models.molmoe.engines.kv_cache import KVCache
from experiment_core_utils.primitives.errors import ConfigurationError


@dataclass(frozen=True)
class EngineKnobs:
    """The decoder's part of a setting: experts per token of every block but block 0, and the blocks that run."""

    top_k: int
    blocks: tuple[int, ...]


class VisionEngine(Protocol):
    """Encodes the pictures of one request."""

    def warm_up(self, crops: int) -> None:
        """Warm up for requests of so many crops, the overview among them."""
        ...

    def encode(self, pixel_values: torch.Tensor, image_masks: torch.Tensor) -> torch.Tensor:
        """[K, 3, S, S] and [K, P] -> features [K * F, H], which the next call may overwrite."""
        ...


class ExpertTrace(Protocol):
    """What an engine says of the experts that it used, so that a knob that does not act is seen."""

    def forget_experts(self) -> None:
        """Comes before the one call whose experts are wanted. Calls that nobody asks about need not pay for it."""
        ...

    @property
    def topk_expert_ids(self) -> Mapping[int, torch.Tensor]:
        """Expert ids [T, k] of that call's T tokens, of each block that ran, by block.

        They come from where the experts are computed, so that a captured stage reports of itself: what was left out is
        no expert's id.
        """
        ...


class PrefillEngine(ExpertTrace, Protocol):
    """Runs one request's prompt."""

    def warm_up(self, knobs: EngineKnobs, kv_cache: KVCache, tokens: int) -> None:
        """Warm up for prompts of so many tokens (of any length up to its bucket's end, where there are buckets)."""
        ...

    def prefill(
        self, embeddings: torch.Tensor, knobs: EngineKnobs, kv_cache: KVCache, request: int = 0
    ) -> torch.Tensor:
        """[T, H] -> logits [1, V] of the last position, which the next call may overwrite.

        Fills the request's slots 0 to T - 1; its length is set by the caller, afterwards.
        """
        ...


class DecodeEngine(ExpertTrace, Protocol):
    """Runs one step of all B requests of a store."""

    def warm_up(self, knobs: EngineKnobs, kv_cache: KVCache) -> None:
        """Warm up for steps of this KV cache at these knobs. Leaves the cache's lengths and next tokens as they
        were.
        """
        ...

    def step(self, knobs: EngineKnobs, kv_cache: KVCache) -> torch.Tensor:
        """`kv_cache.next_tokens` [B] -> logits [B, V] of the tokens after them, which the next call may overwrite.

        Puts the likeliest of those into `kv_cache.next_tokens` and advances `kv_cache.device_lengths` by one, all in
        the order of the current stream and without waiting for it. The caller notes the step on the host
        (`kv_cache.note_step`) and has made sure that there is a slot.
        """
        ...


class PausedPrefillEngine(Protocol):
    """Runs the prompt of request 0, one after the other; made and warmed up as every engine is."""

    def warm_up(self, pause: int, knobs: EngineKnobs, kv_cache: KVCache, tokens: int) -> None:
        """Warm up for prompts of so many tokens that pause there and go on with these knobs."""
        ...

    def begin(
        self, embeddings: torch.Tensor, appended: torch.Tensor | None, pause: int, kv_cache: KVCache
    ) -> torch.Tensor:
        """[T, H] and the row [H] -> states behind the pause, of the prompt's last token and of the row.

        [2, H], not normalised; without a row [1, H]. The next call may overwrite them.
        """
        ...

    def finish(self, knobs: EngineKnobs, kv_cache: KVCache) -> torch.Tensor:
        """Go on with the prompt that began last -> logits [1, V], which the next call may overwrite.

        The first blocks of the setting are those that have run. The request's length is set by the caller, afterwards.
        """
        ...


def refuse_without_free_rows(tokens: int, kv_cache: KVCache) -> None:
    """Raises ConfigurationError where a prompt of so many tokens leaves no slot for the row behind it."""
    if tokens >= kv_cache.max_seq_len:
        raise ConfigurationError(
            f"a prompt of {tokens} tokens and one row do not fit into a KV cache of {kv_cache.max_seq_len} tokens"
        )
