"""Records of what a profile requests and what its passes measure, in seconds, joules and bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import torch

from experiment_core_utils.meters.host_facts import Peaks, cpu_name, git_commit, known_peaks
from experiment_core_utils.meters.nvml import NvmlGpu
from experiment_core_utils.primitives.csv_tables import Cell
from experiment_core_utils.primitives.device import gpu_uuid
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.primitives.units import MemoryReading
from experiment_core_utils.records.energy import PowerTrace
from experiments.performance_prediction.algorithms.convolution import AlgorithmName
from experiments.performance_prediction.algorithms.engines import Placement
from experiments.performance_prediction.algorithms.support import CombinationReport, OnUnsupported


@dataclass(frozen=True)
class ProfileSettings:
    """The settings of a profile that do not depend on the input size."""

    model: str
    algorithm: AlgorithmName
    placement: Placement
    on_unsupported: OnUnsupported = "fail"  #: what happens to a layer that refuses `algorithm`
    batch_size: int = 1
    #: least number of inferences before those that are measured; more follow until they are stable; 0: none
    warmup: int = 5
    measure: int = 15  #: inferences of the whole-model pass, and of the layer pass
    seed: int = 0  #: of the weights and the images


@dataclass(frozen=True)
class WholeTimes:
    """The results of the whole-model pass, in which nothing is hooked."""

    inferences_s: tuple[float, ...]  #: of each measured inference, from an idle device to the last operation's end
    num_warmup: int  #: inferences before
    is_stable: bool | None  #: whether the last of those agreed; None without warm-up
    memory: MemoryReading  #: high-water mark of the measured inferences, weights included


@dataclass(frozen=True)
class LayerPass:
    """The results of the layer pass."""

    #: of each inference of this pass. On a GPU the host has queued it before it begins, so that it can be shorter than
    #: one of the whole-model pass.
    inferences_s: tuple[float, ...]
    layers_s: Mapping[str, tuple[float, ...]]  #: by layer, one for each inference; bias included
    #: whether in any inference the GPU began a layer, or what is between two, before the host had queued all of it:
    #: times may then contain waits for the host; None on a CPU, which has no queue
    is_launch_bound: bool | None = None
    launch_bound: frozenset[str] | None = None  #: the layers of which that is so; None likewise


@dataclass(frozen=True)
class PowerWindow:
    """The readings of a power monitor between start and stop."""

    seconds: float | None = None  #: from start to stop; None where nothing was read
    traces: tuple[PowerTrace, ...] = ()  #: the readings, one trace for each device
    #: integral of the readings by the trapezoid rule, over the devices; None with a `reason`
    joules: float | None = None
    bound_j: float | None = None  #: of its error; see `power_integral.trapezoid_j`
    power_mean_w: float | None = None  #: joules / seconds
    reason: str | None = None


@dataclass(frozen=True)
class InferenceEnergy:
    """The energy of one inference, from a window in which it was repeated without a pause."""

    #: joules, bound_j, power_w: idle power included; None with a `reason`
    joules: float | None = None
    bound_j: float | None = None
    power_w: float | None = None
    window_s: float | None = None  #: length of the window
    #: source, basis: as in `EnergyOrigin`
    source: str | None = None
    basis: str | None = None
    reason: str | None = None
    remark: str | None = None  #: what the figure is weakened by


@dataclass(frozen=True)
class LayerError:
    """The relative L2 distance of a layer's output from a float64 reference on the same input; None with a `reason`."""

    relative: float | None
    reason: str | None


@dataclass(frozen=True)
class SizeProfile:
    """The profile of one input size."""

    input_size: int
    report: CombinationReport
    whole: WholeTimes
    layers: LayerPass
    energy: InferenceEnergy
    errors: Mapping[str, LayerError]  #: by layer
    #: names by layer in the order of their start; None where they are not known (no GPU)
    kernels: Mapping[str, tuple[str, ...]] | None


# Rows of one table agree in these.
IDENTITY = (
    "model", "algorithm", "device_name", "precision", "dtype", "batch_size", "backend", "on_unsupported", "seed",
    "warmup_asked", "measure", "torch", "cudnn",
)  # fmt: skip
_FAMILIES = ("NVIDIA ", "Tesla ", "GeForce ", "RTX ")


def device_name(device: torch.device) -> str:
    """The device's name as the driver or the kernel reports it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name() or "CPU"


def device_label(device: torch.device) -> str:
    """Label of the device for folders: `cpu`, or the GPU's model, such as `h100` of "NVIDIA H100 80GB HBM3"."""
    if device.type != "cuda":
        return "cpu"
    name = torch.cuda.get_device_name(device)
    for family in _FAMILIES:
        name = name.removeprefix(family)
    return name.replace("-", " ").split()[0].lower()


def peaks_of(placement: Placement) -> Peaks:
    """The peaks from the GPU's data sheet; None for the CPU."""
    if placement.device.type != "cuda":
        return Peaks(None, None, None, None, "the peaks of a CPU are not known")
    products = {"fma": "float32", "tf32": "tf32"}.get(placement.precision, str(placement.dtype).removeprefix("torch."))
    return known_peaks(torch.cuda.get_device_name(placement.device), products)


def identity_cells(settings: ProfileSettings) -> dict[str, Cell]:
    """The columns `IDENTITY`."""
    place = settings.placement
    return {
        "model": settings.model,
        "algorithm": settings.algorithm,
        "device_name": device_name(place.device),
        "precision": place.precision,
        "dtype": str(place.dtype).removeprefix("torch."),
        "batch_size": settings.batch_size,
        "backend": place.backend,
        "on_unsupported": settings.on_unsupported,
        "seed": settings.seed,
        "warmup_asked": settings.warmup,
        "measure": settings.measure,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if place.device.type == "cuda" else None,
    }


def provenance_cells(settings: ProfileSettings) -> Mapping[str, Cell]:
    """The columns `IDENTITY`, then those that may differ between rows; the time of the row's end is not among them."""
    driver, power_limit_w = _driver(settings.placement.device)
    return {
        **identity_cells(settings),
        "cuda": torch.version.cuda,
        "driver": driver,
        "power_limit_w": power_limit_w,
        "cpu_threads": torch.get_num_threads(),
        "commit": git_commit(),
    }


def timestamp() -> str:
    """The current time in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _driver(device: torch.device) -> tuple[str | None, float | None]:
    """The driver's version and the enforced power limit; None where the driver does not report them."""
    uuid = gpu_uuid(device)
    if uuid is None:
        return None, None
    try:
        known = NvmlGpu(uuid).describe()
    except MeterUnavailable:
        return None, None
    return known.driver_version, known.power_limit_w
