"""Compiled float32 row operations on the CPU: what blocks compute between their matrix products."""

import ctypes
from functools import cache

import torch

from experiment_core_utils.models.molmoe.engines.cpu.build import built
from experiment_core_utils.primitives.errors import ConfigurationError

_PLACE, _WHOLE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int


class RowKernels:
    """The kernels of rows.cpp; all tensors are contiguous but for the stores of keys and values.

    Raises:
        ConfigurationError: they cannot be compiled here.
    """

    def __init__(self) -> None:
        library = built("rows.cpp")
        self._normalise, self._place = library.normalise, library.place
        self._gate, self._quick_gelu, self._add_weighted = library.gate, library.quick_gelu, library.add_weighted
        self._normalise.argtypes = [*[_PLACE] * 3, *[_WHOLE] * 2, _FLOAT, _INT]
        self._place.argtypes = [*[_PLACE] * 8, *[_WHOLE] * 5, _FLOAT, _INT]
        self._gate.argtypes = [*[_PLACE] * 2, *[_WHOLE] * 2, _INT]
        self._quick_gelu.argtypes = [*[_PLACE] * 2, *[_WHOLE] * 2, _INT]
        self._add_weighted.argtypes = [*[_PLACE] * 4, *[_WHOLE] * 3, _INT]
        for function in (self._normalise, self._place, self._gate, self._quick_gelu, self._add_weighted):
            function.restype = None

    def normalise(self, rows: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> torch.Tensor:
        """[T, W] over its rows' root mean squares, times [W] -> out [T, W]."""
        given = _addresses(rows, weight, out)
        self._normalise(*given, *rows.shape, eps, torch.get_num_threads())
        return out

    def place(
        self,
        joint: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor],
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        eps: float,
        out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Rows [T, (Q + 2 * KV) * D] -> out: queries [Q, T, D], keys and values [KV, T, D], normed and turned.

        Args:
            norms: of queries [Q * D] and keys [KV * D].
            cos_sin: cosines and signed sines [T, 1, D], as of `RotaryTable`.
            out: of keys and values any part of a store in which the slots of a head are neighbours.

        Raises:
            ValueError: a tensor has another shape, dtype or layout; nothing was written.
        """
        queries, keys, values = out
        (heads, tokens, width), kv_heads = queries.shape, len(keys)
        _refuse_other_sizes(joint, norms, cos_sin, out)
        if any(each.stride()[1:] != (width, 1) or each.stride(0) % width for each in (keys, values)):
            raise ValueError("the slots of a head have to be neighbours in the store")
        if keys.stride(0) != values.stride(0) or any(each.dtype != torch.float32 for each in (keys, values)):
            raise ValueError("keys and values have to be float32 in stores of as many slots")
        kv_caches = [keys.data_ptr(), values.data_ptr()]
        given = _addresses(joint, *norms, *cos_sin, queries)
        sizes = (tokens, heads, kv_heads, width, keys.stride(0) // width)
        self._place(*given, *kv_caches, *sizes, eps, torch.get_num_threads())

    def gate(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """[R, 2 * I], gate and up -> out: silu(gate) * up [R, I]."""
        self._gate(*_addresses(hidden, out), *out.shape, torch.get_num_threads())
        return out

    def quick_gelu(self, rows: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """x * sigmoid(1.702 * x) of rows [R, W] + bias [W], in place."""
        self._quick_gelu(*_addresses(rows, bias), *rows.shape, torch.get_num_threads())
        return rows

    def add_weighted(
        self, mixed: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        """states [T, W], to which rows of `mixed` at `places` [T, k] (int64), times [T, k], are added in place."""
        if places.dtype != torch.int64 or not places.is_contiguous():
            raise ValueError("places have to be contiguous int64")
        given, weighing, to = _addresses(mixed, weights, states)
        sizes = (*weights.shape, states.shape[1])
        self._add_weighted(given, places.data_ptr(), weighing, to, *sizes, torch.get_num_threads())
        return states


def _refuse_other_sizes(
    joint: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """The kernel goes by the shape of the queries and the heads of the keys: all others have to follow from those."""
    (heads, tokens, width), kv_heads = out[0].shape, len(out[1])
    sizes = {
        "joint rows": (joint, (tokens, (heads + 2 * kv_heads) * width)),
        "norms of queries": (norms[0], (heads * width,)),
        "norms of keys": (norms[1], (kv_heads * width,)),
        "cosines": (cos_sin[0], (tokens, 1, width)),
        "sines": (cos_sin[1], (tokens, 1, width)),
        "keys": (out[1], (kv_heads, tokens, width)),
        "values": (out[2], (kv_heads, tokens, width)),
    }
    for name, (given, wanted) in sizes.items():
        if given.shape != wanted:
            raise ValueError(f"{name} of {tokens} tokens have to be {list(wanted)}, not {list(given.shape)}")


def _addresses(*tensors: torch.Tensor) -> list[int]:
    if any(each.dtype != torch.float32 or not each.is_contiguous() for each in tensors):
        raise ValueError("the kernels of rows take contiguous float32")
    return [each.data_ptr() for each in tensors]


@cache
def row_kernels() -> RowKernels:
    """The row kernels, one instance for the process."""
    return RowKernels()


def refuse_other_places(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigurationError where the kernels are not for tensors of this kind."""
    if device.type != "cpu" or dtype != torch.float32:
        raise ConfigurationError("compiled kernels are for float32 on the CPU")
