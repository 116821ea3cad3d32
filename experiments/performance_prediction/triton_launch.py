"""In: a convolution; out: whether a Triton kernel can be launched for it."""

import torch
import triton

from experiments.performance_prediction.convolution import ConvShape

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
