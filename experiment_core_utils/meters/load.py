"""Load and memory of a window, sampled by a thread beside the running code, and the conditions between samples."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import psutil
import torch

from experiment_core_utils.meters.nvml import NvmlGpu
from experiment_core_utils.primitives.clock import Clock, HostClock, Repeating
from experiment_core_utils.primitives.device import allocator_bytes, gpu_uuid, resident_bytes, used_gpus
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable
from experiment_core_utils.records.compute import LoadSample, LoadTrace
from experiment_core_utils.records.settings import ConditionsReading, CpuReading, GpuReading, When

READ_EVERY_S = 10.0


def cpu_times_s() -> tuple[float, float]:
    """Seconds since the host's start that its logical CPUs were busy, and were there, summed over them."""
    times = psutil.cpu_times()._asdict()
    # A guest's time is in user's and nice's already.
    total_s = sum(seconds for name, seconds in times.items() if not name.startswith("guest"))
    return total_s - times["idle"] - times.get("iowait", 0.0), total_s


def own_cpu_s(pids: Sequence[int] = ()) -> float:
    """CPU seconds of this process and its descendants, such as those that prepare requests, ended ones that were waited
    for among them.

    Args:
        pids: of further processes that work for this one, such as servers; one that is gone counts no longer.
    """
    found = with_descendants((os.getpid(), *pids))
    # Descendants first: the time of one that ends meanwhile has moved to the process that waited for it.
    return sum(map(_with_ended_children_s, reversed(list(found.values()))))


def with_descendants(pids: Iterable[int]) -> dict[int, psutil.Process]:
    """These processes by their ids, each before its descendants, without those that are gone."""
    found = dict[int, psutil.Process]()
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            found |= {each.pid: each for each in (process, *process.children(recursive=True)) if each.pid not in found}
    return found


def _with_ended_children_s(process: psutil.Process) -> float:
    """CPU seconds of a process and of its children that it waited for; 0 where it is gone or may not be read."""
    try:
        # On Linux; elsewhere the system does not report those of children, and they are 0.
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


def cpu_now(pids: Sequence[int] | None = ()) -> CpuReading:
    """The host's CPUs, and the own time of this process, its descendants and those that work for it (`own_cpu_s`); no
    own time where it is not known which do.
    """
    busy_s, total_s = cpu_times_s()
    frequency = psutil.cpu_freq()
    return CpuReading(
        busy_s=busy_s,
        total_s=total_s,
        own_s=None if pids is None else own_cpu_s(pids),
        frequency_mhz=frequency.current if frequency is not None and frequency.current else None,
    )


@dataclass
class ConditionsMeter:
    """Reads GPU and host where a setting's window opens and closes, and between samples every ten seconds."""

    experiment_id: str
    rank: int
    read_gpu: Callable[[], GpuReading] | None  #: None where there is no GPU to read
    gpu_reason: str | None  #: why not
    read_cpu: Callable[[], CpuReading] = cpu_now
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._last_s = self.clock()

    def read(self, when: When) -> ConditionsReading:
        """The conditions now, for the journal."""
        reading = self.beside_runs(when)
        self._last_s = reading.monotonic_s
        return reading

    def beside_runs(self, when: When = "between") -> ConditionsReading:
        """The conditions before or after the runs of a sample; the next reading for the journal is due as before."""
        return ConditionsReading(
            experiment_id=self.experiment_id,
            rank=self.rank,
            when=when,
            wall_time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            monotonic_s=self.clock(),
            gpu=self.read_gpu() if self.read_gpu is not None else None,
            gpu_reason=self.gpu_reason,
            cpu=self.read_cpu(),
        )

    def read_if_due(self) -> ConditionsReading | None:
        """A reading between two samples; None where the last one was less than ten seconds ago."""
        return self.read("between") if self.clock() - self._last_s >= READ_EVERY_S else None


def conditions_meter(
    experiment_id: str, rank: int, device: torch.device, pids: Sequence[int] | None = ()
) -> ConditionsMeter:
    """The meter for work on `device`; without NVML it says so in its readings.

    Args:
        pids: of processes whose load is the run's own, see `own_cpu_s`; None where some cannot be seen.
    """
    uuid, read_cpu = gpu_uuid(device), partial(cpu_now, None if pids is None else tuple(pids))
    if uuid is None:
        return ConditionsMeter(experiment_id, rank, None, "no GPU is used", read_cpu)
    try:
        return ConditionsMeter(experiment_id, rank, NvmlGpu(uuid).read, None, read_cpu)
    except MeterUnavailable as error:
        return ConditionsMeter(experiment_id, rank, None, str(error), read_cpu)


# The driver's own figure is over a sixth of a second or more.
SAMPLE_EVERY_S = 0.2


@dataclass
class LoadSampler:
    """Samples between `with` and its end, every `interval_s`, and once more at the end.

    A GPU that does not report it is a reason; anything else that a reading raises is raised at the end.
    """

    #: what reads the utilisation in percent of each that the process uses, or raises MeterUnavailable
    gpus: Sequence[Callable[[], float]]
    clock: Clock
    interval_s: float = SAMPLE_EVERY_S
    read_cpu: Callable[[], tuple[float, float]] = cpu_times_s  #: seconds that the CPUs were busy, and were there
    read_rss: Callable[[], int] = resident_bytes  #: resident bytes of the process
    #: bytes allocated and reserved on the GPUs; None without one
    read_allocator: Callable[[], tuple[int, int] | None] = lambda: None

    def __post_init__(self) -> None:
        self._samples: list[LoadSample] = []
        # In the order in which they came, each once.
        self._reasons: dict[str, None] = {}
        self._repeating: Repeating | None = None

    def __enter__(self) -> "LoadSampler":
        self._samples.clear()
        self._reasons = {} if self.gpus else {"no GPU is used": None}
        self._opened_s = self._last_s = self.clock.now_s()
        self._last_cpu = self.read_cpu()
        self._repeating = self.clock.every(self.interval_s, self._sample)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._repeating is not None
        self._repeating.stop()
        self._sample()

    @property
    def trace(self) -> LoadTrace:
        """Everything that was seen; raises ConfigurationError before the window is closed for the first time."""
        if not self._samples:
            raise ConfigurationError("the window of this load sampler was never closed; use it in a with statement")
        return LoadTrace(tuple(self._samples), self.interval_s, "; ".join(self._reasons) or None)

    def _sample(self) -> None:
        now_s, cpu = self.clock.now_s(), self.read_cpu()
        busy_s, there_s = (now - before for now, before in zip(cpu, self._last_cpu, strict=True))
        # The host counts in hundredths of a second: where none has passed, the last figure is kept.
        before = self._samples[-1].cpu_percent if self._samples else None
        percent = min(max(100 * busy_s / there_s, 0.0), 100.0) if there_s > 0 else before
        allocated, reserved = self.read_allocator() or (None, None)
        self._samples.append(
            LoadSample(
                at_s=now_s - self._opened_s,
                span_s=now_s - self._last_s,
                cpu_percent=percent,
                gpu_percent=tuple(self._query(gpu) for gpu in self.gpus),
                rss_bytes=self.read_rss(),
                allocated_bytes=allocated,
                reserved_bytes=reserved,
            )
        )
        self._last_s, self._last_cpu = now_s, cpu

    def _query(self, gpu: Callable[[], float]) -> float | None:
        try:
            return gpu()
        except MeterUnavailable as error:
            self._reasons[str(error)] = None
            return None


def load_sampler(interval_s: float = SAMPLE_EVERY_S) -> LoadSampler:
    """A load sampler for this process, on the GPUs that it uses now."""
    devices = used_gpus()
    uuids = [gpu_uuid(device) for device in devices]
    gpus = [_utilisation_of(uuid) for uuid in uuids if uuid is not None]
    return LoadSampler(gpus, HostClock(), interval_s, read_allocator=lambda: allocator_bytes(devices))


def _utilisation_of(uuid: str) -> Callable[[], float]:
    """What reads a GPU's utilisation in percent; of one that cannot be opened each reading raises the reason."""
    try:
        return NvmlGpu(uuid).utilisation_percent
    except MeterUnavailable as error:
        return partial(unavailable, str(error))


def unavailable(reason: str) -> float:
    """Raises MeterUnavailable for this reason, in place of a reading."""
    raise MeterUnavailable(reason)
