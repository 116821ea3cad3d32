"""In: a first launch of Triton's kernels; out: Triton's errors while it builds them, by the project's name.

Importing this module needs Triton.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from triton.errors import TritonError

from experiment_core_utils.primitives.errors import ConfigurationError, first_line


@contextmanager
def built(what: str) -> Iterator[None]:
    """Turns Triton's errors while it builds a kernel of `what` into ConfigurationError."""
    try:
        yield
    except (TritonError, subprocess.CalledProcessError) as error:
        raise ConfigurationError(f"Triton does not build the kernels of {what}: {first_line(error)}") from error
    except RuntimeError as error:
        # Triton says so by a bare RuntimeError where there is no C compiler for its launcher.
        if "C compiler" not in str(error):
            raise
        raise ConfigurationError(f"Triton does not build the kernels of {what}: {first_line(error)}") from error
