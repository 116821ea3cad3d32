"""In: packed weights, a store of one request and a token's state; out: logits, by one compiled call in float32."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from experiment_core_utils.models.molmoe.cpu_kernels.building import built
from experiment_core_utils.models.molmoe.key_value_store import KeyValueStore
from experiment_core_utils.models.molmoe.packed_blocks import PackedBlock, PackedDecoder

_PLACE, _WHOLE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_WEIGHTS = tuple(PackedBlock.__dataclass_fields__)


class _Block(ctypes.Structure):
    """`DecodeBlock` of decode_step.cpp; the weights are in the order of `PackedBlock`."""

    _fields_ = (
        *((name, _PLACE) for name in _WEIGHTS),
        *((name, _PLACE) for name in ("keys", "values", "chosen")),
        ("top_k", _WHOLE),
    )


class _Sizes(ctypes.Structure):
    _fields_ = tuple(
        (name, _WHOLE)
        for name in (
            *("blocks", "width", "heads", "shared", "head_width", "experts", "inner"),
            *("vocabulary", "slots", "position"),
        )
    )


@cache
def _decode() -> Any:
    decode: Any = built("decode_step.cpp").decode
    decode.argtypes = [_PLACE, _Sizes, *[_PLACE] * 6, _FLOAT, *[_INT] * 2]
    decode.restype = None
    return decode


class DecodeStepKernel:
    """A whole step of one request.

    Raises:
        ConfigurationError: it cannot be compiled here.
    """

    def __init__(self, decoder: PackedDecoder) -> None:
        _decode()
        self._decoder = decoder
        self._weights = [tuple(getattr(block, name).data_ptr() for name in _WEIGHTS) for block in decoder.blocks]

    def step(
        self,
        state: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        store: KeyValueStore,
        blocks: Sequence[int],
        experts: Sequence[int],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """State [1, H], overwritten -> logits [1, V], and the experts [1, k] of each block; the next slot is filled.

        Args:
            turn: cosines and signed sines [1, 1, D] of the token's position.
            store: of one request; it has a slot left.
            blocks: that run, one a row of the store.
            experts: per token, of each of them.

        Raises:
            ValueError: a tensor or the store has another shape, dtype or layout; nothing was written.
        """
        decoder, position = self._decoder, store.lengths[0]
        self._refuse_others(state, turn, store, blocks, experts)
        chosen = [torch.empty(1, top_k, dtype=torch.int64) for top_k in experts]
        logits, places = torch.empty(1, len(decoder.head)), (_Block * len(blocks))()
        for row, (index, noted) in enumerate(zip(blocks, chosen, strict=True)):
            kept = store.keys[row].data_ptr(), store.values[row].data_ptr(), noted.data_ptr()
            places[row] = _Block(*self._weights[index], *kept, experts[row])
        heads = decoder.num_heads, decoder.num_kv_heads, decoder.head_width
        rest = decoder.num_experts, decoder.expert_width, len(decoder.head), store.slots, position
        _decode()(
            *(places, _Sizes(len(blocks), decoder.width, *heads, *rest)),
            *(each.data_ptr() for each in (state, *turn, decoder.final_norm, decoder.head, logits)),
            *(decoder.norm_eps, int(decoder.normalise_top_k), torch.get_num_threads()),
        )
        return logits, chosen

    def _refuse_others(
        self,
        state: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        store: KeyValueStore,
        blocks: Sequence[int],
        experts: Sequence[int],
    ) -> None:
        decoder = self._decoder
        kept = (len(blocks), 1, decoder.num_kv_heads, store.slots, decoder.head_width)
        sizes = {
            "the state": (state, (1, decoder.width)),
            "cosines": (turn[0], (1, 1, decoder.head_width)),
            "sines": (turn[1], (1, 1, decoder.head_width)),
            "keys": (store.keys[: len(blocks)], kept),
            "values": (store.values[: len(blocks)], kept),
        }
        for name, (given, wanted) in sizes.items():
            if given.shape != wanted or given.dtype != torch.float32 or not given.is_contiguous():
                raise ValueError(f"{name} have to be contiguous float32 {list(wanted)}, not {list(given.shape)}")
        if store.lengths[0] >= store.slots:
            raise ValueError(f"all {store.slots} slots of the store are in use")
        if any(not 0 < top_k <= decoder.num_experts for top_k in experts):
            raise ValueError(f"experts per token have to be 1 to {decoder.num_experts}, not {list(experts)}")
