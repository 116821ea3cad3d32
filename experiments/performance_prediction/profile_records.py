"""In: –; out: what a profile asks for and what its passes measure, one frozen record each. Seconds, joules, bytes."""

from collections.abc import Mapping
from dataclasses import dataclass

from experiment_core_utils.records.energy import PowerTrace
from experiment_core_utils.records.requests import MemoryReading
from experiments.performance_prediction.algorithm_support import CombinationReport, OnUnsupported
from experiments.performance_prediction.convolution import AlgorithmName
from experiments.performance_prediction.engines import Placement


@dataclass(frozen=True)
class ProfileSettings:
    """How a network is profiled, whatever the input size.

    Attributes:
        on_unsupported: what happens to a layer that refuses `algorithm`.
        warmup: least number of inferences before those that are measured; more follow until they are stable; 0: none.
        measure: inferences of the whole-model pass, and of the layer pass.
        seed: of the weights and the images.
    """

    model: str
    algorithm: AlgorithmName
    placement: Placement
    on_unsupported: OnUnsupported = "fail"
    batch_size: int = 1
    warmup: int = 5
    measure: int = 15
    seed: int = 0


@dataclass(frozen=True)
class WholeTimes:
    """The whole-model pass; nothing is hooked.

    Attributes:
        inferences_s: of each measured inference, from an idle device to the last operation's end.
        num_warmup: inferences before.
        is_stable: whether the last of those agreed; None without warm-up.
        memory: high-water mark of the measured inferences, weights included.
    """

    inferences_s: tuple[float, ...]
    num_warmup: int
    is_stable: bool | None
    memory: MemoryReading


@dataclass(frozen=True)
class LayerPass:
    """The layer pass.

    Attributes:
        inferences_s: of each inference of this pass. On a GPU the host has queued it before it begins, so that it can
            be shorter than one of the whole-model pass.
        layers_s: by layer, one for each inference; bias included.
    """

    inferences_s: tuple[float, ...]
    layers_s: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class PowerWindow:
    """What a power monitor saw between start and stop.

    Attributes:
        seconds: from start to stop; None where nothing was read.
        traces: the readings, one trace for each device.
        joules: integral of the readings by the trapezoid rule, over the devices; None with a `reason`.
        bound_j: of its error; see `power_integral.trapezoid_j`.
        power_mean_w: joules / seconds.
    """

    seconds: float | None
    traces: tuple[PowerTrace, ...]
    joules: float | None
    bound_j: float | None
    power_mean_w: float | None
    reason: str | None


@dataclass(frozen=True)
class InferenceEnergy:
    """Energy of one inference, from a window in which it was repeated without a pause.

    Attributes:
        joules, bound_j, power_w: idle power included; None with a `reason`.
        window_s: length of the window.
        source, basis: as in `EnergyOrigin`.
        remark: what the figure is weakened by.
    """

    joules: float | None
    bound_j: float | None
    power_w: float | None
    window_s: float | None
    source: str | None
    basis: str | None
    reason: str | None
    remark: str | None = None


@dataclass(frozen=True)
class LayerError:
    """Relative L2 distance of a layer's output from a float64 reference on the same input; None with a `reason`."""

    relative: float | None
    reason: str | None


@dataclass(frozen=True)
class SizeProfile:
    """Everything about one input size.

    Attributes:
        errors: by layer.
        kernels: names by layer in the order of their start; None where they are not known (no GPU).
    """

    input_size: int
    report: CombinationReport
    whole: WholeTimes
    layers: LayerPass
    energy: InferenceEnergy
    errors: Mapping[str, LayerError]
    kernels: Mapping[str, tuple[str, ...]] | None
