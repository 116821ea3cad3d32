"""In: this process's device; out: what else went on there and on the host, at moments between measured runs."""

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

import psutil
import torch

from experiment_core_utils.meters.nvml import NvmlGpu
from experiment_core_utils.primitives.device import gpu_uuid
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.primitives.records import ConditionsReading, CpuReading, GpuReading, When

READ_EVERY_S = 10.0


class GpuMeter(Protocol):
    """Whatever reads a GPU."""

    def read(self) -> GpuReading:
        """The GPU now."""
        ...


class ConditionsMeter:
    """Reads GPU and host where a setting's window opens and closes, and between samples every ten seconds.

    Args:
        gpu: None where there is none to read.
        gpu_reason: why not.
    """

    def __init__(
        self,
        experiment_id: str,
        rank: int,
        gpu: GpuMeter | None,
        gpu_reason: str | None,
        read_cpu: Callable[[], CpuReading] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._experiment_id = experiment_id
        self._rank = rank
        self._gpu = gpu
        self._gpu_reason = gpu_reason
        self._read_cpu = read_cpu if read_cpu is not None else cpu_now
        self._clock = clock
        self._last_s = clock()

    def read(self, when: When) -> ConditionsReading:
        """The conditions now."""
        self._last_s = self._clock()
        return ConditionsReading(
            experiment_id=self._experiment_id,
            rank=self._rank,
            when=when,
            wall_time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            monotonic_s=self._last_s,
            gpu=self._gpu.read() if self._gpu is not None else None,
            gpu_reason=self._gpu_reason,
            cpu=self._read_cpu(),
        )

    def read_if_due(self) -> ConditionsReading | None:
        """A reading between two samples; None where the last one was less than ten seconds ago."""
        return self.read("between") if self._clock() - self._last_s >= READ_EVERY_S else None


def conditions_meter(experiment_id: str, rank: int, device: torch.device) -> ConditionsMeter:
    """The meter for work on `device`; without NVML it says so in its readings."""
    uuid = gpu_uuid(device)
    if uuid is None:
        return ConditionsMeter(experiment_id, rank, None, "no GPU is used")
    try:
        return ConditionsMeter(experiment_id, rank, NvmlGpu(uuid), None)
    except MeterUnavailable as error:
        return ConditionsMeter(experiment_id, rank, None, str(error))


def cpu_times_s() -> tuple[float, float]:
    """Seconds since the host's start that its logical CPUs were busy, and were there, summed over them."""
    times = psutil.cpu_times()._asdict()
    # A guest's time is in user's and nice's already.
    total_s = sum(seconds for name, seconds in times.items() if not name.startswith("guest"))
    return total_s - times["idle"] - times.get("iowait", 0.0), total_s


def cpu_now() -> CpuReading:
    """The host's CPUs, and this process's own time."""
    busy_s, total_s = cpu_times_s()
    own = psutil.Process(os.getpid()).cpu_times()
    frequency = psutil.cpu_freq()
    return CpuReading(
        busy_s=busy_s,
        total_s=total_s,
        own_s=own.user + own.system,
        frequency_mhz=frequency.current if frequency is not None and frequency.current else None,
    )
