"""The cpu engine of the decode step: one compiled call in float32."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from experiment_core_utils.engines.cpu.build import (
    FLOAT,
    INT,
    INT64,
    POINTER,
    built,
    declared,
    fields,
    pointers,
    refuse_others,
)
from experiment_core_utils.engines.cpu.panels import refuse_other_places
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.reference.decoder import ReferenceDecode
from experiment_core_utils.engines.weights import BlockWeights, DecoderWeights

_WEIGHTS = tuple(BlockWeights.__dataclass_fields__)


class _Block(ctypes.Structure):
    """`DecodeBlock` of decode_step.cpp; the weights are in the order of `BlockWeights`."""

    _fields_ = (*fields(POINTER, *_WEIGHTS, "keys", "values", "topk_ids"), *fields(INT64, "top_k"))


class _Sizes(ctypes.Structure):
    _fields_ = fields(
        *(INT64, "blocks", "width", "heads", "shared", "head_width", "experts", "inner"),
        *("vocabulary", "slots", "position"),
    )


@cache
def _decode() -> Any:
    return declared(built("decode_step.cpp"), decode=[POINTER, _Sizes, *[POINTER] * 6, FLOAT, *[INT] * 2]).decode


class CpuDecode(ReferenceDecode):
    """A `DecodeEngine` by one compiled call; KV caches of several requests use `ReferenceDecode`.

    Raises:
        ConfigurationError: the decoder is not in float32 on the CPU, or the kernel cannot be compiled here.
    """

    def __init__(self, decoder: DecoderWeights) -> None:
        super().__init__(decoder)
        refuse_other_places(decoder.device, decoder.dtype)
        _decode()
        self._weights = [pointers(*(getattr(block, name) for name in _WEIGHTS)) for block in decoder.blocks]

    @torch.inference_mode()
    def step(self, knobs: EngineKnobs, kv_cache: KVCache) -> torch.Tensor:
        """See `DecodeEngine.step`.

        Raises:
            ValueError: the KV cache has another shape, dtype or layout, or no position left, or there are not so many
                experts; nothing was written.
        """
        if kv_cache.batch != 1:
            return super().step(knobs, kv_cache)
        decoder, at = self._decoder, kv_cache.lengths[0]
        experts = [knobs.top_k if index else decoder.default_top_k for index in knobs.blocks]
        self._refuse_others(kv_cache, experts)
        rotary = self._rotary_for(kv_cache.max_seq_len).rows(slice(at, at + 1))
        state = F.embedding(kv_cache.next_tokens, decoder.embedding)
        topk_ids = [torch.empty(1, top_k, dtype=torch.int64) for top_k in experts]
        logits, places = torch.empty(1, len(decoder.head)), (_Block * len(experts))()
        for row, (index, noted) in enumerate(zip(knobs.blocks, topk_ids, strict=True)):
            kept = pointers(kv_cache.keys[row], kv_cache.values[row], noted)
            places[row] = _Block(*self._weights[index], *kept, experts[row])
        heads = decoder.num_heads, decoder.num_kv_heads, decoder.head_width
        rest = decoder.num_experts, decoder.expert_width, len(decoder.head), kv_cache.max_seq_len, at
        _decode()(
            *(places, _Sizes(len(experts), decoder.width, *heads, *rest)),
            *pointers(state, rotary.cosine, rotary.sine, decoder.final_norm, decoder.head, logits),
            *(decoder.norm_eps, int(decoder.normalise_top_k), torch.get_num_threads()),
        )
        self._topk_ids = dict(zip(knobs.blocks, topk_ids, strict=True))
        kv_cache.put_likeliest(logits)
        kv_cache.device_lengths += 1
        return logits

    def _refuse_others(self, kv_cache: KVCache, experts: Sequence[int]) -> None:
        decoder, rows = self._decoder, len(experts)
        kept = (rows, 1, decoder.num_kv_heads, kv_cache.max_seq_len, decoder.head_width)
        refuse_others("keys", kv_cache.keys[:rows], *kept)
        refuse_others("values", kv_cache.values[:rows], *kept)
        if kv_cache.lengths[0] >= kv_cache.max_seq_len:
            raise ValueError(f"all {kv_cache.max_seq_len} positions of the KV cache are in use")
        if any(not 0 < top_k <= decoder.num_experts for top_k in experts):
            raise ValueError(f"experts per token have to be 1 to {decoder.num_experts}, not {list(experts)}")
