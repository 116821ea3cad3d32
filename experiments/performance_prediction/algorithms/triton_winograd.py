"""A fused Winograd F(2x2,3x3) convolution as a Triton kernel.

cuDNN's fused Winograd is not granted from Hopper on. This one transforms tiles of 4x4 samples, multiplies them with the
transformed weight and transforms the sums back in one kernel, in float32 without tensor cores. Each call transforms the
weight first, by a small kernel of its own, as cuDNN's Winograd does. Importing this module needs Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from experiment_core_utils.primitives.triton_build import built
from experiments.performance_prediction.algorithms.convolution import AlgorithmRefused, ConvShape
from experiments.performance_prediction.algorithms.on_cpu import FUSED_OUTPUTS, supports
from experiments.performance_prediction.algorithms.triton_direct import too_large

# Tiles, output channels and input channels of one step.
TILES, CHANNELS, DEPTH = 16, 32, 16
# Kernels of 3x3 that one program transforms.
KERNELS = 256
SIZES = (
    *("height", "width", "rows", "columns", "tiles_across", "tiles", "in_channels", "out_channels"),
    *("groups", "padding_h", "padding_w"),
)


@triton.jit
def _four_of_three(first, second, third):  # type: ignore[no-untyped-def]
    """The product of G and a column of three taps."""
    ends, middle = 0.5 * (first + third), 0.5 * second
    return -first, ends + middle, ends - middle, third


@triton.jit(do_not_specialize=("kernels",))
def winograd_filter_kernel(weight, transformed, kernels, KERNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The transform G g G^T of each kernel g: `weight` is [kernels, 9], `transformed` [16, kernels]."""
    kernel = tl.program_id(0) * KERNELS + tl.arange(0, KERNELS)
    inside = kernel < kernels
    taps = weight + kernel * 9
    a0, b0, c0, d0 = _four_of_three(_tap(taps, 0, inside), _tap(taps, 3, inside), _tap(taps, 6, inside))
    a1, b1, c1, d1 = _four_of_three(_tap(taps, 1, inside), _tap(taps, 4, inside), _tap(taps, 7, inside))
    a2, b2, c2, d2 = _four_of_three(_tap(taps, 2, inside), _tap(taps, 5, inside), _tap(taps, 8, inside))
    place = transformed + kernel
    _store_row(place, kernels, inside, a0, a1, a2)
    _store_row(place + 4 * kernels, kernels, inside, b0, b1, b2)
    _store_row(place + 8 * kernels, kernels, inside, c0, c1, c2)
    _store_row(place + 12 * kernels, kernels, inside, d0, d1, d2)


@triton.jit
def _tap(taps, number, inside):  # type: ignore[no-untyped-def]
    return tl.load(taps + number, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_row(place, kernels, inside, first, second, third):  # type: ignore[no-untyped-def]
    """Store the product of a row of three and G^T."""
    w0, w1, w2, w3 = _four_of_three(first, second, third)
    tl.store(place, w0, mask=inside)
    tl.store(place + kernels, w1, mask=inside)
    tl.store(place + 2 * kernels, w2, mask=inside)
    tl.store(place + 3 * kernels, w3, mask=inside)


@triton.jit
def _sample(plane, y, x, height, width, inside):  # type: ignore[no-untyped-def]
    there = inside & ((y >= 0) & (y < height) & (x >= 0) & (x < width))[:, None]
    return tl.load(plane + (y * width + x)[:, None], mask=there, other=0.0).to(tl.float32)


@triton.jit
def _column(plane, top, x, height, width, inside):  # type: ignore[no-untyped-def]
    """The product of B^T and one column of four samples."""
    first = _sample(plane, top, x, height, width, inside)
    second = _sample(plane, top + 1, x, height, width, inside)
    third = _sample(plane, top + 2, x, height, width, inside)
    fourth = _sample(plane, top + 3, x, height, width, inside)
    return third - first, second + third, third - second, fourth - second


@triton.jit
def _products(first, second, third, fourth, weight, step, inside, s0, s1, s2, s3):  # type: ignore[no-untyped-def]
    """Multiply one row of the transformed tile, times B, into its four sums."""
    w0 = tl.load(weight, mask=inside, other=0.0)
    w1 = tl.load(weight + step, mask=inside, other=0.0)
    w2 = tl.load(weight + 2 * step, mask=inside, other=0.0)
    w3 = tl.load(weight + 3 * step, mask=inside, other=0.0)
    s0 = tl.dot(third - first, w0, s0, input_precision="ieee")
    s1 = tl.dot(second + third, w1, s1, input_precision="ieee")
    s2 = tl.dot(third - second, w2, s2, input_precision="ieee")
    s3 = tl.dot(fourth - second, w3, s3, input_precision="ieee")
    return s0, s1, s2, s3


@triton.jit(do_not_specialize=SIZES)
def winograd_convolution_kernel(  # type: ignore[no-untyped-def]
    given,
    weight,
    output,
    height,
    width,
    rows,
    columns,
    tiles_across,
    tiles,
    in_channels,
    out_channels,
    groups,
    padding_h,
    padding_w,
    TILES: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Winograd convolution; channels are of one group; `weight` is transformed, [16, groups, out, in]."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    image_and_group = tl.program_id(2)
    depth = tl.arange(0, DEPTH)
    y = (tile // tiles_across) * 2
    x = (tile % tiles_across) * 2
    top, left = y - padding_h, x - padding_w
    step = groups * out_channels * in_channels
    filters = weight + ((image_and_group % groups) * out_channels + channel)[None, :] * in_channels + depth[:, None]
    planes = given + (image_and_group * in_channels + depth)[None, :] * height * width
    zeros = tl.zeros((TILES, CHANNELS), dtype=tl.float32)
    a0, a1, a2, a3 = zeros, zeros, zeros, zeros
    b0, b1, b2, b3 = zeros, zeros, zeros, zeros
    c0, c1, c2, c3 = zeros, zeros, zeros, zeros
    d0, d1, d2, d3 = zeros, zeros, zeros, zeros
    for start in range(0, in_channels, DEPTH):
        inside = (tile < tiles)[:, None] & (start + depth < in_channels)[None, :]
        weight_inside = (start + depth < in_channels)[:, None] & (channel < out_channels)[None, :]
        p0, q0, r0, t0 = _column(planes, top, left, height, width, inside)
        p1, q1, r1, t1 = _column(planes, top, left + 1, height, width, inside)
        p2, q2, r2, t2 = _column(planes, top, left + 2, height, width, inside)
        p3, q3, r3, t3 = _column(planes, top, left + 3, height, width, inside)
        a0, a1, a2, a3 = _products(p0, p1, p2, p3, filters, step, weight_inside, a0, a1, a2, a3)
        b0, b1, b2, b3 = _products(q0, q1, q2, q3, filters + 4 * step, step, weight_inside, b0, b1, b2, b3)
        c0, c1, c2, c3 = _products(r0, r1, r2, r3, filters + 8 * step, step, weight_inside, c0, c1, c2, c3)
        d0, d1, d2, d3 = _products(t0, t1, t2, t3, filters + 12 * step, step, weight_inside, d0, d1, d2, d3)
        planes += DEPTH * height * width
        filters += DEPTH
    e0, e1, e2, e3 = a0 + b0 + c0, a1 + b1 + c1, a2 + b2 + c2, a3 + b3 + c3
    f0, f1, f2, f3 = b0 - c0 + d0, b1 - c1 + d1, b2 - c2 + d2, b3 - c3 + d3
    inside = (tile < tiles)[:, None] & (channel < out_channels)[None, :]
    place = (image_and_group * out_channels + channel)[None, :] * (rows * columns) + (y * columns + x)[:, None]
    right, below = (x + 1 < columns)[:, None], (y + 1 < rows)[:, None]
    tl.store(output + place, e0 + e1 + e2, mask=inside)
    tl.store(output + place + 1, e1 - e2 + e3, mask=inside & right)
    tl.store(output + place + columns, f0 + f1 + f2, mask=inside & below)
    tl.store(output + place + columns + 1, f1 - f2 + f3, mask=inside & right & below)


def unsupported_reason(shape: ConvShape) -> str | None:
    """The reason why the kernel does not cover this convolution, to follow "winograd"; None where it does."""
    return supports("winograd", shape) or too_large(shape, CHANNELS)


def winograd(given: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """The convolution of contiguous tensors of one dtype that `unsupported_reason` accepts, with sums in float32.

    Raises:
        AlgorithmRefused: Triton cannot build the kernel here.
    """
    rows, columns = shape.output_size
    down, across = -(-rows // FUSED_OUTPUTS), -(-columns // FUSED_OUTPUTS)
    in_channels, out_channels = shape.weight_shape[1], shape.out_channels // shape.groups
    output = torch.empty(shape.output_shape, dtype=given.dtype, device=given.device)
    grid = (triton.cdiv(down * across, TILES), triton.cdiv(out_channels, CHANNELS), shape.batch * shape.groups)
    sizes = (shape.height, shape.width, rows, columns, across, down * across, in_channels, out_channels)
    kernels = out_channels * shape.groups * in_channels
    transformed = torch.empty(16, kernels, dtype=torch.float32, device=given.device)
    with built("the winograd kernel", AlgorithmRefused), torch.cuda.device_of(given):
        winograd_filter_kernel[(triton.cdiv(kernels, KERNELS),)](weight, transformed, kernels, KERNELS=KERNELS)
        winograd_convolution_kernel[grid](
            given,
            transformed,
            output,
            *sizes,
            shape.groups,
            *shape.padding,
            TILES=TILES,
            CHANNELS=CHANNELS,
            DEPTH=DEPTH,
        )
    return output
