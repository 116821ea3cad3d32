"""In: a convolution, or a launch of a Triton kernel; out: whether it can be launched, and Triton's errors by name."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
from triton.errors import TritonError

from experiment_core_utils.primitives.errors import first_line
from experiments.performance_prediction.convolution import AlgorithmRefused, ConvShape

# Elements of a tensor that 32-bit offsets reach, and programs along the second and third axis of a launch.
MOST_ELEMENTS, MOST_PROGRAMS = 2**31 - 1, 65535


def too_large(shape: ConvShape, channels: int) -> str | None:
    """The reason against a launch whose programs make `channels` output channels of one image and group each."""
    sizes = (shape.input_shape, shape.weight_shape, shape.output_shape)
    elements = max(torch.Size(size).numel() for size in sizes)
    if elements > MOST_ELEMENTS:
        return f"takes tensors of up to {MOST_ELEMENTS} elements, this has one of {elements}"
    programs = max(shape.batch * shape.groups, triton.cdiv(shape.out_channels // shape.groups, channels))
    if programs > MOST_PROGRAMS:
        return f"takes up to {MOST_PROGRAMS} programs along an axis of the launch, this has {programs}"
    return None


@contextmanager
def built(kernel: str) -> Iterator[None]:
    """Turns Triton's errors while it builds a kernel into AlgorithmRefused."""
    try:
        yield
    except (TritonError, subprocess.CalledProcessError) as error:
        raise AlgorithmRefused(f"Triton does not build the {kernel} kernel: {first_line(error)}") from error
    except RuntimeError as error:
        # Triton says so by a bare RuntimeError where there is no C compiler for its launcher.
        if "C compiler" not in str(error):
            raise
        raise AlgorithmRefused(f"Triton does not build the {kernel} kernel: {first_line(error)}") from error
