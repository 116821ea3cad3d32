"""Facts of the machine and the checkout, as both kinds of run record them: command, commit, versions, hardware."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch

from experiment_core_utils.meters.nvml import GpuDescription, NvmlGpu
from experiment_core_utils.primitives.device import gpu_uuid
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.primitives.paths import REPOSITORY

GIB = 2**30


@dataclass(frozen=True)
class RunFacts:
    """When and with what a run was made.

    Attributes:
        timestamp: in UTC, to the second.
        versions: None for a package that is not there.
    """

    timestamp: str
    command: str
    git_commit: str | None
    python: str
    versions: Mapping[str, str | None]


@dataclass(frozen=True)
class HostHardware:
    """What a host is made of; None for what cannot be read.

    Attributes:
        cuda: version that torch was built for.
        num_gpus: that this process sees.
        cpu: name that the kernel gives it.
    """

    cuda: str | None
    num_gpus: int
    cpu: str | None
    cpu_count: int | None
    torch_threads: int
    ram_bytes: int


def run_facts(packages: Sequence[str]) -> RunFacts:
    """The facts of a run that starts now, with the versions of these packages."""
    return RunFacts(
        timestamp=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command_line(),
        git_commit=git_commit(),
        python=platform.python_version(),
        versions={name: package_version(name) for name in packages},
    )


def host_hardware() -> HostHardware:
    """The host as this process finds it."""
    return HostHardware(
        cuda=torch.version.cuda,
        num_gpus=torch.cuda.device_count(),
        cpu=cpu_name(),
        cpu_count=os.cpu_count(),
        torch_threads=torch.get_num_threads(),
        ram_bytes=psutil.virtual_memory().total,
    )


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
    host = asdict(host_hardware())
    places = [torch.device("cuda", index) for index in range(host["num_gpus"])]
    return {
        "total_ram_gb": host.pop("ram_bytes") / GIB,
        **host,
        "cuda_available": torch.cuda.is_available(),
        "gpu_names": [torch.cuda.get_device_name(place) for place in places],
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


def environment_stamp(device: torch.device) -> tuple[str | None, ...]:
    """Versions and device that times and, in the last digits, answers depend on."""
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return (package_version("torch"), package_version("transformers"), device.type, hardware)
