"""Whether an algorithm is granted in each layer of a network at an input size, and why not."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.texts import all_of, counted, first_of
from experiments.performance_prediction.algorithms.convolution import (
    AlgorithmName,
    AlgorithmRefused,
    ConvShape,
    Engine,
    PreparedConvolution,
    shape_of_call,
)
from experiments.performance_prediction.algorithms.engines import Placement, prepare

OnUnsupported = Literal["fail", "fallback"]
ON_UNSUPPORTED: tuple[OnUnsupported, ...] = get_args(OnUnsupported)
# What runs where the algorithm that was requested does not.
FALLBACK: AlgorithmName = "guess"
_LAYERS_NAMED = 8


@dataclass(frozen=True)
class LayerSupport:
    """A convolution of a network and the algorithm that is to run there."""

    layer: str  #: its name in the network
    shape: ConvShape  #: of its call
    requested: AlgorithmName  #: the algorithm that was requested
    runs: AlgorithmName | None  #: the algorithm that runs; None where none does
    engine: Engine | None  #: whose code; None where none
    fell_back: bool  #: `runs` replaces `requested`, which was refused
    reason: str | None  #: of the refusal; None where `requested` was granted
    workspace_bytes: int | None  #: of what runs; None where not known


@dataclass(frozen=True)
class CombinationReport:
    """The support of one algorithm in a network: `layers` in the order of their calls."""

    model: str
    algorithm: AlgorithmName
    layers: tuple[LayerSupport, ...]

    @property
    def refused(self) -> tuple[LayerSupport, ...]:
        """The layers where the requested algorithm does not run."""
        return tuple(layer for layer in self.layers if layer.reason is not None)

    @property
    def refused_flops_share(self) -> float:
        """Fraction of the convolutions' FLOPs in the layers without support."""
        return sum(layer.shape.flops for layer in self.refused) / sum(layer.shape.flops for layer in self.layers)

    def lines(self) -> list[str]:
        """The lines for the user: one, and one more for each reason with its layers."""
        if not self.refused:
            return [f"{self.algorithm} covers {all_of(len(self.layers), 'convolution')} of {self.model}"]
        by_reason: dict[str, list[str]] = {}
        for layer in self.refused:
            by_reason.setdefault(str(layer.reason), []).append(layer.layer)
        return [
            f"{self.algorithm} does not cover {len(self.refused)} of {counted(len(self.layers), 'convolution')} of "
            f"{self.model} ({self.refused_flops_share:.0%} of their FLOPs)",
            *(f"  {reason}: {first_of(layers, _LAYERS_NAMED)}" for reason, layers in by_reason.items()),
        ]


def conv_shapes(model: nn.Module, input_shape: Sequence[int]) -> dict[str, ConvShape]:
    """The convolutions of one forward pass by layer name, in the order of their calls; nothing is computed.

    Args:
        model: on any device; it runs here on meta tensors and stays as it is.
        input_shape: [batch, channels, height, width].

    Raises:
        ConfigurationError: an input too small for the network, a layer called with two shapes, or one not covered.
    """
    found: dict[str, ConvShape] = {}
    convolutions = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    state = {name: tensor.to("meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    dtype = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), torch.float32)
    try:
        with torch.no_grad(), hooked(convolutions, before=partial(_note, found)):
            functional_call(model, state, (torch.empty(*input_shape, dtype=dtype, device="meta"),))
    except RuntimeError as error:
        raise ConfigurationError(
            f"the network does not take an input of {list(input_shape)}; take a larger one: {error}"
        ) from error
    return found


@contextmanager
def hooked(
    modules: Mapping[str, nn.Module],
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> Iterator[None]:
    """A context in which each call of these modules is noted.

    Args:
        before: is called with name, module and inputs.
        after: is called with name, module, inputs and output.
    """
    with ExitStack() as hooks:
        for name, module in modules.items():
            if before is not None:
                hooks.callback(module.register_forward_pre_hook(partial(before, name)).remove)
            if after is not None:
                hooks.callback(module.register_forward_hook(partial(after, name)).remove)
        yield


def _note(found: dict[str, ConvShape], name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    assert isinstance(module, nn.Conv2d)
    shape = shape_of_call(module, inputs[0])
    if found.setdefault(name, shape) != shape:
        raise ConfigurationError(f"layer {name} is called with two shapes, {found[name]} and {shape}: not covered")


def prepare_layer(
    layer: str, algorithm: AlgorithmName, shape: ConvShape, placement: Placement, on_unsupported: OnUnsupported
) -> tuple[LayerSupport, PreparedConvolution | None]:
    """The support of a layer, and the convolution that runs there, None where nothing runs.

    Raises:
        OutOfMemory, CudnnFailed, ConfigurationError: as `engines.prepare`; a refusal is recorded, not raised, but for
            that of the fallback (AlgorithmRefused).
    """
    reason = None
    try:
        prepared = prepare(algorithm, shape, placement)
    except AlgorithmRefused as refused:
        reason = str(refused)
        if on_unsupported == "fail":
            return LayerSupport(layer, shape, algorithm, None, None, False, reason, None), None
        prepared = replace(prepare(FALLBACK, shape, placement), requested=algorithm)
    support = LayerSupport(
        layer, shape, algorithm, prepared.runs, prepared.engine, reason is not None, reason, prepared.workspace_bytes
    )
    return support, prepared


def combination_report(
    model: str,
    algorithm: AlgorithmName,
    shapes: Mapping[str, ConvShape],
    placement: Placement,
    on_unsupported: OnUnsupported = "fail",
) -> CombinationReport:
    """The support of every layer, before anything is timed; each shape is requested once. Raises as `prepare_layer`."""
    answers: dict[ConvShape, LayerSupport] = {}
    for layer, shape in shapes.items():
        if shape not in answers:
            answers[shape], prepared = prepare_layer(layer, algorithm, shape, placement, on_unsupported)
            if prepared is not None:
                prepared.close()
    return CombinationReport(
        model, algorithm, tuple(replace(answers[shape], layer=layer) for layer, shape in shapes.items())
    )
