"""Collective calls of the processes of a run: values, errors, and whether they see the same folder."""

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    ProfilerError,
    UnforeseenError,
    WorkerLost,
    described,
    first_line,
    raise_if_device_is_lost,
)
from experiment_core_utils.primitives.files import read_regular_file, write_text_atomically

T = TypeVar("T")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TOKEN_NAME = "seen_by_all"


def broadcast_from_main(make: Callable[[], T], accelerator: Accelerator) -> T:
    """What `make` returns in the main process, on every process. A collective call: only where a run starts.

    Raises:
        ProfilerError: (in all of them) what `make` raised, an UnforeseenError in place of an error of a library.
        WorkerLost: another process is gone or late.
    """
    shared: list[Any] = [_value_or_error(make) if accelerator.is_main_process else None]
    if accelerator.num_processes > 1:
        with lost_processes_named():
            broadcast_object_list(shared)
    value, error = shared[0]
    if error is not None:
        raise error
    made: T = value
    return made


def all_gather(own: T, accelerator: Accelerator) -> list[T]:
    """What each process has, by rank, on every process. A collective call: only where a run starts.

    Raises:
        WorkerLost: another process is gone or late.
    """
    if accelerator.num_processes == 1:
        return [own]
    with lost_processes_named():
        return list(gather_object([own]))


def all_or_raise(make: Callable[[], T], accelerator: Accelerator) -> T:
    """What `make` returns here, once every process has come as far. A collective call.

    Raises:
        ProfilerError: (in all of them) what `make` raised in one of them, an UnforeseenError in place of an error of a
            library.
        WorkerLost: another process is gone or late.
    """
    made, error = _value_or_error(make)
    errors = all_gather(error, accelerator)
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if other is not None:
            raise type(other)(f"process {rank}: {other}")
    return cast(T, made)


def local_gather(own: T, accelerator: Accelerator) -> list[T]:
    """What each process has that shares a local main process with this one, by rank. A collective call.

    Raises:
        WorkerLost: another process is gone or late.
    """
    place = (_machine_id(), accelerator.is_local_main_process)
    everyone = all_gather((*place, own), accelerator)
    group = local_group([(machine, is_main) for machine, is_main, _ in everyone], accelerator.process_index)
    return [everyone[rank][2] for rank in group]


def processes_on_this_machine(accelerator: Accelerator) -> int:
    """Processes of this run under the same kernel, whatever the launcher calls a machine.

    A collective call: only where a run starts.
    """
    return all_gather(_machine_id(), accelerator).count(_machine_id())


def other_pids(accelerator: Accelerator) -> tuple[int, ...] | None:
    """Ids of the run's other processes under the same kernel; None where one is in another container, unseen from here.

    A collective call: only where a run starts.
    """
    own = (_machine_id(), _pid_namespace(), os.getpid())
    here = [each for each in all_gather(own, accelerator) if each[0] == own[0] and each != own]
    return None if any(space != own[1] for _, space, _ in here) else tuple(pid for *_, pid in here)


def _pid_namespace() -> int | None:
    """What processes have in common that see each other's ids; None where the system has no such spaces."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


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


def check_folder_is_shared(folder: Path, token: str, within_s: float, accelerator: Accelerator) -> None:
    """Check that all processes see the same folder: the main one leaves a token there. A collective call.

    Args:
        within_s: network file systems show new files after some seconds.

    Raises:
        ConfigurationError: (in all of them) some process does not see it.
    """
    if accelerator.num_processes == 1:
        return
    path = folder / TOKEN_NAME
    broadcast_from_main(lambda: write_text_atomically(token, path), accelerator)
    blind = [
        rank for rank, sees in enumerate(all_gather(_appears_with(path, token, within_s), accelerator)) if not sees
    ]
    if blind:
        raise ConfigurationError(
            f"processes {', '.join(map(str, blind))} do not see what process 0 writes into {folder}; give all "
            f"machines the same --output_dir on a shared file system"
        )


def _appears_with(path: Path, token: str, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        # What else than a file lies there is not what the main process wrote.
        with suppress(OSError):
            if read_regular_file(path) == token.encode():
                return True
        time.sleep(0.05)
    return False


def _machine_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def _value_or_error(make: Callable[[], T]) -> tuple[T | None, ProfilerError | None]:
    """What `make` returns, or its error: the other processes would wait for one that raises it at once."""
    try:
        return make(), None
    except ProfilerError as error:
        return None, error
    except Exception as error:
        unforeseen = UnforeseenError(described(error))
        unforeseen.__cause__ = error
        try:
            raise_if_device_is_lost(error)
        except ProfilerError as lost:
            return None, lost
        return None, unforeseen


@contextmanager
def lost_processes_named() -> Iterator[None]:
    """Raise WorkerLost where torch.distributed says with a RuntimeError that another process is gone or late."""
    try:
        yield
    except RuntimeError as error:
        raise WorkerLost(
            f"the processes did not find each other ({first_line(error)}); all must be launched within "
            "--worker_timeout with the same address, port and number, and one that ends with an error says so itself"
        ) from error
