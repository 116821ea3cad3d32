"""Attention in float32 on the CPU by a compiled kernel.

torch's own kernel computes small tiles by a general matrix product, which costs much of the time where heads are
narrow.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from experiment_core_utils.engines.cpu.build import INT, INT64, POINTER, built, declared, fields, pointers
from experiment_core_utils.primitives.errors import ConfigurationError

# Of narrower heads much of a vector would be empty.
HEAD_STEP, NARROWEST_HEAD = 8, 32
# (queries, keys, values, whether causal, with what window) -> [B, T, N * D]
Attention = Callable[..., torch.Tensor]


class _Strides(ctypes.Structure):
    _fields_ = fields(INT64, "batch", "head", "token")


@cache
def cpu_attention(head_width: int) -> Attention:
    """Attention of queries [B, N, T, D] over as many keys and values [B, KV, T, D], N a multiple of KV, in float32.

    The elements of a head are neighbours; the other strides are free. Of a window W a causal query sees itself and the
    W - 1 keys before it.

    Raises:
        ConfigurationError: it cannot be compiled here, or the width is below 32 or not a multiple of 8.
    """
    if head_width % HEAD_STEP or head_width < NARROWEST_HEAD:
        takes = f"multiples of {HEAD_STEP} from {NARROWEST_HEAD} on"
        raise ConfigurationError(f"the attention kernel takes heads in {takes}, not {head_width}")
    types = [*[POINTER] * 4, *[INT64] * 4, *[_Strides] * 4, INT, INT64, INT]
    attend = declared(built("attention.cpp", HEAD=head_width), attend=types).attend

    def attention(
        queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool, window: int | None = None
    ) -> torch.Tensor:
        given = (queries, keys, values)
        if any(each.dtype != torch.float32 or each.stride(3) != 1 for each in given):
            raise ValueError("the attention kernel takes float32 with the elements of a head side by side")
        batch, heads, tokens, width = queries.shape
        if width != head_width or keys.shape != values.shape or keys.shape[2:] != (tokens, width):
            raise ValueError(f"the attention kernel takes as many keys as queries of width {head_width}")
        if window is not None and not (causal and window > 0):
            raise ValueError(f"a window of {window} is not possible; give 1 or more, with causal attention")
        out = queries.new_empty(batch, tokens, heads, width)
        strides = [_Strides(*each.stride()[:3]) for each in given]
        strides.append(_Strides(out.stride(0), out.stride(2), out.stride(1)))
        attend(
            *pointers(*given, out),
            *(batch, heads, heads // keys.shape[1], tokens),
            *strides,
            *(int(causal), window or 0, torch.get_num_threads()),
        )
        return out.flatten(2)

    return attention
