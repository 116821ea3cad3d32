"""In: a device and how it is profiled; out: what figures hold for: the columns that must agree, and those that tell."""

from collections.abc import Mapping
from datetime import UTC, datetime

import torch

from experiment_core_utils.meters.host_facts import Peaks, cpu_name, git_commit, known_peaks
from experiment_core_utils.meters.nvml import NvmlGpu
from experiment_core_utils.primitives.csv_tables import Cell
from experiment_core_utils.primitives.device import gpu_uuid
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiments.performance_prediction.engines import Placement
from experiments.performance_prediction.profile_records import ProfileSettings

# Rows of one table agree in these.
IDENTITY = (
    "model", "algorithm", "device_name", "precision", "dtype", "batch_size", "backend", "on_unsupported", "seed",
    "warmup_asked", "measure", "torch", "cudnn",
)  # fmt: skip
_FAMILIES = ("NVIDIA ", "Tesla ", "GeForce ", "RTX ")


def device_name(device: torch.device) -> str:
    """As the driver or the kernel tells it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name() or "CPU"


def device_label(device: torch.device) -> str:
    """Label of the device for folder names: `cpu`, or the GPU's model in lower case, such as `h100` of "NVIDIA H100
    80GB HBM3".
    """
    if device.type != "cuda":
        return "cpu"
    name = torch.cuda.get_device_name(device)
    for family in _FAMILIES:
        name = name.removeprefix(family)
    return name.replace("-", " ").split()[0].lower()


def peaks_of(placement: Placement) -> Peaks:
    """Peaks from the GPU's data sheet; None for the CPU."""
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
    """Now, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _driver(device: torch.device) -> tuple[str | None, float | None]:
    """Version and enforced power limit; None where the driver does not tell."""
    uuid = gpu_uuid(device)
    if uuid is None:
        return None, None
    try:
        known = NvmlGpu(uuid).describe()
    except MeterUnavailable:
        return None, None
    return known.driver_version, known.power_limit_w
