"""The device of a run: marks of time inside the run, synchronisation, windows of memory, the choice of the GPU."""

import errno
import os
import resource
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

import psutil
import torch

from experiment_core_utils.primitives.cpu_threads import CGROUP, available_cpus, cpu_quota, environment_threads
from experiment_core_utils.primitives.errors import (
    HOST_FULL,
    NO_MEMORY_LEFT,
    ConfigurationError,
    OutOfMemory,
    first_line,
)
from experiment_core_utils.primitives.units import MemoryReading

# 2024: a clock before this program was made is none.
CLOCK_NOT_SET_S = 1_704_067_200.0
# A run of a tiny model ended for lack of memory where 28 MB were left here, and did not where 530 were.
LEAST_MEMORY_BYTES = 400_000_000


class Marks(Protocol):
    """Marks set inside a run; consecutive differences are the durations of what lies between them."""

    def mark(self) -> None:
        """Set a mark now."""

    def unmark(self) -> None:
        """Take the last mark back: what led up to it turned out to be of no use."""

    def seconds(self) -> list[float]:
        """Durations between neighbouring marks, in seconds; waits for the device once."""


class HostMarks:
    """Marks by the host's monotonic clock; right where work is finished when a call returns (CPU)."""

    def __init__(self) -> None:
        self._times_ns: list[int] = []

    def mark(self) -> None:
        self._times_ns.append(time.perf_counter_ns())

    def unmark(self) -> None:
        self._times_ns.pop()

    def seconds(self) -> list[float]:
        return [(b - a) * 1e-9 for a, b in zip(self._times_ns, self._times_ns[1:], strict=False)]


class CudaMarks:
    """Marks by CUDA events on the current stream, read after the run: setting one does not wait for the GPU.

    Args:
        others: further GPUs that the run uses; a mark is reached when they, too, have done all work queued before it.
    """

    def __init__(self, others: Sequence[torch.device] = ()) -> None:
        self._events: list[torch.cuda.Event] = []
        self._others = others

    def mark(self) -> None:
        for other in self._others:
            # The stream of the marks waits for the other GPU, the host for none of them.
            torch.cuda.current_stream().wait_event(torch.cuda.current_stream(other).record_event())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def unmark(self) -> None:
        self._events.pop()

    def newest_is_reached(self) -> bool:
        """Whether the GPU has done all work that was queued before the newest mark, true without one; does not wait."""
        return not self._events or bool(self._events[-1].query())

    def seconds(self) -> list[float]:
        if self._events:
            self._events[-1].synchronize()
        return [a.elapsed_time(b) * 1e-3 for a, b in zip(self._events, self._events[1:], strict=False)]


class NoMarks:
    """Sets no marks: the same run without measuring, to find what the measuring costs."""

    def mark(self) -> None:
        return None

    def unmark(self) -> None:
        return None

    def seconds(self) -> list[float]:
        return []


def new_marks(device: torch.device, *others: torch.device) -> Marks:
    """Marks for work that begins on `device` and uses `others`, too."""
    return CudaMarks([each for each in others if each.type == "cuda"]) if device.type == "cuda" else HostMarks()


def synchronize(*devices: torch.device) -> None:
    """Wait until the devices have done all work given to them."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class TokenCopies:
    """Tokens on their way to the host: sending one does not wait for the device, asking for it does.

    Args:
        most: tokens of one answer, each at a place of its own.
        rows: answers, each of which has a token at every place.
    """

    def __init__(self, device: torch.device, most: int, rows: int) -> None:
        self._is_cuda = device.type == "cuda"
        self._tokens = torch.empty(most, rows, dtype=torch.int64, pin_memory=self._is_cuda)
        self._events = [torch.cuda.Event() for _ in range(most)] if self._is_cuda else []

    def __len__(self) -> int:
        return len(self._tokens)

    def send(self, place: int, token: torch.Tensor) -> None:
        """After what the current stream has been given so far; `token` [rows] may be overwritten after it."""
        self._tokens[place].copy_(token, non_blocking=True)
        if self._is_cuda:
            self._events[place].record()

    def arrived(self, place: int) -> torch.Tensor:
        """The tokens [rows] that were sent there, on the host."""
        if self._is_cuda:
            self._events[place].synchronize()
        return self._tokens[place]


def refuse_unfit_host(proc: Path = Path("/proc"), now_unix_s: float | None = None) -> None:
    """Refuse a host that would end a run late, before any weight is read.

    Args:
        proc: where the system shows processes and memory.
        now_unix_s: what its clock says; None asks it.

    Raises:
        ConfigurationError: /proc is not there, the clock is not set, or hardly any memory is left to this process.
    """
    if not (proc / "self" / "stat").exists() or not (proc / "meminfo").exists():
        raise ConfigurationError(f"{proc} is not there, and shows memory and load; mount it: mount -t proc proc {proc}")
    now_unix_s = time.time() if now_unix_s is None else now_unix_s
    if now_unix_s < CLOCK_NOT_SET_S:
        began = datetime.fromtimestamp(0, UTC) + timedelta(seconds=now_unix_s)
        raise ConfigurationError(f"the clock of this machine says {began:%Y-%m-%d}, which dates files and runs; set it")
    free, own = int(psutil.virtual_memory().available), resource.getrlimit(resource.RLIMIT_AS)[0]
    if own != resource.RLIM_INFINITY:
        free = min(free, max(own - int(psutil.Process().memory_info().vms), 0))
    if free < LEAST_MEMORY_BYTES:
        raise ConfigurationError(
            f"{free / 1e6:.0f} MB of memory are left for this process, and a run needs at least "
            f"{LEAST_MEMORY_BYTES / 1e6:.0f} beside its model; end what uses it, or raise its limit (ulimit -v)"
        )


def set_cpu_threads(requested: int | None, processes_here: int) -> None:
    """Threads for torch's CPU work: as requested, else OMP_NUM_THREADS, else the cores shared among the processes.

    Cores are those that this process may keep busy, a container's quota counted; OMP_NUM_THREADS takes no more than
    those.

    Raises:
        ConfigurationError: OMP_NUM_THREADS is not a number of threads; or as `refuse_unfit_host`.
    """
    refuse_unfit_host()
    cores, given = available_cpus(CGROUP), environment_threads()
    if requested is None:
        requested = max(cores // processes_here, 1) if given is None else min(given, cores)
    torch.set_num_threads(requested)


def usable_cores(pids: Collection[int] | None = ()) -> float:
    """Cores that this process and these ones may use together, within the quota of the control group.

    Args:
        pids: None where it is not known which they are: they may use all.
    """
    given = [os.sched_getaffinity(pid) for pid in (0, *pids)] if pids is not None else []
    cores = len(set.union(*given)) if given else os.cpu_count() or 1
    quota = cpu_quota(CGROUP)
    return cores if quota is None else min(cores, quota)


def available_memory_bytes() -> int:
    """Memory of the host that is free for new work, within the limits of the control group and of this process."""
    available, own = int(psutil.virtual_memory().available), resource.getrlimit(resource.RLIMIT_AS)[0]
    if own != resource.RLIM_INFINITY:
        available = min(available, max(own - int(psutil.Process().memory_info().vms), 0))
    limit, used = (_number_in(CGROUP / name) for name in ("memory.max", "memory.current"))
    return available if limit is None or used is None else max(min(available, limit - used), 0)


def free_memory_bytes(device: torch.device) -> int:
    """Memory that is free for new work: of the GPU, with what this process's allocator has in reserve, or of the
    host.
    """
    if device.type != "cuda":
        return available_memory_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def most_memory_bytes(device: torch.device) -> int:
    """All memory that a process could have there: of the GPU, or of the host within the limits set to this process."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    own = resource.getrlimit(resource.RLIMIT_AS)[0]
    limits = (_number_in(CGROUP / "memory.max"), None if own == resource.RLIM_INFINITY else own)
    total = int(psutil.virtual_memory().total + psutil.swap_memory().total)
    return min([total, *(limit for limit in limits if limit is not None)])


def _number_in(file: Path) -> int | None:
    """The number in a file; None for a file that is not there, or that says "max"."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else None


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` takes this process's GPU where there is one; raises ConfigurationError for a GPU that is not there."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigurationError("--device cuda was given but torch sees no GPU; use --device cpu or auto")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 on the CPU; beside `float8` weights the rest is bfloat16."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = torch.bfloat16 if precision == "float8" else getattr(torch, precision)
    return dtype


def gpu_uuid(device: torch.device) -> str | None:
    """The id that the driver gives a GPU, whatever number it has in this process; None for the CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


def visible_gpus() -> list[torch.device]:
    """The GPUs that this process may use; none for the CPU alone."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", index) for index in range(count)]


def used_gpus() -> list[torch.device]:
    """The GPUs that this process uses."""
    return [device for device in visible_gpus() if torch.cuda.memory_reserved(device) > 0]


def synchronize_used_gpus() -> None:
    """Wait for the GPUs that this process uses; waiting for another would occupy memory there."""
    for device in used_gpus():
        synchronize(device)


def allocator_bytes(devices: Sequence[torch.device]) -> tuple[int, int] | None:
    """What torch has allocated now, and what its allocator has reserved, summed over GPUs; None without one."""
    if not devices:
        return None
    allocated = sum(torch.cuda.memory_allocated(device) for device in devices)
    return allocated, sum(torch.cuda.memory_reserved(device) for device in devices)


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process(os.getpid()).memory_info().rss)


class MemoryWindow:
    """Peak memory between `with` and its end, of several GPUs the sum; high-water marks are reset at the opening."""

    def __init__(self, *devices: torch.device) -> None:
        self._gpus = [each for each in devices if each.type == "cuda"]
        self.reading: MemoryReading | None = None

    def __enter__(self) -> "MemoryWindow":
        for gpu in self._gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        return self

    def __exit__(self, *_: object) -> None:
        self.reading = self.read()

    def read(self) -> MemoryReading:
        """The window so far."""
        rss = resident_bytes()
        if self._gpus:
            peak, reserved = (
                sum(map(most, self._gpus)) for most in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
            )
            return MemoryReading(peak, reserved, rss, None)
        return MemoryReading(None, None, rss, "no CUDA device: torch keeps no high-water mark on the CPU")


def release_cached_memory(device: torch.device) -> None:
    """Give cached GPU memory back to the driver."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def matmul_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Throughput of the best of a few square matrix products, one multiply-add as 2: what this device can reach."""
    side = 4096 if device.type == "cuda" else 512
    factor = torch.ones(side, side, dtype=dtype, device=device)
    seconds = []
    with torch.inference_mode():
        for _ in range(8):
            synchronize(device)
            started = time.perf_counter()
            factor @ factor
            synchronize(device)
            seconds.append(time.perf_counter() - started)
    return 2 * side**3 / min(seconds)


@contextmanager
def out_of_memory_named() -> Iterator[None]:
    """Turns every error that says that the GPU or the host has no memory left into `OutOfMemory`, in one sentence."""
    try:
        yield
    except MemoryError as error:
        raise OutOfMemory(f"{first_line(error)}: {HOST_FULL}") from error
    except OSError as error:
        if error.errno != errno.ENOMEM and "Cannot allocate memory" not in str(error):
            raise
        raise OutOfMemory(first_line(error)) from error
    except RuntimeError as error:
        text = str(error)
        starts = [text.index(words) for words in NO_MEMORY_LEFT if words in text]
        if isinstance(error, torch.OutOfMemoryError):
            starts = [0]
        if not starts:
            raise
        line = first_line(OutOfMemory(text[min(starts) :].split(". ")[0]))
        raise OutOfMemory(f"{line}: {HOST_FULL}" if line.startswith("std::bad_alloc") else line) from error
