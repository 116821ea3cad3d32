"""In: a prompt's embeddings on a GPU; out: its last token's logits and a filled store, by one CUDA graph a setting.

Prompts are padded at the right to a multiple of 64 tokens; there is one graph for each such length at each setting.
Importing this module does not need Triton, making an engine does.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from experiment_core_utils.models.common.cuda_graphs import CudaGraphPool
from experiment_core_utils.models.common.triton_build import built, vendor_unsupported_reason
from experiment_core_utils.models.molmoe.engines.api import EngineKnobs, refuse_without_free_rows
from experiment_core_utils.models.molmoe.engines.expert_trace import ExpertRecord
from experiment_core_utils.models.molmoe.engines.kv_cache import KVCache
from experiment_core_utils.models.molmoe.engines.weights import DecoderWeights
from experiment_core_utils.primitives.errors import ConfigurationError, first_line

# Prompt lengths are rounded up to a multiple of this.
BUCKET = 64


# Graphs kept; one holds its list of launches and next to no memory of its own.
MOST_GRAPHS = 512


@dataclass(frozen=True)
class _Bucket:
    """What the graphs of one padded length read."""

    hidden: torch.Tensor  # [T, H]
    # Its own, so that it is never above T: a capture runs with what the last request left here.
    length: torch.Tensor  # one int64, 1 to T
    rotary: tuple[torch.Tensor, torch.Tensor]  # [T, D / 2] each


@dataclass(frozen=True)
class _Noted:
    """A call, and where its experts stand."""

    record: ExpertRecord
    rows: int
    tokens: int
    last_block: int


def graphed_prefill_unsupported_reason(decoder: DecoderWeights) -> str | None:
    """Why this decoder's prefill cannot be captured; None where it can."""
    half = decoder.head_width // 2
    if decoder.device.type != "cuda":
        return f"its weights are on {decoder.device.type}, not on a CUDA device"
    if (reason := vendor_unsupported_reason()) is not None:
        return reason
    if decoder.head_width % 2 or half & (half - 1):
        return f"its heads are {decoder.head_width} wide, not a power of two"
    for what, size in (("hidden width", decoder.width), ("experts' width", decoder.expert_width)):
        if size % 16:
            return f"its {what} is {size}, not a multiple of 16"
    try:
        _kernels()
    except ImportError as error:
        return f"Triton is missing ({first_line(error)})"
    return None


class GraphedPrefill:
    """A `PrefillEngine` of one request at a time.

    Making a length ready runs a prompt of zeros: the slots of that request are overwritten.

    Raises:
        ConfigurationError: the reason, where the decoder cannot be captured.
    """

    def __init__(self, decoder: DecoderWeights, graphs: CudaGraphPool | None = None) -> None:
        reason = graphed_prefill_unsupported_reason(decoder)
        if reason is not None:
            raise ConfigurationError(f"the prefill cannot be captured: {reason}")
        self._decoder = decoder
        self._kernels = _kernels()
        self._graphs = CudaGraphPool(MOST_GRAPHS) if graphs is None else graphs
        self._buckets: dict[int, _Bucket] = {}
        self._records: dict[tuple[int, int], ExpertRecord] = {}
        self._noted: _Noted | None = None

    def warm_up(self, knobs: EngineKnobs, kv_cache: KVCache, tokens: int) -> None:
        """See `PrefillEngine.warm_up`; for request 0."""
        self._capture_graphs(knobs, kv_cache, tokens, 0)

    @torch.inference_mode()
    def prefill(
        self, embeddings: torch.Tensor, knobs: EngineKnobs, kv_cache: KVCache, request: int = 0
    ) -> torch.Tensor:
        """See `PrefillEngine.prefill`; `kv_cache.next_tokens` of the request is the likeliest token afterwards."""
        tokens = embeddings.shape[0]
        name = self._capture_graphs(knobs, kv_cache, tokens, request)
        rows = _bucket(tokens, kv_cache)
        bucket = self._buckets[rows]
        bucket.hidden[:tokens].copy_(embeddings)
        bucket.hidden[tokens:].zero_()
        bucket.length.fill_(tokens)
        self._noted = _Noted(self._record_for(knobs, kv_cache), rows, tokens, knobs.blocks[-1])
        return self._graphs.replay(name)

    def forget_experts(self) -> None:
        """See `ExpertTrace.forget_experts`."""
        self._noted = None
        for record in self._records.values():
            record.forget()

    @property
    def topk_expert_ids(self) -> Mapping[int, torch.Tensor]:
        """See `ExpertTrace.topk_expert_ids`; on the host, without the rows that pad the prompt.

        T is 1 in the last block, of which only the last position is computed.
        """
        noted = self._noted
        if noted is None:
            return {}
        return {
            block: ids[: noted.tokens] for block, ids in noted.record.of_tokens(noted.rows, noted.last_block).items()
        }

    def _record_for(self, knobs: EngineKnobs, kv_cache: KVCache) -> ExpertRecord:
        """One for the prompts of all lengths that fit into the store, as only one graph runs at a time."""
        size = kv_cache.max_seq_len, max(knobs.top_k, self._decoder.default_top_k)
        if size not in self._records:
            self._records[size] = ExpertRecord.allocate(self._decoder, size[0] * size[1])
        return self._records[size]

    @torch.inference_mode()
    def _capture_graphs(self, knobs: EngineKnobs, kv_cache: KVCache, tokens: int, request: int) -> tuple[Any, ...]:
        """The name of the graph, captured if it was not there."""
        if tokens > kv_cache.max_seq_len:
            raise ConfigurationError(
                f"a prompt of {tokens} tokens does not fit into a KV cache of {kv_cache.max_seq_len} tokens"
            )
        rows = _bucket(tokens, kv_cache)
        name = ("prefill", knobs, rows, kv_cache.keys.data_ptr(), request)
        if name in self._graphs:
            return name
        if rows not in self._buckets:
            self._buckets[rows] = _outside_inference(lambda: self._new_bucket(rows))
        bucket, decoder = self._buckets[rows], self._decoder
        keys, values = kv_cache.keys[: len(knobs.blocks), request], kv_cache.values[: len(knobs.blocks), request]
        chosen = kv_cache.next_tokens[request : request + 1]
        used = self._record_for(knobs, kv_cache).ids

        def run() -> torch.Tensor:
            logits: torch.Tensor = self._kernels.prefill(
                decoder, bucket.hidden, bucket.length, knobs.blocks, knobs.top_k, keys, values, bucket.rotary, used
            )
            chosen.copy_(logits.argmax(dim=-1))
            return logits

        with built("the kernels of the prefill", ConfigurationError):
            self._graphs.capture(name, run)
        return name

    def _new_bucket(self, rows: int) -> _Bucket:
        decoder = self._decoder
        hidden = torch.zeros(rows, decoder.width, dtype=decoder.dtype, device=decoder.device)
        length = torch.ones(1, dtype=torch.int64, device=decoder.device)
        return _Bucket(hidden, length, self._kernels.rotary_table(decoder.inverse_frequencies, rows))


def _bucket(tokens: int, kv_cache: KVCache) -> int:
    return min(-(-tokens // BUCKET) * BUCKET, kv_cache.max_seq_len)


def _outside_inference(make: Any) -> Any:
    """What `make` returns, made so that it can be written to outside inference mode too."""
    with torch.inference_mode(False), torch.no_grad():
        return make()


def _kernels() -> Any:
    """Triton may be missing; then ImportError."""
    from experiment_core_utils.models.molmoe.engines.gpu.triton import prefill_forward as prefill

    return prefill


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
    def warm_up(self, pause: int, knobs: EngineKnobs, kv_cache: KVCache, tokens: int) -> None:
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
    def finish(self, knobs: EngineKnobs, kv_cache: KVCache) -> torch.Tensor:
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

    def _second_part(self, rows: int, pause: int, knobs: EngineKnobs, kv_cache: KVCache) -> Hashable:
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
