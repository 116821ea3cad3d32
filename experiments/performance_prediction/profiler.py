"""The profiler of a network with an algorithm: whole-model times, layers, energy, errors and kernels at an input size.

Each of them is a separate pass, so that none disturbs another.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import nn

from experiment_core_utils.meters.energy_statistics import sum_of_known
from experiment_core_utils.meters.instruments import Instruments, find_instruments, uuids_of
from experiment_core_utils.meters.power import PowerSampler, energy_of_trace
from experiment_core_utils.meters.stability import is_stable, needs_another_run
from experiment_core_utils.meters.windows import WindowGoal, energy_of_act, why_no_power
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.device import (
    CudaMarks,
    HostMarks,
    Marks,
    MemoryWindow,
    gpu_uuid,
    new_marks,
    out_of_memory_named,
    synchronize,
)
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable
from experiment_core_utils.records.energy import ActEnergy
from experiments.performance_prediction.algorithms.engines import torch_precision
from experiments.performance_prediction.algorithms.support import (
    CombinationReport,
    combination_report,
    conv_shapes,
    hooked,
)
from experiments.performance_prediction.profiling.network import running
from experiments.performance_prediction.profiling.passes import layer_errors, layer_kernels
from experiments.performance_prediction.profiling.records import (
    InferenceEnergy,
    LayerPass,
    PowerWindow,
    ProfileSettings,
    SizeProfile,
    WholeTimes,
)

# By how much more than the host needed to queue an inference the GPU is kept busy before it.
_BALLAST_FACTOR = 1.5
_BALLAST_SIDE = 2048
_PRODUCTS_TIMED = 10
_MOST_PRODUCTS = 400


class CUDALayerTimer:
    """Times layers by a mark before and after each: CUDA events on a GPU, the host's clock on the CPU.

    On a GPU the marks measure the device alone: it is kept busy with products until the host has queued the whole
    inference, so that a gap in which it waits for the host is in no layer's time. Where that fails (more launches than
    the GPU's queue holds, or a slow host) the layer is marked as launch-bound: the GPU has begun it before the host had
    queued all of it, so it may have waited.

    Args:
        layers: modules of the network by name; none is inside another.
        device: where they compute.
    """

    def __init__(self, layers: Mapping[str, nn.Module], device: torch.device) -> None:
        self._layers = dict(layers)
        self._device = device
        self._marks: Marks = new_marks(device)
        self._called: list[str] = []
        self._caught_up: list[bool] = []  # by span, see `launch_bound_layers`

    def time(self, inference: Callable[[], object], repeats: int) -> LayerPass:
        """The times of so many inferences, after one that is not timed; the hooks are removed when it returns."""
        totals: list[float] = []
        layers: dict[str, list[float]] = defaultdict(list)
        launch_bound: set[str] = set()
        is_launch_bound = False
        with hooked(self._layers, self._before, lambda *_: self._mark()):
            keep_busy = self._ballast(inference)
            for _ in range(repeats):
                synchronize(self._device)
                self._marks, self._called, self._caught_up = new_marks(self._device), [], []
                keep_busy()
                self._marks.mark()
                inference()
                self._mark()
                spans = self._marks.seconds()
                totals.append(sum(spans))
                for name, seconds in seconds_of_layers(self._called, spans).items():
                    layers[name].append(seconds)
                launch_bound |= launch_bound_layers(self._called, self._caught_up)
                is_launch_bound |= any(self._caught_up)
        known = self._device.type == "cuda"
        return LayerPass(
            tuple(totals),
            {name: tuple(seconds) for name, seconds in layers.items()},
            is_launch_bound if known else None,
            frozenset(launch_bound) if known else None,
        )

    def _before(self, name: str, *_: Any) -> None:
        self._called.append(name)
        self._mark()

    def _mark(self) -> None:
        """End a span; where the GPU has reached its beginning by now, it was not all queued before."""
        self._caught_up.append(isinstance(self._marks, CudaMarks) and self._marks.newest_is_reached())
        self._marks.mark()

    def _ballast(self, inference: Callable[[], object]) -> Callable[[], None]:
        """Work for a GPU that lasts longer than the host needs to queue an inference; none for the CPU."""
        host = HostMarks()
        host.mark()
        inference()
        host.mark()
        synchronize(self._device)
        if self._device.type != "cuda":
            # The host computes itself: there is no queue to fill.
            return lambda: None
        factor = torch.zeros(_BALLAST_SIDE, _BALLAST_SIDE, device=self._device)
        product = torch.empty_like(factor)
        torch.mm(factor, factor, out=product)

        def multiply(times: int) -> None:
            for _ in range(times):
                torch.mm(factor, factor, out=product)

        product_s = seconds_of(partial(multiply, _PRODUCTS_TIMED), self._device) / _PRODUCTS_TIMED
        return partial(multiply, min(ceil(_BALLAST_FACTOR * host.seconds()[0] / product_s), _MOST_PRODUCTS))


def seconds_of(run: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Seconds of so many runs in a row, from an idle device to the last one's end there."""
    synchronize(device)
    marks = new_marks(device)
    marks.mark()
    for _ in range(times):
        run()
    marks.mark()
    return marks.seconds()[0]


def seconds_of_layers(called: Sequence[str], spans: Sequence[float]) -> dict[str, float]:
    """Seconds of each layer, of all its calls together.

    Args:
        called: layers in the order of their calls.
        spans: between the marks: before the first call, the call, up to the next, the call, …, after the last.
    """
    layers: dict[str, float] = defaultdict(float)
    for name, seconds in zip(called, spans[1::2], strict=True):
        layers[name] += seconds
    return dict(layers)


def launch_bound_layers(called: Sequence[str], caught_up: Sequence[bool]) -> set[str]:
    """The layers whose time may contain waits for the host.

    Args:
        called: layers in the order of their calls.
        caught_up: of each span between marks, as `seconds_of_layers` has them, whether the device had begun it before
            the host had queued all of it.
    """
    return {name for name, found in zip(called, caught_up[1::2], strict=True) if found}


NOT_REQUESTED = "energy was not requested (--energy off)"


def instruments_of(device: torch.device) -> Instruments:
    """The instruments of this device's energy: that GPU's counter and power, or the CPU's counters; not calibrated."""
    found = find_instruments(uuids_of([device]), HostClock())
    uuid = gpu_uuid(device)
    return found if uuid is None else found.of_device(uuid)


class PowerMonitor:
    """The power of a device over time, by the project's meters.

    Args:
        using: what reads it, calibrated; None where nothing is to be read.
        goal: how long a window of `energy_of` is to be; None for the usual one.
    """

    def __init__(self, using: Instruments | None, goal: WindowGoal | None = None) -> None:
        self._using = using
        self._goal = goal
        self._sampler: PowerSampler | None = None
        self._started_s = math.nan

    def start(self) -> None:
        """Begin a trace; without a power reading the stop reports it. Raises ConfigurationError where one is open."""
        if self._sampler is not None:
            raise ConfigurationError("this power monitor has started already; stop it before starting it again")
        if self._using is None or not self._using.probes:
            return
        self._sampler = self._using.power_sampler()
        self._sampler.start()
        self._started_s = self._using.clock.now_s()

    def stop(self) -> PowerWindow:
        """End the trace. The caller has synchronised the device."""
        if self._using is None:
            return PowerWindow(reason=NOT_REQUESTED)
        if self._sampler is None:
            return PowerWindow(reason=why_no_power(self._using) or "the power monitor was not started")
        ended_s = self._using.clock.now_s()
        sampler, self._sampler = self._sampler, None
        traces = sampler.stop()
        parts = [energy_of_trace(trace, self._started_s, ended_s, has_steps_at_ends=True) for trace in traces]
        seconds = ended_s - self._started_s
        missing = [f"{part.origin.device}: {part.reason}" for part in parts if part.joules is None]
        if missing or seconds <= 0:
            return PowerWindow(seconds, traces, reason="; ".join(missing) or "the window has no length")
        joules = math.fsum(part.joules for part in parts if part.joules is not None)
        bound_j = math.fsum(part.bound_j for part in parts if part.bound_j is not None)
        return PowerWindow(seconds, traces, joules, bound_j, joules / seconds)

    def energy_of(self, inference: Callable[[], object]) -> InferenceEnergy:
        """The energy of one inference, which is repeated in a window that is long enough for the meter's tick.

        The device's own counter is preferred to integrated power readings.

        Args:
            inference: returns when the device has done all of it; warmed up.
        """
        if self._using is None:
            return InferenceEnergy(reason=NOT_REQUESTED)
        try:
            return figure_of(energy_of_act(inference, self._using, self._goal))
        except MeterUnavailable as error:
            return InferenceEnergy(reason=str(error))


def figure_of(acts: Sequence[ActEnergy]) -> InferenceEnergy:
    """The figure from all sources: of GPUs where there are any, by counters where they have one."""
    component = "gpu" if any(act.origin.component == "gpu" for act in acts) else "cpu"
    of_component = [act for act in acts if act.origin.component == component]
    known = [act for act in of_component if act.joules is not None]
    chosen = [act for act in known if act.origin.basis == "counter"] or known
    if not chosen:
        reasons = [f"{act.origin.device}: {act.reason}" for act in of_component]
        return InferenceEnergy(reason="; ".join(reasons) or "no meter reports the energy of the device that computes")
    powers = [act.joules / act.act_s for act in chosen if act.joules is not None and act.act_s]
    return InferenceEnergy(
        joules=sum_of_known([act.joules for act in chosen]),
        bound_j=sum_of_known([act.bound_j for act in chosen]),
        power_w=math.fsum(powers),
        window_s=chosen[0].window_s,
        source=chosen[0].origin.source,
        basis=chosen[0].origin.basis,
        remark="; ".join(dict.fromkeys(act.remark for act in chosen if act.remark is not None)) or None,
    )


__all__ = ["CUDALayerTimer", "PowerMonitor", "UnifiedProfiler"]
# A warm-up that does not become stable ends after this many inferences more than were requested.
_WARMUP_BEYOND = 30
_CHANNELS = 3


class UnifiedProfiler:
    """Profiles one network with one algorithm at one input size after another.

    Args:
        model: in evaluation mode; moved to the settings' device and dtype.
        settings: whatever does not change with the size.
        monitor: reads energy; None where that is not requested.
    """

    def __init__(self, model: nn.Module, settings: ProfileSettings, monitor: PowerMonitor | None = None) -> None:
        self.settings = settings
        place = settings.placement
        self._model = model.eval().to(place.device, place.dtype)
        self._monitor = monitor or PowerMonitor(None)

    def support(self, input_size: int) -> CombinationReport:
        """The layers that the algorithm covers at this size, by requesting each; nothing is timed.

        Raises:
            ConfigurationError: the network takes no such input.
            OutOfMemory, CudnnFailed: as `engines.prepare`.
        """
        shapes = conv_shapes(self._model, self._input_shape(input_size))
        settings = self.settings
        return combination_report(
            settings.model, settings.algorithm, shapes, settings.placement, settings.on_unsupported
        )

    def profile(self, input_size: int) -> SizeProfile:
        """The profile of all passes at one size. The network is unchanged when this returns or raises.

        Raises:
            AlgorithmRefused: a layer is not covered and there is no fallback.
            OutOfMemory: no memory in any of the passes but that of errors, where the layer says so.
            CudnnFailed, ConfigurationError: as `SwappedConvolutions`.
        """
        settings, device = self.settings, self.settings.placement.device
        shapes = conv_shapes(self._model, self._input_shape(input_size))
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(out_of_memory_named())
            stack.enter_context(torch_precision(settings.placement.precision))
            network = stack.enter_context(running(self._model, shapes, settings))
            inference = partial(self._model, self._images(input_size))
            return SizeProfile(
                input_size=input_size,
                report=network.report,
                whole=whole_times(inference, device, settings.warmup, settings.measure),
                layers=CUDALayerTimer(network.modules, device).time(inference, settings.measure),
                energy=self._monitor.energy_of(partial(_completed, inference, device)),
                errors=layer_errors(network.layers, inference),
                kernels=layer_kernels(network.layers, device),
            )

    def _input_shape(self, size: int) -> tuple[int, int, int, int]:
        return self.settings.batch_size, _CHANNELS, size, size

    def _images(self, size: int) -> torch.Tensor:
        """Random images, drawn on the CPU, so that they are the same on every device."""
        place = self.settings.placement
        generator = torch.Generator().manual_seed(self.settings.seed)
        return torch.randn(self._input_shape(size), generator=generator).to(place.device, place.dtype)


def whole_times(
    inference: Callable[[], object], device: torch.device, num_warmup: int, num_measured: int
) -> WholeTimes:
    """Times of inferences in a row, each started on an idle device; warm-up first, until three agree within 5 %."""
    warm: list[float] = []
    while needs_another_run(warm, num_warmup, num_warmup + _WARMUP_BEYOND):
        warm.append(seconds_of(inference, device))
    with MemoryWindow(device) as window:
        measured = tuple(seconds_of(inference, device) for _ in range(num_measured))
        memory = window.read()
    return WholeTimes(measured, len(warm), is_stable(warm) if num_warmup else None, memory)


def _completed(inference: Callable[[], object], device: torch.device) -> None:
    inference()
    synchronize(device)
