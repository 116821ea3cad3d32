"""In: a network, an algorithm and an input size; out: its profile: whole-model times, layers, energy, errors, kernels.

Each is a pass of its own, so that none disturbs another. `PowerMonitor` and `CUDALayerTimer` have modules of their own.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn

from experiment_core_utils.primitives.device import MemoryWindow, new_marks, out_of_memory_named, synchronize
from experiment_core_utils.primitives.stability import is_stable, needs_another_run
from experiments.performance_prediction.algorithm_support import CombinationReport, combination_report, conv_shapes
from experiments.performance_prediction.layer_errors import layer_errors
from experiments.performance_prediction.layer_kernels import layer_kernels
from experiments.performance_prediction.layer_timer import CUDALayerTimer
from experiments.performance_prediction.power_monitor import PowerMonitor
from experiments.performance_prediction.profile_records import ProfileSettings, SizeProfile, WholeTimes
from experiments.performance_prediction.running_network import running
from experiments.performance_prediction.torch_convolution import torch_precision

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
        """Which layers the algorithm covers at this size, by asking for each; nothing is timed.

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
        """All passes at one size. The network is as it was when this returns or raises.

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
        """Drawn on the CPU, so that they are the same on every device."""
        place = self.settings.placement
        generator = torch.Generator().manual_seed(self.settings.seed)
        return torch.randn(self._input_shape(size), generator=generator).to(place.device, place.dtype)


def whole_times(
    inference: Callable[[], object], device: torch.device, num_warmup: int, num_measured: int
) -> WholeTimes:
    """Inferences one after the other, each begun on an idle device; warm-up first, until three agree within 5 %."""
    warm: list[float] = []
    while needs_another_run(warm, num_warmup, num_warmup + _WARMUP_BEYOND):
        warm.append(_seconds(inference, device))
    with MemoryWindow(device) as window:
        measured = tuple(_seconds(inference, device) for _ in range(num_measured))
        memory = window.read()
    return WholeTimes(measured, len(warm), is_stable(warm) if num_warmup else None, memory)


def _seconds(inference: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    marks = new_marks(device)
    marks.mark()
    inference()
    marks.mark()
    return marks.seconds()[0]


def _completed(inference: Callable[[], object], device: torch.device) -> None:
    inference()
    synchronize(device)
