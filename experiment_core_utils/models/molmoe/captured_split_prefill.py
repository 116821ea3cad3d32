"""In: a prompt's embeddings on a GPU and a row behind them; out: the prefill in two parts, each by one CUDA graph.

There is one graph for each padded length and pause, and one for each of those and the knobs behind it. Importing this
module does not need Triton, making an engine does.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from experiment_core_utils.models.molmoe.captured_graphs import CudaGraphPool
from experiment_core_utils.models.molmoe.captured_prefill import BUCKET, graphed_prefill_unsupported_reason
from experiment_core_utils.models.molmoe.engines import DecoderKnobs
from experiment_core_utils.models.molmoe.expert_record import ExpertRecord
from experiment_core_utils.models.molmoe.key_value_store import KVCache
from experiment_core_utils.models.molmoe.packed_blocks import DecoderWeights
from experiment_core_utils.models.molmoe.split_engines import refuse_without_free_rows
from experiment_core_utils.models.triton_building import built
from experiment_core_utils.primitives.errors import ConfigurationError


@dataclass(frozen=True)
class _Padded:
    """What the graphs of one padded length read, and what the first part leaves for the second."""

    hidden: torch.Tensor  # [T, H]
    paused: torch.Tensor  # [T, H]
    # Never above T: a capture runs with what the last request left here.
    first_length: torch.Tensor  # one int64: the prompt, and the row where there is one
    length: torch.Tensor  # one int64: the prompt
    rotary: tuple[torch.Tensor, torch.Tensor]  # [T, D / 2] each


class GraphedPausedPrefill:
    """A `PausedPrefillEngine`.

    Making a length ready runs a prompt of zeros: the slots of the request are overwritten.

    Raises:
        ConfigurationError: the reason, where the decoder cannot be captured.
    """

    def __init__(self, decoder: DecoderWeights, graphs: CudaGraphPool) -> None:
        reason = graphed_prefill_unsupported_reason(decoder)
        if reason is not None:
            raise ConfigurationError(f"the prefill cannot be captured: {reason}")
        self._decoder = decoder
        self._kernels = _kernels()
        self._graphs = graphs
        self._padded: dict[int, _Padded] = {}
        self._records: dict[int, ExpertRecord] = {}
        self._last_two = torch.tensor([2, 1], device=decoder.device)
        # Of the prompt that began last: its padded length, and how many blocks have run.
        self._began = (0, 0)

    @torch.inference_mode()
    def warm_up(self, pause: int, knobs: DecoderKnobs, kv_cache: KVCache, tokens: int) -> None:
        """See `PausedPrefillEngine.warm_up`."""
        rows = self._padded_suffix(tokens, kv_cache)
        self._first_part(rows, pause, kv_cache)
        self._second_part(rows, pause, knobs, kv_cache)

    @torch.inference_mode()
    def begin(
        self, embeddings: torch.Tensor, appended: torch.Tensor | None, pause: int, kv_cache: KVCache
    ) -> torch.Tensor:
        """See `PausedPrefillEngine.begin`."""
        tokens = embeddings.shape[0]
        rows = self._padded_suffix(tokens, kv_cache)
        name = self._first_part(rows, pause, kv_cache)
        padded = self._padded[rows]
        padded.hidden[:tokens].copy_(embeddings)
        padded.hidden[tokens:].zero_()
        padded.length.fill_(tokens)
        padded.first_length.fill_(tokens)
        if appended is not None:
            padded.hidden[tokens].copy_(appended)
            padded.first_length.fill_(tokens + 1)
        self._began = rows, pause
        states = self._graphs.replay(name)
        return states if appended is not None else states[1:]

    @torch.inference_mode()
    def finish(self, knobs: DecoderKnobs, kv_cache: KVCache) -> torch.Tensor:
        """See `PausedPrefillEngine.finish`; `kv_cache.next_tokens` is the likeliest token afterwards."""
        rows, pause = self._began
        return self._graphs.replay(self._second_part(rows, pause, knobs, kv_cache))

    def _padded_suffix(self, tokens: int, kv_cache: KVCache) -> int:
        """The padded length of a prompt and the row behind it, made where it is the first of its length."""
        refuse_without_free_rows(tokens, kv_cache)
        rows = min(-(-(tokens + 1) // BUCKET) * BUCKET, kv_cache.max_seq_len)
        if rows not in self._padded:
            self._padded[rows] = self._new_padded(rows)
        return rows

    def _first_part(self, rows: int, pause: int, kv_cache: KVCache) -> Hashable:
        """The name of the graph, captured if it was not there."""
        name = ("begin", pause, rows, kv_cache.keys.data_ptr())
        if name in self._graphs:
            return name
        padded, decoder = self._padded[rows], self._decoder
        keys, values = kv_cache.keys[:pause, 0], kv_cache.values[:pause, 0]
        used = self._used(rows * decoder.default_top_k)

        def run() -> torch.Tensor:
            states = self._kernels.begin(
                decoder, padded.hidden, padded.first_length, pause, keys, values, padded.rotary, used
            )
            # Graphs share what memory they need in between.
            padded.paused.copy_(states)
            return states.index_select(0, (padded.first_length - self._last_two).clamp_(min=0)).float()

        with built("the kernels of the prefill", ConfigurationError):
            self._graphs.capture(name, run)
        return name

    def _second_part(self, rows: int, pause: int, knobs: DecoderKnobs, kv_cache: KVCache) -> Hashable:
        """As `_first_part`."""
        name = ("finish", pause, knobs, rows, kv_cache.keys.data_ptr())
        if name in self._graphs:
            return name
        padded, decoder, left = self._padded[rows], self._decoder, knobs.blocks[pause:]
        own = slice(pause, len(knobs.blocks))
        keys, values, chosen = kv_cache.keys[own, 0], kv_cache.values[own, 0], kv_cache.next_tokens[:1]
        used = self._used(rows * knobs.top_k)

        def run() -> torch.Tensor:
            logits: torch.Tensor = self._kernels.finish(
                decoder, padded.paused, padded.length, left, knobs.top_k, keys, values, padded.rotary, used
            )
            chosen.copy_(logits.argmax(dim=-1))
            return logits

        with built("the kernels of the prefill", ConfigurationError):
            self._graphs.capture(name, run)
        return name

    def _used(self, most: int) -> torch.Tensor:
        """Where kernels put so many expert ids a block; nobody reads them afterwards."""
        if most not in self._records:
            self._records[most] = ExpertRecord.allocate(self._decoder, most)
        return self._records[most].ids

    @torch.inference_mode(False)
    def _new_padded(self, rows: int) -> _Padded:
        decoder = self._decoder
        hidden = torch.zeros(rows, decoder.width, dtype=decoder.dtype, device=decoder.device)
        length = torch.ones(1, dtype=torch.int64, device=decoder.device)
        rotary = self._kernels.rotary_table(decoder.inverse_frequencies, rows)
        return _Padded(hidden, torch.zeros_like(hidden), length, length.clone(), rotary)


def _kernels() -> Any:
    """Triton may be missing; then ImportError."""
    from experiment_core_utils.models.molmoe.prefill_kernels import split_prefill

    return split_prefill
