"""A network whose convolutions run by a chosen algorithm, with a record of each layer."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.performance_prediction.algorithms.convolution import (
    AlgorithmName,
    AlgorithmRefused,
    ConvShape,
    PreparedConvolution,
    shape_of_call,
)
from experiments.performance_prediction.algorithms.engines import Placement
from experiments.performance_prediction.algorithms.reference import float64_reference
from experiments.performance_prediction.algorithms.support import (
    CombinationReport,
    OnUnsupported,
    combination_report,
    prepare_layer,
)
from experiments.performance_prediction.profiling.records import ProfileSettings


class AlgorithmConv2d(nn.Module):
    """A convolution by a chosen algorithm, followed by the bias where there is one; no gradient.

    Args:
        replaced: whose weight and bias are used.
        prepared: for inputs of one shape; an input that is not contiguous is copied first.
    """

    def __init__(self, replaced: nn.Conv2d, prepared: PreparedConvolution) -> None:
        super().__init__()
        self.replaced = replaced
        self.prepared = prepared

    def forward(self, given: Tensor) -> Tensor:
        """The convolution's output; raises ConfigurationError for an input of another shape than the prepared one."""
        if tuple(given.shape) != self.prepared.shape.input_shape:
            raise ConfigurationError(
                f"the layer is prepared for an input of {self.prepared.shape.input_shape}, not {tuple(given.shape)}"
            )
        with torch.no_grad():
            output = self.prepared.run(given.contiguous(), self.replaced.weight)
            if self.replaced.bias is not None:
                output += self.replaced.bias.view(1, -1, 1, 1)
        return output


class SwappedConvolutions(AbstractContextManager["SwappedConvolutions"]):
    """A network whose convolutions run by `algorithm` from here to `restore`, or to the end of `with`.

    Args:
        model: changed in place; on `placement`'s device and in its dtype, weights contiguous.
        shapes: of the convolutions to swap, by layer name, as `conv_shapes` gives them.
        algorithm: requested in every layer.
        placement: where.
        on_unsupported: `fail` leaves the network as it was and raises; `fallback` runs `guess` in the layer.
        model_name: for the report.

    Raises:
        AlgorithmRefused: a layer is not covered (`fail`), with all layers and reasons in the message's lines.
        OutOfMemory, CudnnFailed, ConfigurationError: as `engines.prepare`; the network is as it was.
    """

    def __init__(
        self,
        model: nn.Module,
        shapes: Mapping[str, ConvShape],
        algorithm: AlgorithmName,
        placement: Placement,
        on_unsupported: OnUnsupported = "fail",
        model_name: str = "the network",
    ) -> None:
        self.modules: dict[str, AlgorithmConv2d] = {}  #: that run now, by layer name
        with ExitStack() as restoring:
            layers, granted = [], {}
            for layer, shape in shapes.items():
                support, prepared = prepare_layer(layer, algorithm, shape, placement, on_unsupported)
                layers.append(support)
                if prepared is not None:
                    restoring.callback(prepared.close)
                    granted[layer] = prepared
            #: what runs in each layer
            self.report = CombinationReport(model_name, algorithm, tuple(layers))
            if any(each.runs is None for each in layers):
                raise AlgorithmRefused("\n".join(self.report.lines()))
            for name, prepared in granted.items():
                replaced = model.get_submodule(name)
                if not isinstance(replaced, nn.Conv2d):
                    raise ConfigurationError(f"layer {name} is {type(replaced).__name__}, not a convolution")
                requested = shape_of_call(replaced, torch.empty(prepared.shape.input_shape, device="meta"))
                if requested != prepared.shape:
                    raise ConfigurationError(f"layer {name} is {requested}, prepared was {prepared.shape}")
                self.modules[name] = AlgorithmConv2d(replaced, prepared)
                model.set_submodule(name, self.modules[name])
                restoring.callback(model.set_submodule, name, self.modules[name].replaced)
            self._restoring = restoring.pop_all()

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Put the network's own convolutions back and release the others' resources; a second call does nothing."""
        self._restoring.close()
        self.modules.clear()


@dataclass(frozen=True)
class RunningLayer:
    """A convolution layer as it runs."""

    module: nn.Module  #: what is called; bias included
    convolution: nn.Conv2d  #: the network's own module, whose weight and bias are used
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
        """The module to hook, by layer."""
        return {name: layer.module for name, layer in self.layers.items()}


@contextmanager
def running(model: nn.Module, shapes: Mapping[str, ConvShape], settings: ProfileSettings) -> Iterator[RunningNetwork]:
    """A context in which the network's convolutions run as requested. For `torch` it is unchanged: the baseline.

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
