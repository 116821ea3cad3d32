"""In: a network and an algorithm; out: the network while its convolutions run by it, and its layers to be looked at."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from experiments.performance_prediction.algorithm_support import CombinationReport, combination_report
from experiments.performance_prediction.convolution import ConvShape
from experiments.performance_prediction.layer_swap import SwappedConvolutions
from experiments.performance_prediction.numerical_error import float64_reference
from experiments.performance_prediction.profile_records import ProfileSettings


@dataclass(frozen=True)
class RunningLayer:
    """A convolution layer as it runs.

    Attributes:
        module: what is called; bias included.
        convolution: the network's own module, whose weight and bias are used.
    """

    module: nn.Module
    convolution: nn.Conv2d
    shape: ConvShape

    def reference(self, given: torch.Tensor) -> torch.Tensor:
        """The layer's output in float64."""
        output = float64_reference(given, self.convolution.weight, self.shape)
        if self.convolution.bias is not None:
            output += self.convolution.bias.double().view(1, -1, 1, 1)
        return output


@dataclass(frozen=True)
class RunningNetwork:
    """A network with an algorithm in force; `layers` in the order of their calls."""

    model: nn.Module
    report: CombinationReport
    layers: Mapping[str, RunningLayer]

    @property
    def modules(self) -> dict[str, nn.Module]:
        """What to hook, by layer."""
        return {name: layer.module for name, layer in self.layers.items()}


@contextmanager
def running(model: nn.Module, shapes: Mapping[str, ConvShape], settings: ProfileSettings) -> Iterator[RunningNetwork]:
    """Inside, the network's convolutions run as asked. For `torch` it is left as it is: the baseline.

    Raises:
        AlgorithmRefused, OutOfMemory, CudnnFailed, ConfigurationError: as `SwappedConvolutions`.
    """
    own = {name: module for name in shapes if isinstance(module := model.get_submodule(name), nn.Conv2d)}
    if settings.algorithm == "torch":
        report = combination_report(settings.model, settings.algorithm, shapes, settings.placement)
        yield RunningNetwork(model, report, {name: RunningLayer(own[name], own[name], shapes[name]) for name in shapes})
        return
    with SwappedConvolutions(
        model, shapes, settings.algorithm, settings.placement, settings.on_unsupported, settings.model
    ) as swapped:
        layers = {name: RunningLayer(swapped.modules[name], own[name], shapes[name]) for name in shapes}
        yield RunningNetwork(model, swapped.report, layers)
