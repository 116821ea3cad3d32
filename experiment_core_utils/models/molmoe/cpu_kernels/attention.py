"""In: queries, keys and values in float32 on the CPU; out: attention by a kernel that is compiled here.

torch's own kernel takes small tiles through a general product, which costs much of the time where heads are narrow.
The compiler is run once a process and head width, for about a second.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch.nn import functional as F

from experiment_core_utils.primitives.errors import ConfigurationError, first_line

SOURCE = Path(__file__).with_name("attention.cpp")
COMPILERS = ("g++", "c++", "clang++")
# OpenMP is not linked: its functions are found in the library that torch has loaded, and so are its threads.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-Wno-psabi")
HEAD_STEP = 32

# (queries, keys, values, whether causal) -> [B, T, N * D]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


class _Strides(ctypes.Structure):
    _fields_ = (("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("token", ctypes.c_int64))


def attention_for(device: torch.device, dtype: torch.dtype, head_width: int) -> tuple[Attention, str | None]:
    """The compiled kernel where one is for this, else torch's own, and why it is torch's own in float32 on a CPU."""
    if device.type != "cpu" or dtype != torch.float32:
        return torch_attention, None
    try:
        return compiled_attention(head_width), None
    except ConfigurationError as error:
        return torch_attention, f"attention is torch's own: {error}"


def torch_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool) -> torch.Tensor:
    """[B, N, T', D] over [B, KV, T, D] -> [B, T', N * D] by torch."""
    shares_heads = queries.shape[1] != keys.shape[1]
    attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=shares_heads)
    return attended.transpose(1, 2).flatten(2)


@cache
def compiled_attention(head_width: int) -> Attention:
    """Attention of queries [B, N, T, D] over as many keys and values [B, KV, T, D], N a multiple of KV, in float32.

    The elements of a head are neighbours; the other strides are free.

    Raises:
        ConfigurationError: there is no compiler, it refuses, what it made cannot be loaded, or the width is no multiple
            of 32.
    """
    if head_width % HEAD_STEP:
        raise ConfigurationError(f"the attention kernel takes heads in multiples of {HEAD_STEP}, not {head_width}")
    attend = _built(head_width)

    def attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool) -> torch.Tensor:
        given = (queries, keys, values)
        if any(each.dtype != torch.float32 or each.stride(3) != 1 for each in given):
            raise ValueError("the attention kernel takes float32 with the elements of a head side by side")
        batch, heads, tokens, width = queries.shape
        if width != head_width or keys.shape != values.shape or keys.shape[2:] != (tokens, width):
            raise ValueError(f"the attention kernel takes as many keys as queries of width {head_width}")
        out = queries.new_empty(batch, tokens, heads, width)
        places = (*given, out)
        strides = [_Strides(*each.stride()[:3]) for each in given]
        strides.append(_Strides(out.stride(0), out.stride(2), out.stride(1)))
        attend(
            *(each.data_ptr() for each in places),
            *(batch, heads, heads // keys.shape[1], tokens),
            *strides,
            *(int(causal), torch.get_num_threads()),
        )
        return out.flatten(2)

    return attention


def _built(head_width: int) -> Callable[..., None]:
    asked = os.environ.get("CXX")
    compiler = shutil.which(asked) if asked else next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise ConfigurationError(f"there is no C++ compiler ({asked or ', '.join(COMPILERS)})")
    with tempfile.TemporaryDirectory() as folder:
        code, library = Path(folder, "attention.o"), Path(folder, "attention.so")
        _run([compiler, *FLAGS, f"-DHEAD={head_width}", "-c", str(SOURCE), "-o", str(code)])
        _run([compiler, "-shared", str(code), "-o", str(library)])
        try:
            attend: Callable[..., None] = ctypes.CDLL(str(library)).attend
        except OSError as error:
            raise ConfigurationError(f"the attention kernel cannot be loaded: {first_line(error)}") from None
    whole, number, place = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
    attend.argtypes = [*[place] * 4, *[whole] * 4, *[_Strides] * 4, number, number]  # type: ignore[attr-defined]
    attend.restype = None  # type: ignore[attr-defined]
    return attend


def _run(command: list[str]) -> None:
    """Raises ConfigurationError with what the compiler said first."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        raise ConfigurationError(f"the C++ compiler cannot be run: {first_line(error)}") from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr.splitlines() or ["nothing"])[0]
        raise ConfigurationError(f"the C++ compiler refuses the attention kernel: {said}") from None
