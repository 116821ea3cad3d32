"""Networks of a few channels for the profiler, and how to profile them on the CPU."""

from typing import Any

import torch
from torch import Tensor, nn

from experiments.performance_prediction.algorithms.engines import Placement
from experiments.performance_prediction.profiler import UnifiedProfiler
from experiments.performance_prediction.profiling.records import ProfileSettings


class TwoConvolutions(nn.Module):
    """3x3 with stride 2 and a bias, which Winograd refuses, then 3x3; notes the hooks on the second at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.strided = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.plain = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.hooks_seen: list[int] = []

    def forward(self, images: Tensor) -> Tensor:
        if images.device.type != "meta":
            self.hooks_seen.append(len(self.plain._forward_hooks))
        output: Tensor = self.plain(self.strided(images)).mean((2, 3))
        return output


class OnePlain(nn.Module):
    """A 3x3 of stride 1, whose forward says that memory is gone for images beyond `largest`."""

    def __init__(self, largest: int = 10_000) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.largest = largest

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-1] > self.largest and images.device.type != "meta":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        output: Tensor = self.conv(images)
        return output


def settings_of(**changes: Any) -> ProfileSettings:
    """`torch` on the CPU, 2 inferences, no warm-up."""
    usual = {"model": "small", "algorithm": "torch", "placement": Placement(torch.device("cpu"))}
    return ProfileSettings(**{**usual, "warmup": 0, "measure": 2, **changes})


def profiler_of(model: nn.Module, **changes: Any) -> UnifiedProfiler:
    """Of a model with `settings_of`; no energy."""
    torch.manual_seed(3)
    return UnifiedProfiler(model, settings_of(**changes))
