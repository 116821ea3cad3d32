"""What the disk does not take becomes one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiment_core_utils.primitives.errors import ResultsNotSaved, first_line


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
