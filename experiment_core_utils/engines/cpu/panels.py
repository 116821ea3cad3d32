"""What the CPU's fused blocks share: a tower's weights in panels, buffers, and a check of what they take."""

import ctypes
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from experiment_core_utils.engines.cpu.build import INT64, POINTER, fields, pointers
from experiment_core_utils.primitives.errors import ConfigurationError


class ProductPlace(ctypes.Structure):
    """The struct `Product` of products.h."""

    _fields_ = (*fields(POINTER, "weights", "bias"), *fields(INT64, "inner", "columns"))


@dataclass(frozen=True)
class Panels:
    """A weight [N, K] in panels of `tile` columns, the last filled with zeros."""

    weights: torch.Tensor  #: [N / tile rounded up, K, tile]
    bias: torch.Tensor  #: [N rounded up to whole panels], zeros where there is none
    columns: int  #: N, those of value

    @property
    def place(self) -> ProductPlace:
        """For a call; valid as long as the panels live."""
        return ProductPlace(*pointers(self.weights, self.bias), self.weights.shape[1], self.columns)


def panels_of(weight: torch.Tensor, bias: torch.Tensor | None, tile: int) -> Panels:
    """Panels of a weight [N, K] and its bias [N]."""
    columns = len(weight)
    fill = -columns % tile
    padded_bias = weight.new_zeros(columns + fill)
    if bias is not None:
        padded_bias[:columns] = bias
    panels = F.pad(weight, (0, 0, 0, fill)).view(-1, tile, weight.shape[1]).transpose(1, 2).contiguous()
    return Panels(panels, padded_bias, columns)


def refuse_other_places(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigurationError where the kernels are not for tensors of this kind."""
    if device.type != "cpu" or dtype != torch.float32:
        raise ConfigurationError("compiled kernels are for float32 on the CPU")


class Workspace:
    """Float32 buffers on the CPU by name; a buffer's content is lost when another size is requested under its name."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    @torch.inference_mode(False)
    def buffer(self, name: str, *size: int) -> torch.Tensor:
        """A contiguous buffer of this size, in memory that grows with the largest one."""
        elements = torch.Size(size).numel()
        if name not in self._buffers or self._buffers[name].numel() < elements:
            self._buffers[name] = torch.empty(elements)
        return self._buffers[name][:elements].view(size)
