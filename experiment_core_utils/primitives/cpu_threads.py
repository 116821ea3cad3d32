"""The number of CPU threads that the environment requests and allows, read without importing torch."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

import psutil

from experiment_core_utils.primitives.errors import ConfigurationError

# What torchrun and `accelerate launch` put into the environment of the processes that they start.
LAUNCHER_MARKS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")
CGROUP = Path("/sys/fs/cgroup")


def environment_threads() -> int | None:
    """OMP_NUM_THREADS as somebody set it; None where nobody did.

    Launchers set it to 1 where nobody did; under one, the environment counts that it was started with itself.

    Raises:
        ConfigurationError: it is not a number of threads.
    """
    environment: Mapping[str, str] = os.environ
    if any(mark in environment for mark in LAUNCHER_MARKS):
        try:
            launcher = psutil.Process().parent()
            environment = {} if launcher is None else launcher.environ()
        except psutil.Error:  # not ours to read, or gone: then the variable's origin is not known
            return None
    given = environment.get("OMP_NUM_THREADS", "").strip()
    if not given:
        return None
    # One number for each level of nested parallel work; the first is that of the outermost.
    first = given.split(",")[0].strip()
    if not first.isdecimal() or int(first) == 0:
        raise ConfigurationError(f"OMP_NUM_THREADS={given} is not a number of threads; give 1 or more, or unset it")
    return int(first)


def available_cpus(groups: Path = CGROUP) -> int:
    """How many CPUs this process may keep busy, 1 or more: those it may run on, within its control group's quota."""
    allowed, quota = len(os.sched_getaffinity(0)), cpu_quota(groups)
    return allowed if quota is None else max(min(allowed, math.floor(quota)), 1)


def cpu_quota(groups: Path = CGROUP) -> float | None:
    """CPUs' worth of time that the control group of this process gets, as `docker run --cpus` sets it.

    It is the least of its own group's and of those around it. None without a limit.

    Args:
        groups: where the kernel shows control groups; of version 1 the controller of the CPU is in `cpu`.
    """
    own = groups
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        number, _, path = line.split(":", 2)
        own = groups / path.lstrip("/") if number == "0" else own
    folders = [folder for folder in (own, *own.parents) if folder.is_relative_to(groups)]
    limits = [_text(folder / "cpu.max").split() for folder in folders]
    limits.append([_text(groups / "cpu" / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")])
    # Without a limit the quota is "max", in version 1 -1.
    found = [int(limit[0]) / int(limit[1]) for limit in limits if len(limit) == 2 and limit[0].isdecimal()]
    return min(found, default=None)


def _text(file: Path) -> str:
    """What is in a file; "" where it is not there or may not be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
