"""The number of CPU threads that the environment requests, read without importing torch."""

import os
from collections.abc import Mapping

import psutil

from experiment_core_utils.primitives.errors import ConfigurationError

# What torchrun and `accelerate launch` put into the environment of the processes that they start.
LAUNCHER_MARKS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")


def environment_threads() -> int | None:
    """OMP_NUM_THREADS as somebody set it; None where nobody did.

    Launchers set it to 1 where nobody did; under one, the environment counts that it was started with itself.

    Raises:
        ConfigurationError: it is not a number of threads.
    """
    environment: Mapping[str, str] = os.environ
    if any(mark in environment for mark in LAUNCHER_MARKS):
        try:
            launcher = psutil.Process().parent()
            environment = {} if launcher is None else launcher.environ()
        except psutil.Error:  # not ours to read, or gone: then the variable's origin is not known
            return None
    given = environment.get("OMP_NUM_THREADS", "").strip()
    if not given:
        return None
    # One number for each level of nested parallel work; the first is that of the outermost.
    first = given.split(",")[0].strip()
    if not first.isdecimal() or int(first) == 0:
        raise ConfigurationError(f"OMP_NUM_THREADS={given} is not a number of threads; give 1 or more, or unset it")
    return int(first)
