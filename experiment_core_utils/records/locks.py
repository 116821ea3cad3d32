"""Locks on result files, and what they show: whether a file has its name still, and whether a run's main process lives.

A module of its own because the library takes 0.1 s to import.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from filelock import lock_descriptor

from experiment_core_utils.primitives.errors import ResultsNotSaved, ResultsRefused, WorkerLost
from experiment_core_utils.primitives.files import check_replaceable, failed_writes_named, read_regular_file

# How often the holder of a run's lock shows that it lives.
_REFRESH_S = 1.0


def locked(path: Path) -> AbstractContextManager[int]:
    """Inside, no other process that asks for the lock beside `path` works on it; waits until it is free.

    The lock is a hidden file that stays; `locked_file` says the rest.
    """
    return locked_file(path.with_name(f".{path.name}.lock"), waits=True)


@contextmanager
def locked_file(path: Path, *, waits: bool) -> Iterator[int]:
    """The descriptor of a file, made where there is none, that no other process has the lock of meanwhile.

    The file must not be removed while it is locked; before that it may. The system gives the lock back when a process
    ends in whatever way.

    Args:
        waits: until the lock is free.

    Raises:
        ResultsRefused: another process has it and `waits` is False, or the file system has no locks.
        OutputRefused, ResultsNotSaved: the file cannot be made, or something else than a file has its name.
    """
    check_replaceable(path)
    while True:
        with failed_writes_named(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, path, waits)
            if os.fstat(descriptor).st_nlink:
                yield descriptor
                return
        finally:
            os.close(descriptor)


def refuse_removed(descriptor: int, path: Path) -> None:
    """Raises ResultsNotSaved where an open file does not have this name any more: what is written to it is lost."""
    with suppress(OSError):
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return
    raise ResultsNotSaved(
        f"{path} was removed or moved while this run writes it; put it back where it was moved, and run the same "
        "command again to resume with what is in it"
    )


class RunLock:
    """The lock of a run, as its main process holds it.

    Args:
        descriptor: of the locked file.
        clock: in seconds.
    """

    def __init__(self, path: Path, descriptor: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._descriptor = descriptor
        self._clock = clock
        self._refreshed_s = clock() - _REFRESH_S
        self._write(b"")

    def refresh(self) -> None:
        """Show the other processes, by the file's time, that this one lives.

        Raises:
            ResultsNotSaved: the lock was removed or moved, so that another run may begin beside this one.
        """
        refuse_removed(self._descriptor, self._path)
        if self._clock() - self._refreshed_s >= _REFRESH_S:
            with failed_writes_named(self._path):
                os.utime(self._descriptor)
            self._refreshed_s = self._clock()

    def announce_end(self, experiment_id: str) -> None:
        """Tell the other processes that the run is complete; raises as `refresh`."""
        refuse_removed(self._descriptor, self._path)
        self._write(experiment_id.encode())

    def _write(self, content: bytes) -> None:
        with failed_writes_named(self._path):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, content, 0)


class MainProcessWatch:
    """Whether the main process of a run lives, as another process of the run sees it by the lock.

    Made while the main process is known to hold the lock. Where the file system does not show locks of other machines,
    only the file's time counts.

    Args:
        path: of the lock.
        timeout_s: the longest time without a sign of life.
        clock: in seconds.
    """

    def __init__(self, path: Path, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._clock = clock
        self._shows_locks = is_locked(path) is True
        self._seen: int | None = None
        self._since_s = self._looked_s = clock()

    def check(self) -> None:
        """Raises WorkerLost where the main process has ended, or shown no sign of life for too long."""
        todo = "finished samples are saved: run the same command again to resume"
        if self._shows_locks and is_locked(self._path) is False:
            raise WorkerLost(f"{self._path} is not locked any more: process 0 of the run has ended; {todo}")
        now_s, seen = self._clock(), self._modified_ns()
        # This process, too, may have been stopped meanwhile, and the other one with it.
        if seen != self._seen or now_s - self._looked_s > self._timeout_s / 2:
            self._seen, self._since_s = seen, now_s
        self._looked_s = now_s
        if now_s - self._since_s > self._timeout_s:
            raise WorkerLost(
                f"process 0 of the run has shown no sign of life for {self._timeout_s:g} s (the time of {self._path} "
                f"does not change); {todo} (a larger --worker_timeout waits longer)"
            )

    def is_over(self, experiment_id: str) -> bool:
        """Whether the main process has said that this run is complete."""
        try:
            return read_regular_file(self._path) == experiment_id.encode()
        except OSError:
            return False

    def _modified_ns(self) -> int | None:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return None


def is_locked(path: Path) -> bool | None:
    """Whether a process has the lock of a file, which is not made; None where that cannot be known."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        # Readers share it, and it is given back at once.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def _lock(descriptor: int, path: Path, waits: bool) -> None:
    try:
        is_locked = lock_descriptor(descriptor, blocking=waits)
    except OSError as error:
        raise ResultsRefused(
            f"{path} cannot be locked ({error.strerror}); give a place on a file system that has locks"
        ) from error
    if not is_locked:
        raise ResultsRefused(
            f"{path} is being written by another process; wait for that run or end it, or give another folder"
        )
