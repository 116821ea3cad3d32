"""What commands have in common before they do anything: output that cannot fail on a letter, libraries that load."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from experiment_core_utils.primitives.errors import ConfigurationError, first_line

# What the system's loader says where a library does not fit into the memory that the process may have.
_NO_ROOM = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory")


def make_output_safe() -> None:
    """From here on a letter that the terminal's encoding lacks is printed as an escape.

    A dash under `LC_ALL=POSIX`, or a folder whose name is not UTF-8, would else end the command after its work.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def libraries_loading() -> Iterator[None]:
    """Around the imports that a command does late: raises ConfigurationError where memory is too little for them."""
    try:
        yield
    except (ImportError, OSError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in _NO_ROOM):
            raise
        raise ConfigurationError(
            f"this process may not have the memory that torch and transformers need ({first_line(error)}); raise its "
            "limit (ulimit -v unlimited)"
        ) from error
