"""Files that are written whole or not at all; what the disk does not take becomes one line."""

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiment_core_utils.primitives.errors import ConfigurationError, ResultsNotSaved, first_line

_FILE_NAME_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def check_file_name_part(value: str, what: str) -> None:
    """Raises ConfigurationError for a name that could lead out of its folder or into another file."""
    if not _FILE_NAME_PART.fullmatch(value):
        raise ConfigurationError(f"{what} {value!r} is part of file names; use letters, digits, - and _ only")


@contextmanager
def failed_writes_named(path: Path) -> Iterator[None]:
    """Turns the system's refusal to write `path` (disk full, quota, read-only, gone) into ResultsNotSaved."""
    try:
        yield
    except OSError as error:
        raise ResultsNotSaved(
            f"{path} cannot be written ({error.strerror or first_line(error)}); what was finished before is saved: "
            "make room, and the same command goes on"
        ) from error


def write_json_atomically(content: Mapping[str, Any], path: Path) -> None:
    """Write beside `path`, flush to disk, rename over it: a reader sees the old file or the new one, never a part."""
    write_text_atomically(json.dumps(content, indent=1, allow_nan=False) + "\n", path)


def write_text_atomically(text: str, path: Path) -> None:
    """The same for text; raises ResultsNotSaved where the disk does not take it."""
    # Always the same name: what a killed process leaves behind is written over by the one that goes on.
    temporary = path.with_name(f".{path.name}.tmp")
    with failed_writes_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            flush_folder(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, no other process that asks for the lock beside `path` works on it; waits until it is free.

    The lock is a hidden file that stays, because removing it would let two processes in. The system gives the lock
    back when a process ends in whatever way.
    """
    with failed_writes_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with failed_writes_named(path):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove what writers that were killed left beside their files, which may never be written again."""
    for kind in ("json", "csv"):
        for path in folder.glob(f".*.{kind}.tmp"):
            path.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk: a rename may else come after what is done because of it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
