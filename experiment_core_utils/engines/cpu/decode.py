"""The cpu engine of the decode step: one compiled call in float32."""

import ctypes
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from experiment_core_utils.engines.cpu.build import (
    FLOAT,
    INT,
    INT64,
    POINTER,
    HeadNorm,
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


class _Experts(ctypes.Structure):
    _fields_ = (*fields(POINTER, "gate_up", "down"), *fields(INT64, "inner"))

    @classmethod
    def of(cls, gate_up: torch.Tensor | None, down: torch.Tensor | None) -> "_Experts":
        return cls(*pointers(gate_up, down), 0 if down is None else down.shape[-1])


class _Block(ctypes.Structure):
    """`DecodeBlock` of decode_step.cpp."""

    _fields_ = (
        *fields(POINTER, "input_norm", "qkv", "qkv_bias"),
        *fields(HeadNorm, "query_norm", "key_norm"),
        *fields(POINTER, "output", "post_attention_norm", "ffn_norm", "router"),
        *fields(_Experts, "routed", "shared"),
        *fields(POINTER, "shared_gate", "post_ffn_norm", "keys", "values", "topk_ids"),
        *fields(INT64, "top_k", "experts", "window", "has_rope"),
    )

    @classmethod
    def of(cls, block: BlockWeights) -> "_Block":
        """The block's weights, for calls as long as they live; what is of a call alone is null."""
        return cls(
            *pointers(block.input_norm, block.qkv, block.qkv_bias),
            *(HeadNorm.of(block.query_norm), HeadNorm.of(block.key_norm)),
            *pointers(block.output, block.post_attention_norm, block.ffn_norm, block.router),
            *(_Experts.of(block.gate_up, block.down), _Experts.of(block.shared_gate_up, block.shared_down)),
            *pointers(block.shared_gate, block.post_ffn_norm),
            **{"experts": block.num_experts, "window": block.window or 0, "has_rope": block.has_rope},
        )


class _Sizes(ctypes.Structure):
    _fields_ = fields(
        INT64, "blocks", "width", "heads", "shared", "head_width", "vocabulary", "slots", "position"
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
        self._blocks = [_Block.of(block) for block in decoder.blocks]

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
        self._refuse_others(kv_cache, knobs)
        rotary = self._rotary_of_next(kv_cache)
        state = F.embedding(kv_cache.next_tokens, decoder.embedding)
        logits, places, topk_ids = torch.empty(1, len(decoder.head)), (_Block * len(knobs.blocks))(), {}
        for row, index in enumerate(knobs.blocks):
            top_k = decoder.experts_of(index, knobs.top_k)
            topk_ids[index] = torch.empty(1, top_k, dtype=torch.int64)
            places[row] = self._blocks[index]
            place, kept = places[row], pointers(kv_cache.keys[row], kv_cache.values[row], topk_ids[index])
            place.keys, place.values, place.topk_ids, place.top_k = *kept, top_k
        heads = decoder.num_heads, decoder.num_kv_heads, decoder.head_width
        _decode()(
            *(places, _Sizes(len(places), decoder.width, *heads, len(decoder.head), kv_cache.max_seq_len, at)),
            *pointers(state, rotary.cosine, rotary.sine, decoder.final_norm, decoder.head, logits),
            *(decoder.norm_eps, int(decoder.normalise_top_k), torch.get_num_threads()),
        )
        self._topk_ids = {index: ids for index, ids in topk_ids.items() if index in decoder.routed_blocks}
        kv_cache.put_likeliest(logits)
        kv_cache.device_lengths += 1
        return logits

    def _refuse_others(self, kv_cache: KVCache, knobs: EngineKnobs) -> None:
        decoder, rows = self._decoder, len(knobs.blocks)
        kept = (rows, 1, decoder.num_kv_heads, kv_cache.max_seq_len, decoder.head_width)
        refuse_others("keys", kv_cache.keys[:rows], *kept)
        refuse_others("values", kv_cache.values[:rows], *kept)
        if kv_cache.lengths[0] >= kv_cache.max_seq_len:
            raise ValueError(f"all {kv_cache.max_seq_len} positions of the KV cache are in use")
        if not 0 < knobs.top_k <= decoder.num_experts:
            raise ValueError(f"experts per token have to be 1 to {decoder.num_experts}, not {knobs.top_k}")
