"""In: a configuration; out: this process's place among all processes of the run, and the run's shared id."""

import fcntl
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from experiment_core_utils.primitives.config import REPOSITORY
from experiment_core_utils.primitives.errors import WorkerLost

T = TypeVar("T")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ID_FILE = REPOSITORY / "persistent_progress_trackers" / "experiment_id.txt"


class DistributedConfig(Protocol):
    """The part of a configuration that this step reads."""

    @property
    def num_processes(self) -> int | None: ...

    @property
    def device(self) -> str: ...


def setup_distributed(experiment_config: DistributedConfig) -> Accelerator:
    """The `Accelerator` of this process.

    Without a GPU, or where the CPU is asked for, accelerate is told so: under `torchrun` it would otherwise report
    one process to each of them, and every one would believe it was the main one.

    Raises:
        WorkerLost: the processes found differ in number from those launched (`WORLD_SIZE`) or asked for.
    """
    on_cpu = experiment_config.device == "cpu" or not torch.cuda.is_available()
    accelerator = Accelerator(cpu=on_cpu)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    wanted = experiment_config.num_processes or launched
    if accelerator.num_processes != launched or accelerator.num_processes != wanted:
        raise WorkerLost(
            f"{wanted} processes were asked for and {launched} launched, but accelerate found "
            f"{accelerator.num_processes}; on the CPU launch several with torchrun --nproc-per-node=N "
            "(accelerate launch starts one there)"
        )
    return accelerator


def processes_on_this_machine(accelerator: Accelerator) -> int:
    """Processes of this run under the same kernel, whatever the launcher calls a machine.

    A collective call: only where a run starts.
    """
    return of_all_processes(_machine_id(), accelerator).count(_machine_id())


def _machine_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def generate_unique_id(accelerator: Accelerator, id_file: Path = ID_FILE) -> str:
    """The next run id, such as "0001", the same on every process.

    The main process takes it from the counter file under a lock, so that runs started together get different ids.

    Raises:
        WorkerLost: the counter file holds something else than a number.
    """
    return of_main_process(lambda: _next_id(id_file), accelerator)


def of_main_process(make: Callable[[], T], accelerator: Accelerator) -> T:
    """What `make` returns in the main process, on every process. A collective call: only where a run starts."""
    shared: list[Any] = [make() if accelerator.is_main_process else None]
    if accelerator.num_processes > 1:
        broadcast_object_list(shared)
    value: T = shared[0]
    return value


def of_all_processes(own: T, accelerator: Accelerator) -> list[T]:
    """What each process has, by rank, on every process. A collective call: only where a run starts."""
    return list(gather_object([own])) if accelerator.num_processes > 1 else [own]


def _next_id(id_file: Path) -> str:
    id_file.parent.mkdir(parents=True, exist_ok=True)
    with id_file.open("a+") as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        counter.seek(0)
        text = counter.read().strip()
        if text and not text.isdecimal():
            raise WorkerLost(f"{id_file} holds {text!r} instead of a number; write the last used id into it")
        number = int(text or 0) + 1
        counter.seek(0)
        counter.truncate()
        counter.write(f"{number:04d}\n")
        counter.flush()
        os.fsync(counter.fileno())
    return f"{number:04d}"
