"""Facts of the machine and the checkout: command, commit, versions, hardware, and peak rates of known GPUs."""

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch

from experiment_core_utils import __version__
from experiment_core_utils.meters.nvml import GpuDescription, NvmlGpu
from experiment_core_utils.primitives.cpu_threads import cpu_quota
from experiment_core_utils.primitives.device import gpu_uuid, visible_gpus
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.primitives.files import IS_CHECKOUT, REPOSITORY
from experiment_core_utils.primitives.texts import without_secrets
from experiment_core_utils.records.provenance import Hardware

GIB = 2**30


def run_facts(packages: Sequence[str]) -> dict[str, Any]:
    """The keys of `Provenance` about a run that starts now, with the versions of the profiler and of these packages."""
    return {
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "versions": {"inference-knob-profiler": __version__, **{name: package_version(name) for name in packages}},
    }


def host_hardware() -> Hardware:
    """The fields about the host, as this process finds it."""
    return Hardware.of(
        cuda=torch.version.cuda,
        num_gpus=torch.cuda.device_count(),
        cpu=cpu_name(),
        cpu_count=os.cpu_count(),
        cpu_quota=cpu_quota(),
        torch_threads=torch.get_num_threads(),
        ram_bytes=psutil.virtual_memory().total,
    )


def command_line() -> str:
    """This process's command, as someone would type it again; addresses in it are as `without_secrets` shows them."""
    words = (re.sub(r"https?://\S+", lambda found: without_secrets(found[0]), each) for each in sys.argv)
    text = shlex.join([os.path.basename(sys.executable), *words])
    # A path that is not UTF-8 is written with escapes: no file in UTF-8 contains its bytes.
    return text.encode("utf-8", "backslashreplace").decode()


def git_commit() -> str | None:
    """Commit of the working tree, with "+changes" where files differ from it; None outside a checkout."""
    # An installed package may lie inside the checkout of something else.
    commit = _git("rev-parse", "HEAD") if IS_CHECKOUT else None
    if commit is None:
        return None
    return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def package_version(package: str) -> str | None:
    """The installed version of a package; None for one that is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_name() -> str | None:
    """The processor's name, as the kernel says; None where it does not."""
    try:
        with open("/proc/cpuinfo") as info:
            names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    except OSError:
        return platform.processor() or None
    return names[0] if names else None


def hardware_info() -> dict[str, Any]:
    """The host and its GPUs as this process finds them; memory in 2**30 bytes."""
    host, places = host_hardware().content(), visible_gpus()
    return {
        "total_ram_gb": host.pop("ram_bytes") / GIB,
        **host,
        "cuda_available": torch.cuda.is_available(),
        "gpu_names": [torch.cuda.get_device_name(place) for place in places],
        "gpus": [_describe_gpu(place) for place in places],
    }


def _describe_gpu(place: torch.device) -> Mapping[str, Any]:
    """One GPU; what the driver does not report is None, and `reason` says why."""
    uuid = gpu_uuid(place)
    assert uuid is not None
    properties = torch.cuda.get_device_properties(place)
    known = {
        "index": place.index,
        "uuid": uuid,
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_clock_mhz": None,
        "memory_clock_mhz": None,
        **dict.fromkeys(field.name for field in fields(GpuDescription)),
    }
    try:
        gpu = NvmlGpu(uuid)
    except MeterUnavailable as error:
        return {**known, "reason": str(error)}
    now, lasting = gpu.read(), gpu.describe()
    known |= asdict(lasting) | {"sm_clock_mhz": now.sm_clock_mhz, "memory_clock_mhz": now.memory_clock_mhz}
    if now.sm_clock_mhz is None or now.memory_clock_mhz is None:
        known["reason"] = "; ".join(filter(None, (lasting.reason, now.reason)))
    return known


def environment_stamp(device: torch.device) -> tuple[str | None, ...]:
    """Versions and device that times and, in the last digits, answers depend on."""
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return (package_version("torch"), package_version("transformers"), device.type, hardware)


_TERA = 1e12


@dataclass(frozen=True)
class Peaks:
    """Peaks of one GPU; None where they are not known, for which `reason` says why."""

    gpu_name: str | None
    dtype: str | None  #: number format that `flops_per_s` is for
    flops_per_s: float | None  #: one multiply-add as 2
    bytes_per_s: float | None  #: of its memory
    reason: str | None

    def times(self, num_gpus: int) -> "Peaks":
        """Peaks of so many GPUs together."""
        flops, bytes_ = (None if each is None else each * num_gpus for each in (self.flops_per_s, self.bytes_per_s))
        return replace(self, flops_per_s=flops, bytes_per_s=bytes_)


@dataclass(frozen=True)
class _Sheet:
    """A data sheet; half for float16 and bfloat16."""

    tera_bytes: float
    single: float
    tf32: float | None
    half: float
    float8: float | None
    has_bfloat16: bool = True

    @property
    def tera_flops(self) -> Mapping[str, float | None]:
        return {
            "float32": self.single,
            "tf32": self.tf32,
            "float16": self.half,
            "bfloat16": self.half if self.has_bfloat16 else None,
            "float8": self.float8,
        }


# Where the sheet prints products with sparsity, half of that.
# NVIDIA H100 Tensor Core GPU data sheet (SXM, NVL) and its first edition of 2022 (PCIe).
_H100_SXM = _Sheet(3.35, 67.0, 989 / 2, 1979 / 2, 3958 / 2)
_H100_PCIE = _Sheet(2.0, 51.0, 756 / 2, 1513 / 2, 3026 / 2)
_H100_NVL = _Sheet(3.9, 60.0, 835 / 2, 1671 / 2, 3341 / 2)
# NVIDIA H200 Tensor Core GPU data sheet.
_H200_SXM = _Sheet(4.8, 67.0, 989 / 2, 1979 / 2, 3958 / 2)
_H200_NVL = _Sheet(4.8, 60.0, 835 / 2, 1671 / 2, 3341 / 2)
# NVIDIA A100 Tensor Core GPU data sheet, 40 GB and 80 GB.
_A100_40 = _Sheet(1.555, 19.5, 156.0, 312.0, None)
_A100_80_PCIE = _Sheet(1.935, 19.5, 156.0, 312.0, None)
_A100_80_SXM = _Sheet(2.039, 19.5, 156.0, 312.0, None)
# NVIDIA L40S and L4 data sheets.
_L40S = _Sheet(0.864, 91.6, 183.0, 362.05, 733.0)
_L4 = _Sheet(0.3, 30.3, 120 / 2, 242 / 2, 485 / 2)
# NVIDIA V100 Tensor Core GPU data sheet.
_V100_SXM2 = _Sheet(0.9, 15.7, None, 125.0, None, has_bfloat16=False)
_V100_PCIE = _Sheet(0.9, 14.0, None, 112.0, None, has_bfloat16=False)
# Names as the driver reports them; a slice of a GPU has another name, and no peaks here.
_SHEETS: Mapping[str, _Sheet] = {
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA H100 NVL": _H100_NVL,
    "NVIDIA H200": _H200_SXM,
    "NVIDIA H200 NVL": _H200_NVL,
    "NVIDIA A100-SXM4-40GB": _A100_40,
    "NVIDIA A100-PCIE-40GB": _A100_40,
    "NVIDIA A100-SXM4-80GB": _A100_80_SXM,
    "NVIDIA A100 80GB PCIe": _A100_80_PCIE,
    "NVIDIA L40S": _L40S,
    "NVIDIA L4": _L4,
    "Tesla V100-SXM2-16GB": _V100_SXM2,
    "Tesla V100-SXM2-32GB": _V100_SXM2,
    "Tesla V100-PCIE-16GB": _V100_PCIE,
    "Tesla V100-PCIE-32GB": _V100_PCIE,
}


def known_peaks(gpu_name: str, dtype: str) -> Peaks:
    """Peaks of a GPU from its data sheet.

    Args:
        gpu_name: as the driver reports it.
        dtype: `float32` (ordinary cores), `tf32`, `float16`, `bfloat16` or `float8`.
    """
    sheet = _SHEETS.get(gpu_name)
    if sheet is None:
        return Peaks(
            gpu_name, dtype, None, None, f"the peaks of {gpu_name} are not known; known are {', '.join(_SHEETS)}"
        )
    tera_flops = sheet.tera_flops.get(dtype)
    bytes_per_s = sheet.tera_bytes * _TERA
    if tera_flops is None:
        return Peaks(gpu_name, dtype, None, bytes_per_s, f"the data sheet of {gpu_name} has no peak for {dtype}")
    return Peaks(gpu_name, dtype, tera_flops * _TERA, bytes_per_s, None)


def peaks_on(device: torch.device, dtype: str | None) -> Peaks:
    """Peaks of the GPU that a model computes on in `dtype`; None for the CPU, and without a dtype."""
    if device.type != "cuda":
        return Peaks(None, dtype, None, None, f"{device} is not a GPU: its peak speed is unknown")
    name = torch.cuda.get_device_name(device)
    if dtype is None:
        return Peaks(name, None, None, None, "the number format of the model's products is not known")
    is_tf32 = dtype == "float32" and torch.get_float32_matmul_precision() != "highest"
    return known_peaks(name, "tf32" if is_tf32 else dtype)


RECORDED_PACKAGES = ("torch", "transformers", "accelerate", "numpy", "pillow")
# Where they are installed.
OPTIONAL_PACKAGES = ("lm_eval", "lmms_eval")


def facts_of_start() -> dict[str, Any]:
    """The keys of `Provenance` about a profiling run that starts now."""
    optional = [name for name in OPTIONAL_PACKAGES if package_version(name) is not None]
    return run_facts((*RECORDED_PACKAGES, *optional))
