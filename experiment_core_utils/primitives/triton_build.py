"""Triton's build errors under the project's own names, and whether its kernels run on this machine.

Importing this module does not need Triton; launching its kernels does.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from experiment_core_utils.primitives.errors import ProfilerError, first_line


def vendor_unsupported_reason() -> str | None:
    """The reason why kernels for CUDA do not run with this torch, which calls AMD's GPUs "cuda" too; None where they
    may.
    """
    if torch.version.hip is None:
        return None
    return f"its kernels are for CUDA, and this torch is built for ROCm {torch.version.hip}"


def are_interpreted() -> bool:
    """Whether Triton's interpreter runs kernels, which it does on the CPU; Triton reads the variable when imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def kernels_unsupported_reason(device: torch.device, import_kernels: Callable[[], object]) -> str | None:
    """The reason why kernels cannot be launched for weights on this device; None where they can."""
    if device.type != "cuda" and not are_interpreted():
        return f"its weights are on {device.type}, not on a CUDA device"
    if (reason := vendor_unsupported_reason()) is not None:
        return reason
    try:
        import_kernels()
    except ImportError as error:
        return f"Triton is missing ({first_line(error)})"
    return None


@contextmanager
def built(what: str, refused: type[ProfilerError]) -> Iterator[None]:
    """Turns Triton's errors while it builds `what` into `refused`."""
    from triton.errors import TritonError

    try:
        yield
    except (TritonError, subprocess.CalledProcessError) as error:
        raise refused(f"Triton does not build {what}: {first_line(error)}") from error
    except RuntimeError as error:
        # Triton says so by a bare RuntimeError where there is no C compiler for its launcher.
        if "C compiler" not in str(error):
            raise
        raise refused(f"Triton does not build {what}: {first_line(error)}") from error
