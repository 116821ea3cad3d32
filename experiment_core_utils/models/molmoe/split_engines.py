"""In: a prompt's embeddings and a row behind them; out: what runs a prefill in two parts in place of the modules.

A pause of n means that blocks 0 to n - 1 run first, each with the model's own number of experts, over the prompt and
the row. The row's keys and values lie in the slot behind the prompt, where the first token of the answer goes: nothing
reads them after the pause.
"""

from typing import Protocol

import torch

from experiment_core_utils.models.molmoe.engines import DecoderKnobs
from experiment_core_utils.models.molmoe.key_value_store import KVCache
from experiment_core_utils.primitives.errors import ConfigurationError


class PausedPrefillEngine(Protocol):
    """Runs the prompt of request 0, one after the other; made and warmed up as every engine is (`engines.py`)."""

    def warm_up(self, pause: int, knobs: DecoderKnobs, kv_cache: KVCache, tokens: int) -> None:
        """Warm up for prompts of so many tokens that pause there and go on with these knobs."""
        ...

    def begin(
        self, embeddings: torch.Tensor, appended: torch.Tensor | None, pause: int, kv_cache: KVCache
    ) -> torch.Tensor:
        """[T, H] and the row [H] -> states behind the pause, of the prompt's last token and of the row.

        [2, H], not normalised; without a row [1, H]. The next call may overwrite them.
        """
        ...

    def finish(self, knobs: DecoderKnobs, kv_cache: KVCache) -> torch.Tensor:
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
