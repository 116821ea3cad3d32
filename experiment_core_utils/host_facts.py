"""In: the machine and the checkout as they are; out: command, commit, versions and hardware, to tell runs apart by."""

import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch

from experiment_core_utils.meters.nvml import GpuDescription, NvmlGpu
from experiment_core_utils.primitives.device import gpu_uuid
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.primitives.paths import REPOSITORY

GIB = 2**30


def command_line() -> str:
    """As someone would type it again."""
    return shlex.join([os.path.basename(sys.executable), *sys.argv])


def git_commit() -> str | None:
    """Commit of the working tree, with "+changes" where files differ from it; None outside a checkout."""
    commit = _git("rev-parse", "HEAD")
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
    """None for a package that is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_name() -> str | None:
    """As the kernel says; None where it does not."""
    try:
        with open("/proc/cpuinfo") as info:
            names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    except OSError:
        return platform.processor() or None
    return names[0] if names else None


def hardware_info() -> dict[str, Any]:
    """The keys of `records.HardwareInfo`, and the CPU's name, torch's threads, CUDA's version and `gpus`."""
    places = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return {
        "cuda_available": torch.cuda.is_available(),
        "num_gpus": len(places),
        "gpu_names": [torch.cuda.get_device_name(place) for place in places],
        "cpu_count": os.cpu_count(),
        "total_ram_gb": psutil.virtual_memory().total / GIB,
        "cpu": cpu_name(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": [_describe_gpu(place) for place in places],
    }


def _describe_gpu(place: torch.device) -> dict[str, Any]:
    """One GPU; what the driver does not tell is None, and `reason` says why."""
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
