"""The cpu engine of MolmoE's decode step: one compiled call in float32."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from experiment_core_utils.models.molmoe.engines.api import EngineKnobs
from experiment_core_utils.models.molmoe.engines.cpu.build import (
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
from experiment_core_utils.models.molmoe.engines.cpu.panels import refuse_other_places
from experiment_core_utils.models.molmoe.engines.kv_cache import KVCache
from experiment_core_utils.models.molmoe.engines.reference.decoder import ReferenceDecode
from experiment_core_utils.models.molmoe.engines.weights import BlockWeights, DecoderWeights

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


class DecodeStepKernel:
    """A compiled decode step of one request.

    Raises:
        ConfigurationError: it cannot be compiled here.
    """

    def __init__(self, decoder: DecoderWeights) -> None:
        _decode()
        self._decoder = decoder
        self._weights = [pointers(*(getattr(block, name) for name in _WEIGHTS)) for block in decoder.blocks]

    def step(
        self,
        state: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        kv_cache: KVCache,
        blocks: Sequence[int],
        experts: Sequence[int],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits [1, V] from a state [1, H], which is overwritten, and the experts [1, k] of each block; the next
        position is filled.

        Args:
            cos_sin: cosines and signed sines [1, 1, D] of the token's position.
            kv_cache: of one request; it has a position left.
            blocks: the active ones, one a row of the KV cache.
            experts: per token, of each of them.

        Raises:
            ValueError: a tensor or the KV cache has another shape, dtype or layout; nothing was written.
        """
        decoder, position = self._decoder, kv_cache.lengths[0]
        self._refuse_others(state, cos_sin, kv_cache, blocks, experts)
        topk_ids = [torch.empty(1, top_k, dtype=torch.int64) for top_k in experts]
        logits, places = torch.empty(1, len(decoder.head)), (_Block * len(blocks))()
        for row, (index, noted) in enumerate(zip(blocks, topk_ids, strict=True)):
            kept = pointers(kv_cache.keys[row], kv_cache.values[row], noted)
            places[row] = _Block(*self._weights[index], *kept, experts[row])
        heads = decoder.num_heads, decoder.num_kv_heads, decoder.head_width
        rest = decoder.num_experts, decoder.expert_width, len(decoder.head), kv_cache.max_seq_len, position
        _decode()(
            *(places, _Sizes(len(blocks), decoder.width, *heads, *rest)),
            *pointers(state, *cos_sin, decoder.final_norm, decoder.head, logits),
            *(decoder.norm_eps, int(decoder.normalise_top_k), torch.get_num_threads()),
        )
        return logits, topk_ids

    def _refuse_others(
        self,
        state: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        kv_cache: KVCache,
        blocks: Sequence[int],
        experts: Sequence[int],
    ) -> None:
        decoder = self._decoder
        kept = (len(blocks), 1, decoder.num_kv_heads, kv_cache.max_seq_len, decoder.head_width)
        sizes = {
            "the state": (state, (1, decoder.width)),
            "cosines": (cos_sin[0], (1, 1, decoder.head_width)),
            "sines": (cos_sin[1], (1, 1, decoder.head_width)),
            "keys": (kv_cache.keys[: len(blocks)], kept),
            "values": (kv_cache.values[: len(blocks)], kept),
        }
        for name, (given, wanted) in sizes.items():
            refuse_others(name, given, *wanted)
        if kv_cache.lengths[0] >= kv_cache.max_seq_len:
            raise ValueError(f"all {kv_cache.max_seq_len} positions of the KV cache are in use")
        if any(not 0 < top_k <= decoder.num_experts for top_k in experts):
            raise ValueError(f"experts per token have to be 1 to {decoder.num_experts}, not {list(experts)}")


class CpuDecode(ReferenceDecode):
    """A `DecodeEngine` by one compiled call; KV caches of several requests use `ReferenceDecode`.

    Raises:
        ConfigurationError: the decoder is not in float32 on the CPU, or the kernel cannot be compiled here.
    """

    def __init__(self, decoder: DecoderWeights) -> None:
        super().__init__(decoder)
        refuse_other_places(decoder.device, decoder.dtype)
        self._kernel = DecodeStepKernel(decoder)

    @torch.inference_mode()
    def step(self, knobs: EngineKnobs, kv_cache: KVCache) -> torch.Tensor:
        """See `DecodeEngine.step`."""
        if kv_cache.batch != 1:
            return super().step(knobs, kv_cache)
        at = kv_cache.lengths[0]
        rotary = self._rotary_for(kv_cache.max_seq_len).rows(slice(at, at + 1))
        experts = [knobs.top_k if index else self._decoder.default_top_k for index in knobs.blocks]
        state = F.embedding(kv_cache.next_tokens, self._decoder.embedding)
        cos_sin = rotary.cosine, rotary.sine
        logits, topk_ids = self._kernel.step(state, cos_sin, kv_cache, knobs.blocks, experts)
        self._topk_ids = dict(zip(knobs.blocks, topk_ids, strict=True))
        kv_cache.next_tokens.copy_(logits.argmax(dim=-1))
        kv_cache.device_lengths += 1
        return logits
