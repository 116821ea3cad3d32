"""In: a configuration; out: this process's place among all processes of the run, and the run's shared id."""

import atexit
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object
from torch import distributed

from experiment_core_utils.primitives.config import ProfilingConfig
from experiment_core_utils.primitives.device import choose_device
from experiment_core_utils.primitives.errors import ConfigurationError, ProfilerError, WorkerLost, first_line
from experiment_core_utils.primitives.files import write_text_atomically
from experiment_core_utils.primitives.paths import REPOSITORY, state_folder
from experiment_core_utils.primitives.run_ids import next_run_id
from experiment_core_utils.primitives.text_config import TextConfig, judged

T = TypeVar("T")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ID_NAME = "experiment_id.txt"
RESULTS = REPOSITORY / "results"
TOKEN_NAME = "seen_by_all"
LEAVING_S = 5.0  # that a process which ends waits for the others


def setup_distributed(experiment_config: Any) -> Accelerator:
    """The `Accelerator` of this process; the processes wait `worker_timeout` seconds for each other, here and later.

    Without a GPU, or where the CPU is asked for, accelerate is told so: under `torchrun` it would otherwise report
    one process to each of them, and every one would believe it was the main one.

    Args:
        experiment_config: a `ProfilingConfig`, or a text experiment in any form that `text_config.judged` takes. The
            `mixed_precision` of the latter acts on a model that goes through `Accelerator.prepare_model`.

    Raises:
        WorkerLost: the processes found differ in number from those launched (`WORLD_SIZE`) or asked for, or not all
            came.
        ConfigurationError: more processes were launched on this machine than it has GPUs, a GPU is asked for and there
            is none, or the device has no such mixed precision.
    """
    config = experiment_config if isinstance(experiment_config, ProfilingConfig) else judged(experiment_config)
    on_cpu = choose_device(config.device).type == "cpu"
    if not on_cpu:
        _refuse_shared_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count())
    mixed_precision = config.mixed_precision if isinstance(config, TextConfig) else None
    # Once, however often this is called; also where what follows is refused.
    atexit.unregister(leave_process_group)
    atexit.register(leave_process_group)
    accelerator = _new_accelerator(on_cpu, mixed_precision, config.worker_timeout)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    wanted = config.num_processes or launched
    if accelerator.num_processes != launched or accelerator.num_processes != wanted:
        raise WorkerLost(
            f"{wanted} processes were asked for and {launched} launched, but accelerate found "
            f"{accelerator.num_processes}; on the CPU launch several with torchrun --nproc-per-node=N "
            "(accelerate launch starts one there)"
        )
    return accelerator


def leave_process_group() -> None:
    """End this process's part in the process group; every end of a process that has called `setup_distributed` does.

    A process that ends with its group may be aborted by gloo's threads, and torch warns about NCCL's. To destroy NCCL's
    group waits for all other processes, without end where one was killed: here they wait `LEAVING_S` seconds at most,
    through the store in which they met, and each closes its own connections then.
    """
    if not distributed.is_initialized():
        return
    if distributed.get_backend() == "nccl":
        # The store ends with the process that holds it, and with it what is waited for.
        with suppress(RuntimeError):
            _wait_until_all_leave()
        distributed.distributed_c10d._get_default_group().abort()
    distributed.destroy_process_group()


def _wait_until_all_leave() -> None:
    store, deadline = distributed.distributed_c10d._get_default_store(), time.monotonic() + LEAVING_S
    leaving = store.add("leaving", 1)
    while leaving < distributed.get_world_size() and time.monotonic() < deadline:
        time.sleep(0.05)
        leaving = store.add("leaving", 0)


def _new_accelerator(on_cpu: bool, mixed_precision: str | None, timeout_s: float) -> Accelerator:
    """None takes the mixed precision of accelerate's own launcher."""
    if mixed_precision == "fp16" and on_cpu:
        raise ConfigurationError("mixed_precision fp16 needs a GPU; give bf16 or no on the CPU")
    if mixed_precision is not None and is_initialized() and AcceleratorState().mixed_precision != mixed_precision:
        # It is kept for the whole process and refuses another value; the process group stays.
        AcceleratorState._reset_state()
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_s))
    with _lost_processes_named():
        try:
            return Accelerator(cpu=on_cpu, mixed_precision=mixed_precision, kwargs_handlers=[timeout])
        except ValueError as error:
            raise ConfigurationError(
                f"accelerate refuses this process (mixed_precision {mixed_precision}): {first_line(error)}"
            ) from error


def _refuse_shared_gpus(processes: int, gpus: int) -> None:
    if processes > gpus:
        raise ConfigurationError(
            f"{processes} processes were launched for {gpus} GPUs; latency is measured with one process a GPU: launch "
            f"{gpus}, or give --device cpu"
        )


@contextmanager
def _lost_processes_named() -> Iterator[None]:
    """torch.distributed says with a RuntimeError that another process is gone or late."""
    try:
        yield
    except RuntimeError as error:
        raise WorkerLost(
            f"the processes did not find each other ({first_line(error)}); all must be launched within "
            "--worker_timeout with the same address, port and number, and one that ends with an error says so itself"
        ) from error


def processes_on_this_machine(accelerator: Accelerator) -> int:
    """Processes of this run under the same kernel, whatever the launcher calls a machine.

    A collective call: only where a run starts.
    """
    return of_all_processes(_machine_id(), accelerator).count(_machine_id())


def of_local_processes(own: T, accelerator: Accelerator) -> list[T]:
    """What each process has that shares a local main process with this one, by rank. A collective call.

    Raises:
        WorkerLost: another process is gone or late.
    """
    place = (_machine_id(), accelerator.is_local_main_process)
    everyone = of_all_processes((*place, own), accelerator)
    group = local_group([(machine, is_main) for machine, is_main, _ in everyone], accelerator.process_index)
    return [everyone[rank][2] for rank in group]


def local_group(places: Sequence[tuple[str, bool]], rank: int) -> list[int]:
    """Ranks of the processes that share a local main process with `rank`, itself included.

    Containers of one machine have its kernel in common and a local main process each: a process belongs to the last
    one of its kernel before it.

    Args:
        places: by rank, the kernel that the process runs under, and whether it is a local main process.
    """
    here = [other for other, (machine, _) in enumerate(places) if machine == places[rank][0]]
    mains = [other for other in here if places[other][1]]
    first = max((main for main in mains if main <= rank), default=here[0])
    after = next((main for main in mains if main > first), len(places))
    return [other for other in here if first <= other < after]


def _machine_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def generate_unique_id(accelerator: Accelerator, id_file: Path | None = None, results_dir: Path | None = None) -> str:
    """The next run id, such as "0001", the same on every process.

    The main process takes it from the counter file under a lock, so that runs started together get different ids. A
    counter that is damaged, gone or too low is repaired, with one line of warning; `run_ids.used_ids` says which ids
    of earlier runs are found.

    Args:
        id_file: the counter; None takes the project's, or the user's where the checkout cannot be written to.
        results_dir: whose ids are never given out again; None takes `results` beside the counter's folder, or in the
            checkout.

    Raises:
        ResultsNotSaved: (in all of them) the counter cannot be written.
    """
    results = results_dir or (RESULTS if id_file is None else id_file.parent.parent / "results")
    counter = id_file or state_folder(results) / ID_NAME
    return of_main_process(lambda: next_run_id(counter, results), accelerator)


def of_main_process(make: Callable[[], T], accelerator: Accelerator) -> T:
    """What `make` returns in the main process, on every process. A collective call: only where a run starts.

    Raises:
        ProfilerError: (in all of them) what `make` raised.
        WorkerLost: another process is gone or late.
    """
    shared: list[Any] = [_value_or_error(make) if accelerator.is_main_process else None]
    if accelerator.num_processes > 1:
        with _lost_processes_named():
            broadcast_object_list(shared)
    value, error = shared[0]
    if error is not None:
        raise error
    made: T = value
    return made


def _value_or_error(make: Callable[[], T]) -> tuple[T | None, ProfilerError | None]:
    try:
        return make(), None
    except ProfilerError as error:
        return None, error


def outcome_of_all(make: Callable[[], T], accelerator: Accelerator) -> T:
    """What `make` returns here, once every process has come as far. A collective call.

    Raises:
        ProfilerError: (in all of them) what `make` raised in one of them.
        WorkerLost: another process is gone or late.
    """
    made, error = _value_or_error(make)
    errors = of_all_processes(error, accelerator)
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if other is not None:
            raise type(other)(f"process {rank}: {other}")
    return cast(T, made)


def of_all_processes(own: T, accelerator: Accelerator) -> list[T]:
    """What each process has, by rank, on every process. A collective call: only where a run starts.

    Raises:
        WorkerLost: another process is gone or late.
    """
    if accelerator.num_processes == 1:
        return [own]
    with _lost_processes_named():
        return list(gather_object([own]))


def check_folder_is_shared(folder: Path, token: str, within_s: float, accelerator: Accelerator) -> None:
    """Judge that all processes see the same folder: the main one leaves a token there. A collective call.

    Args:
        within_s: network file systems show new files after some seconds.

    Raises:
        ConfigurationError: (in all of them) some process does not see it.
    """
    if accelerator.num_processes == 1:
        return
    path = folder / TOKEN_NAME
    of_main_process(lambda: write_text_atomically(token, path), accelerator)
    blind = [
        rank
        for rank, sees in enumerate(of_all_processes(_comes_to_hold(path, token, within_s), accelerator))
        if not sees
    ]
    if blind:
        raise ConfigurationError(
            f"processes {', '.join(map(str, blind))} do not see what process 0 writes into {folder}; all machines need "
            "the same --output_dir on a file system that they share"
        )


def _comes_to_hold(path: Path, token: str, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if path.exists() and path.read_text() == token:
            return True
        time.sleep(0.05)
    return False
