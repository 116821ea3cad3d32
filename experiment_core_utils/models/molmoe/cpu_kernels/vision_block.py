"""In: a block of a vision tower in float32 on the CPU; out: its products and norms, in two compiled calls."""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from experiment_core_utils.models.molmoe.cpu_kernels.building import built
from experiment_core_utils.models.molmoe.cpu_kernels.products import Panels, ProductPlace, panels_of

_PLACE, _WHOLE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class NormPlace(ctypes.Structure):
    """`Norm` of vision_rows.h."""

    _fields_ = (("weights", _PLACE), ("bias", _PLACE), ("eps", ctypes.c_float))

    @classmethod
    def of(cls, norm: nn.LayerNorm) -> "NormPlace":
        """For a call; valid as long as the norm lives."""
        return cls(norm.weight.data_ptr(), norm.bias.data_ptr(), norm.eps)


@cache
def _library() -> Any:
    library: Any = built("vision_block.cpp")
    library.vision_project.argtypes = [_PLACE, NormPlace, ProductPlace, _PLACE, _WHOLE, _INT]
    library.vision_finish.argtypes = [
        _PLACE,
        _PLACE,
        ProductPlace,
        NormPlace,
        ProductPlace,
        ProductPlace,
        _WHOLE,
        _INT,
    ]
    library.vision_project.restype = library.vision_finish.restype = None
    return library


def tile_width() -> int:
    """Columns of a panel.

    Raises:
        ConfigurationError: the kernels cannot be compiled here.
    """
    return int(_library().tile_width())


@dataclass(frozen=True)
class VisionBlockKernel:
    """A block without its attention; C wide, its inner width I.

    Attributes:
        first_norm: before queries, keys and values.
        joint: their products [3 * C, C] as one.
        output: [C, C], behind attention.
        second_norm: before the inner product.
        inner: [I, C], then the quick GELU.
        outer: [C, I].
    """

    first_norm: nn.LayerNorm
    joint: Panels
    output: Panels
    second_norm: nn.LayerNorm
    inner: Panels
    outer: Panels

    def project(self, states: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """States [R, C] -> out [R, 3 * C]: queries, keys and values of the normed states."""
        refuse_other_rows(states, len(states), self.output.columns)
        refuse_other_rows(out, len(states), self.joint.columns)
        norm, places = NormPlace.of(self.first_norm), (states.data_ptr(), out.data_ptr())
        _library().vision_project(places[0], norm, self.joint.place, places[1], len(states), torch.get_num_threads())
        return out

    def finish(self, attended: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Both residual sums, into states [R, C]: the output of attended [R, C], and the product through I."""
        refuse_other_rows(attended, len(states), self.output.weights.shape[1])
        refuse_other_rows(states, len(states), self.output.columns)
        places = attended.data_ptr(), states.data_ptr()
        products = self.inner.place, self.outer.place
        norm, threads = NormPlace.of(self.second_norm), torch.get_num_threads()
        _library().vision_finish(*places, self.output.place, norm, *products, len(states), threads)
        return states


def vision_block_kernel(layer: Any, qkv: torch.Tensor, qkv_bias: torch.Tensor) -> VisionBlockKernel:
    """Kernel of a CLIP layer, the weights [3 * C, C] and biases of its queries, keys and values joined.

    Raises:
        ConfigurationError: the kernels cannot be compiled here.
    """
    tile, mlp, output = tile_width(), layer.mlp, layer.self_attn.out_proj
    return VisionBlockKernel(
        layer.layer_norm1,
        panels_of(qkv, qkv_bias, tile),
        panels_of(output.weight.detach(), output.bias.detach(), tile),
        layer.layer_norm2,
        panels_of(mlp.fc1.weight.detach(), mlp.fc1.bias.detach(), tile),
        panels_of(mlp.fc2.weight.detach(), mlp.fc2.bias.detach(), tile),
    )


def refuse_other_rows(rows: torch.Tensor, *size: int) -> None:
    """Raises ValueError for what the kernels would read wrongly."""
    if rows.dtype != torch.float32 or not rows.is_contiguous() or rows.shape != size:
        raise ValueError(f"the kernels of blocks take contiguous float32 {list(size)}, not {list(rows.shape)}")
