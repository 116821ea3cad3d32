"""The interfaces of engines, each of which runs one stage in place of the modules.

An engine is made once, for one decoder with fused weights or one vision tower. `warm_up` does everything that a later
call would otherwise do for the first time (compiling, capturing, allocating) and is never timed; it may be called again
for what is ready already, at no cost. It raises ConfigurationError, with the reason as its message, for what the engine
cannot run; such a stage then runs in another way. A KV cache that was warmed up with an engine lives as long as the
engine, because CUDA graphs may contain its addresses.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import RotaryTable
from experiment_core_utils.primitives.errors import ConfigurationError


class VisionEngine(Protocol):
    """Encodes the pictures of one request."""

    def warm_up(self, crops: int) -> None:
        """Warm up for requests of so many crops, the overview among them."""

    def release(self) -> None:
        """Give back what was warmed up; nothing by default."""
        return

    def encode(self, pixel_values: torch.Tensor, image_masks: torch.Tensor) -> torch.Tensor:
        """Features [K * F, H] of crops [K, 3, S, S] and masks [K, P]; the next call may overwrite them."""


class ExpertTrace(Protocol):
    """An engine's report of the experts that it used, which shows a knob that does not act."""

    def forget_experts(self) -> None:
        """Call this before the one call whose experts are needed; other calls need not pay for a record."""

    @property
    def topk_expert_ids(self) -> Mapping[int, torch.Tensor]:
        """Expert ids [T, k] of that call's T tokens, of each block that ran, by block.

        They come from where the experts are computed, so that a graphed stage reports its own run: what was left out is
        no expert's id.
        """


class PrefillEngine(ExpertTrace, Protocol):
    """Runs one request's prompt."""

    def warm_up(self, knobs: EngineKnobs, kv_cache: KVCache, tokens: int) -> None:
        """Warm up for prompts of so many tokens (of any length up to its bucket's end, where there are buckets)."""

    def prefill(
        self, embeddings: torch.Tensor, knobs: EngineKnobs, kv_cache: KVCache, request: int = 0
    ) -> torch.Tensor:
        """Logits [1, V] of the last position of embeddings [T, H]; the next call may overwrite them.

        Fills the request's positions 0 to T - 1; the caller sets its length afterwards.
        """

    def last_state(
        self,
        embeddings: torch.Tensor,
        knobs: EngineKnobs,
        kv_cache: KVCache,
        rotary: RotaryTable | None = None,
        added: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """The state [1, H] that `prefill` of request 0 multiplies with the head; the next call may overwrite it.

        Args:
            rotary: of the T positions; None for those of positions 0 to T - 1.
            added: states [T, H] to add after each of the first blocks that run.
        """


class DecodeEngine(ExpertTrace, Protocol):
    """Runs one step of all B requests of a KV cache."""

    def warm_up(self, knobs: EngineKnobs, kv_cache: KVCache) -> None:
        """Warm up for steps of this KV cache at these knobs. Leaves the cache's lengths and next tokens as they
        were.
        """

    def step(self, knobs: EngineKnobs, kv_cache: KVCache) -> torch.Tensor:
        """Logits [B, V] after the tokens `kv_cache.next_tokens` [B]; the next call may overwrite them.

        Puts the likeliest of those into `kv_cache.next_tokens` and, checked, `kv_cache.checked_tokens`, and advances
        `kv_cache.device_lengths` by one, all in the order of the current stream and without waiting for it. The caller
        notes the step on the host (`kv_cache.note_step`) and has made sure that there is room for the token.
        """


class PausedPrefillEngine(Protocol):
    """Runs the prompt of request 0 in two parts, one request at a time; made and warmed up as every engine is."""

    def warm_up(self, pause: int, knobs: EngineKnobs, kv_cache: KVCache, tokens: int) -> None:
        """Warm up for prompts of so many tokens that pause there and resume with these knobs."""

    def begin(
        self, embeddings: torch.Tensor, appended: torch.Tensor | None, pause: int, kv_cache: KVCache
    ) -> torch.Tensor:
        """States at the pause of the prompt's last token and of the row [H], from embeddings [T, H].

        [2, H], not normalised; without a row [1, H]. The next call may overwrite them.
        """

    def finish(self, knobs: EngineKnobs, kv_cache: KVCache) -> torch.Tensor:
        """Resume the last paused prompt: logits [1, V], which the next call may overwrite.

        The first blocks of the setting are those that have run. The request's length is set by the caller, afterwards.
        """


def refuse_without_free_rows(tokens: int, kv_cache: KVCache) -> None:
    """Raises ConfigurationError where a prompt of so many tokens leaves no room in the KV cache for the row after
    it.
    """
    if tokens >= kv_cache.max_seq_len:
        raise ConfigurationError(
            f"a prompt of {tokens} tokens and one row do not fit into a KV cache of {kv_cache.max_seq_len} tokens"
        )
