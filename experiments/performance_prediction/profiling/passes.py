"""The passes over a running network's layers: errors against a float64 reference, and kernel names."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from experiment_core_utils.primitives.device import out_of_memory_named, synchronize
from experiment_core_utils.primitives.errors import OutOfMemory
from experiments.performance_prediction.algorithms.convolution import ConvShape
from experiments.performance_prediction.algorithms.on_cpu import torch_choice
from experiments.performance_prediction.algorithms.reference import relative_l2
from experiments.performance_prediction.algorithms.support import hooked
from experiments.performance_prediction.profiling.network import AlgorithmConv2d, RunningLayer
from experiments.performance_prediction.profiling.records import LayerError


def layer_errors(layers: Mapping[str, RunningLayer], inference: Callable[[], object]) -> dict[str, LayerError]:
    """Numerical errors by layer, from one inference that is not timed.

    Each layer is compared on the input that it gets, with the errors of earlier layers: they are not counted twice.
    """
    found: dict[str, LayerError] = {}

    def note(name: str, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found[name] = _error(layers[name], inputs[0], output)

    with hooked({name: layer.module for name, layer in layers.items()}, after=note):
        inference()
    return found


def _error(layer: RunningLayer, given: Tensor, output: Tensor) -> LayerError:
    try:
        with out_of_memory_named():
            relative = relative_l2(output, layer.reference(given))
    except OutOfMemory as error:
        return LayerError(None, f"no memory for the float64 reference: {error}")
    if relative is None:
        return LayerError(None, "the reference is zero everywhere")
    if not math.isfinite(relative):
        return LayerError(None, "the output is not finite")
    return LayerError(relative, None)


def kernel_names(run: Callable[[], object], device: torch.device) -> tuple[str, ...]:
    """Names of the kernels, copies and fills of one run in the order of their start; nothing where there is no GPU.

    The run is slowed down: it is never one that is timed.
    """
    if device.type != "cuda":
        return ()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as session:
        run()
        synchronize(device)
    found = [event for event in session.events() if event.device_type == DeviceType.CUDA]
    return tuple(event.name for event in sorted(found, key=lambda event: event.time_range.start))


def kernel_names_of_each(runs: Sequence[Callable[[], object]], device: torch.device) -> list[tuple[str, ...]] | None:
    """The kernel names of several runs in one session, which takes long to begin and to end.

    None where there is no GPU, or where the session's list cannot be parted: a kernel that no run has, before each of
    them, is what it is parted at.
    """
    if device.type != "cuda":
        return None
    one = torch.ones(1, device=device)

    def all_runs() -> None:
        for run in runs:
            torch.nextafter(one, one)
            run()

    return parted(kernel_names(all_runs, device), len(runs))


def parted(names: Sequence[str], count: int) -> list[tuple[str, ...]] | None:
    """The names after each occurrence of the first one; None where it does not occur `count` times."""
    if not names or names.count(names[0]) != count:
        return None
    parts: list[list[str]] = []
    for name in names:
        if name == names[0]:
            parts.append([])
        else:
            parts[-1].append(name)
    return [tuple(part) for part in parts]


def counted(names: Sequence[str]) -> str:
    """Each name once, in the order of first occurrence, with how often it ran: "a x2 + b"."""
    return " + ".join(name if times == 1 else f"{name} x{times}" for name, times in Counter(names).items())


def without_arguments(name: str) -> str:
    """A C++ kernel's name with its template's arguments, without its result and the types of what it is called with.

    "void a::b<float, 3>(int, float*)" becomes "a::b<float, 3>".
    """
    depth = 0
    for place, character in enumerate(name):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth == 0 and not name.startswith("(anonymous namespace)", place):
            name = name[:place]
            break
    return name.removeprefix("void ")


def layer_kernels(layers: Mapping[str, RunningLayer], device: torch.device) -> dict[str, tuple[str, ...]] | None:
    """Kernels by layer without the bias's, None where not known; layers of one shape are measured once."""
    first: dict[ConvShape, RunningLayer] = {}
    for layer in layers.values():
        first.setdefault(layer.shape, layer)
    found = kernel_names_of_each([partial(_convolve, layer) for layer in first.values()], device)
    if found is None:
        return None
    by_shape = dict(zip(first, found, strict=True))
    return {name: by_shape[layer.shape] for name, layer in layers.items()}


def _convolve(layer: RunningLayer) -> Tensor:
    weight = layer.convolution.weight
    given = torch.empty(layer.shape.input_shape, dtype=weight.dtype, device=weight.device)
    if isinstance(layer.module, AlgorithmConv2d):
        return layer.module.prepared.run(given, weight)
    return torch_choice(given, weight, layer.shape)
