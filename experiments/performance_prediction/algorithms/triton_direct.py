"""The direct convolution as a Triton kernel, and which convolutions it covers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from experiment_core_utils.primitives.triton_build import built
from experiments.performance_prediction.algorithms.convolution import AlgorithmRefused, ConvShape

# Elements of a tensor that 32-bit offsets reach, and programs along the second and third axis of a launch.
MOST_ELEMENTS, MOST_PROGRAMS = 2**31 - 1, 65535


def too_large(shape: ConvShape, channels: int) -> str | None:
    """The reason why a launch with programs of `channels` output channels of one image and group is too large."""
    sizes = (shape.input_shape, shape.weight_shape, shape.output_shape)
    elements = max(torch.Size(size).numel() for size in sizes)
    if elements > MOST_ELEMENTS:
        return f"takes tensors of up to {MOST_ELEMENTS} elements, this has one of {elements}"
    programs = max(shape.batch * shape.groups, triton.cdiv(shape.out_channels // shape.groups, channels))
    if programs > MOST_PROGRAMS:
        return f"takes up to {MOST_PROGRAMS} programs along an axis of the launch, this has {programs}"
    return None


# Output pixels and output channels of one program.
PIXELS, CHANNELS = 128, 16
SIZES = (
    *("height", "width", "rows", "columns", "in_channels", "out_channels", "groups"),
    *("stride_h", "stride_w", "padding_h", "padding_w", "dilation_h", "dilation_w", "taps_h", "taps_w"),
)


# One build for all shapes: variants for sizes of 1 and multiples of 16 would be built one by one, a second each.
@triton.jit(do_not_specialize=SIZES)
def direct_convolution_kernel(  # type: ignore[no-untyped-def]
    given,
    weight,
    output,
    height,
    width,
    rows,
    columns,
    in_channels,
    out_channels,
    groups,
    stride_h,
    stride_w,
    padding_h,
    padding_w,
    dilation_h,
    dilation_w,
    taps_h,
    taps_w,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Direct convolution. Channels are those of one group; the third axis of the launch counts images times groups."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    image_and_group = tl.program_id(2)
    group = image_and_group % groups
    row = (pixel // columns) * stride_h - padding_h
    column = (pixel % columns) * stride_w - padding_w
    pixel_inside = pixel < rows * columns
    channel_inside = channel < out_channels
    plane = given + image_and_group * in_channels * height * width
    filters = weight + (group * out_channels + channel) * in_channels * taps_h * taps_w
    total = tl.zeros((CHANNELS, PIXELS), dtype=tl.float32)
    for _channel in range(in_channels):
        for r in range(taps_h):
            y = row + r * dilation_h
            row_inside = pixel_inside & (y >= 0) & (y < height)
            for s in range(taps_w):
                x = column + s * dilation_w
                inside = row_inside & (x >= 0) & (x < width)
                sample = tl.load(plane + y * width + x, mask=inside, other=0.0).to(tl.float32)
                tap = tl.load(filters + r * taps_w + s, mask=channel_inside, other=0.0).to(tl.float32)
                total += tap[:, None] * sample[None, :]
        plane += height * width
        filters += taps_h * taps_w
    first = (image_and_group * out_channels + channel)[:, None] * (rows * columns)
    tl.store(output + first + pixel[None, :], total, mask=channel_inside[:, None] & pixel_inside[None, :])


def unsupported_reason(shape: ConvShape) -> str | None:
    """The reason why the kernel does not cover this convolution, to follow "direct"; None where it does."""
    return too_large(shape, CHANNELS)


def direct(given: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """The convolution of contiguous tensors of one dtype, with sums in float32.

    Raises:
        AlgorithmRefused: Triton cannot build the kernel here.
    """
    rows, columns = shape.output_size
    in_channels, out_channels = shape.weight_shape[1], shape.out_channels // shape.groups
    output = torch.empty(shape.output_shape, dtype=given.dtype, device=given.device)
    grid = (triton.cdiv(rows * columns, PIXELS), triton.cdiv(out_channels, CHANNELS), shape.batch * shape.groups)
    sizes = (shape.height, shape.width, rows, columns, in_channels, out_channels, shape.groups)
    steps = (*shape.stride, *shape.padding, *shape.dilation, *shape.kernel)
    with built("the direct kernel", AlgorithmRefused), torch.cuda.device_of(given):
        direct_convolution_kernel[grid](given, weight, output, *sizes, *steps, PIXELS=PIXELS, CHANNELS=CHANNELS)
    return output
