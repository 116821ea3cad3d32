"""Locks on result files; a module of its own because the library takes 0.1 s to import."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from filelock import lock_descriptor

from experiment_core_utils.primitives.errors import ResultsRefused
from experiment_core_utils.primitives.files import check_replaceable, failed_writes_named


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
            f"{path} is being written by another process; wait for that run or end it, or give another --output_dir"
        )
