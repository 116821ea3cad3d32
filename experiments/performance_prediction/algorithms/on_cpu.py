"""Convolution algorithms as plain torch operations, and which convolutions each of them covers.

The functions transform the weight in each call, as cuDNN's do. They run wherever the tensors are, but represent an
algorithm on the CPU only: on a GPU an algorithm's name means cuDNN's kernel or the project's own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from math import prod
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from experiments.performance_prediction.algorithms.convolution import AlgorithmName, ConvShape, Pair

TILE = 32


def fft(given: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """The convolution by one spectrum of the whole padded plane."""
    circular = _correlate(_padded(given, shape).unsqueeze(2), weight, shape, shape.padded_size)
    rows, columns = shape.output_size
    return circular[:, :, 0, :rows, :columns].contiguous()


def fft_tiling(given: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """The convolution by overlap-save: tiles of 32x32 that overlap by kernel - 1, without their wrapped outputs.

    A side of the plane that is shorter than a tile is one tile of its own length.
    """
    tile = (min(TILE, shape.padded_size[0]), min(TILE, shape.padded_size[1]))
    steps = (tile[0] - shape.kernel[0] + 1, tile[1] - shape.kernel[1] + 1)
    tiles = _tiles(given, shape, tile, steps)
    circular = _correlate(tiles.flatten(2, 3), weight, shape, tile)
    return _plane(circular[..., : steps[0], : steps[1]].unflatten(2, tiles.shape[2:4]), shape)


def _padded(given: Tensor, shape: ConvShape) -> Tensor:
    return functional.pad(given, (shape.padding[1], shape.padding[1], shape.padding[0], shape.padding[0]))


def _tiles(given: Tensor, shape: ConvShape, tile: Pair, steps: Pair) -> Tensor:
    """A view [N, C, tiles down, tiles across, h, w] of the padded input, in tiles that make `steps` outputs each."""
    down, across = (-(-size // step) for size, step in zip(shape.output_size, steps, strict=True))
    below = (down - 1) * steps[0] + tile[0] - shape.height - shape.padding[0]
    right = (across - 1) * steps[1] + tile[1] - shape.width - shape.padding[1]
    padded = functional.pad(given, (shape.padding[1], right, shape.padding[0], below))
    return padded.unfold(2, tile[0], steps[0]).unfold(3, tile[1], steps[1])


def _plane(tiles: Tensor, shape: ConvShape) -> Tensor:
    """The output [N, K, Ho, Wo] of tiles [N, K, down, across, h, w] of it, without what lies beyond its edges."""
    rows, columns = shape.output_size
    return tiles.transpose(3, 4).flatten(4, 5).flatten(2, 3)[:, :, :rows, :columns].contiguous()


def _correlate(pieces: Tensor, weight: Tensor, shape: ConvShape, size: Pair) -> Tensor:
    """The circular cross-correlation of `size`: pieces [N,C,T,h,w] -> [N,K,T,h,w].

    The sum over channels is one matrix product for each frequency and group.
    """
    batch, _, count = pieces.shape[:3]
    spectra = torch.fft.rfft2(pieces).reshape(batch, shape.groups, shape.weight_shape[1], count, -1)
    kernels = torch.fft.rfft2(weight, s=size).conj().reshape(shape.groups, -1, shape.weight_shape[1], spectra.shape[-1])
    # [frequency, group, N·T, C/groups] @ [frequency, group, C/groups, K/groups]
    left = spectra.permute(4, 1, 0, 3, 2).flatten(2, 3)
    product = left @ kernels.permute(3, 0, 2, 1)
    restored = product.unflatten(2, (batch, count)).permute(2, 1, 4, 3, 0)
    half = size[1] // 2 + 1
    return torch.fft.irfft2(restored.reshape(batch, shape.out_channels, count, size[0], half), s=size)


def direct(given: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """The convolution as a sum over kernel taps: the input shifted by a tap, times that tap's channel matrix."""
    rows, columns = shape.output_size
    padded = _padded(given, shape)
    grouped = weight.reshape(shape.groups, -1, shape.weight_shape[1], *shape.kernel)
    size = (shape.batch, shape.groups, grouped.shape[1], rows * columns)
    output = torch.zeros(size, dtype=given.dtype, device=given.device)
    for r in range(shape.kernel[0]):
        top = r * shape.dilation[0]
        for s in range(shape.kernel[1]):
            left = s * shape.dilation[1]
            bottom, right = top + (rows - 1) * shape.stride[0] + 1, left + (columns - 1) * shape.stride[1] + 1
            shifted = padded[:, :, top : bottom : shape.stride[0], left : right : shape.stride[1]]
            output += grouped[..., r, s] @ shifted.reshape(shape.batch, shape.groups, -1, rows * columns)
    return output.reshape(shape.output_shape)


def gemm(given: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """The convolution by the whole im2col matrix [N, C·R·S, Ho·Wo], then one matrix product per image and group."""
    columns = functional.unfold(given, shape.kernel, shape.dilation, shape.padding, shape.stride)
    grouped = columns.reshape(shape.batch, shape.groups, shape.products_per_output, -1)
    return (weight.reshape(shape.groups, -1, shape.products_per_output) @ grouped).reshape(shape.output_shape)


# Interpolation points in the order of their use; the point at infinity comes last. Small values lose least precision.
POINTS = (Fraction(0), Fraction(1), Fraction(-1), Fraction(2), Fraction(-2), Fraction(1, 2), Fraction(-1, 2))
Matrix = tuple[tuple[Fraction, ...], ...]


@dataclass(frozen=True)
class WinogradTransform:
    """The matrices of F(m, r), with n = m + r - 1."""

    output: Matrix  #: A^T [m, n]
    kernel: Matrix  #: G [n, r]
    given: Matrix  #: B^T [n, n]


@cache
def winograd_transform(outputs: int, taps: int) -> WinogradTransform:
    """The transform F(outputs, taps); raises ValueError where it needs more points than there are."""
    samples = outputs + taps - 1
    if samples - 1 > len(POINTS):
        raise ValueError(f"F({outputs}, {taps}) needs {samples - 1} points, {len(POINTS)} are known")
    points = POINTS[: samples - 1]
    others = [tuple(other for other in points if other != point) for point in points]
    scales = [
        prod((point - other for other in rest), start=Fraction(1)) for point, rest in zip(points, others, strict=True)
    ]
    return WinogradTransform(
        output=tuple((*(point**power for point in points), Fraction(power == outputs - 1)) for power in range(outputs)),
        kernel=(
            *(
                tuple(point**power / scale for power in range(taps))
                for point, scale in zip(points, scales, strict=True)
            ),
            tuple(Fraction(power == taps - 1) for power in range(taps)),
        ),
        given=(*((*_polynomial(rest), Fraction(0)) for rest in others), _polynomial(points)),
    )


def _polynomial(roots: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """Coefficients of the product of (x - root), constant first."""
    coefficients = [Fraction(1)]
    for root in roots:
        higher = [Fraction(0), *coefficients]
        coefficients = [above - root * own for above, own in zip(higher, [*coefficients, Fraction(0)], strict=True)]
    return tuple(coefficients)


FUSED_OUTPUTS = 2
NONFUSED_OUTPUTS = {3: 4, 5: 2}


def winograd(given: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """The convolution by F(2x2, 3x3), one row of tiles after the other: no transformed plane is ever held whole."""
    tiles = _winograd_tiles(given, shape, FUSED_OUTPUTS)
    kernels = transformed_kernels(weight, shape, FUSED_OUTPUTS)
    rows = [_outputs(tiles[:, :, row : row + 1], kernels, shape, FUSED_OUTPUTS) for row in range(tiles.shape[2])]
    return _plane(torch.cat(rows, dim=2), shape)


def winograd_nonfused(given: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """The convolution by F(4x4, 3x3) or F(2x2, 5x5), each stage for all tiles before the next."""
    outputs = NONFUSED_OUTPUTS[shape.kernel[0]]
    tiles = _winograd_tiles(given, shape, outputs)
    return _plane(_outputs(tiles, transformed_kernels(weight, shape, outputs), shape, outputs), shape)


def _winograd_tiles(given: Tensor, shape: ConvShape, outputs: int) -> Tensor:
    side = outputs + shape.kernel[0] - 1
    return _tiles(given, shape, (side, side), (outputs, outputs))


def transformed_kernels(weight: Tensor, shape: ConvShape, outputs: int) -> Tensor:
    """The transform G g G^T of each 2-D kernel g: [n·n, groups, K/groups, C/groups]."""
    matrix = _tensor(winograd_transform(outputs, shape.kernel[0]).kernel, weight)
    transformed = (matrix @ weight @ matrix.T).flatten(2).permute(2, 0, 1)
    return transformed.unflatten(1, (shape.groups, -1)).contiguous()


def _outputs(tiles: Tensor, kernels: Tensor, shape: ConvShape, outputs: int) -> Tensor:
    """Outputs [N, K, down, across, m, m] of tiles [N, C, down, across, n, n], by transform, products and transform."""
    transform = winograd_transform(outputs, shape.kernel[0])
    from_input, to_output = _tensor(transform.given, tiles), _tensor(transform.output, tiles)
    batch, _, down, across = tiles.shape[:4]
    transformed = (from_input @ tiles @ from_input.T).flatten(4).flatten(2, 3)
    # [n·n, groups, C/groups, N·tiles]
    columns = transformed.unflatten(1, (shape.groups, -1)).permute(4, 1, 2, 0, 3).flatten(3)
    product = (kernels @ columns).flatten(1, 2)
    sides = (len(transform.given), len(transform.given))
    squares = product.unflatten(0, sides).unflatten(3, (batch, down, across)).permute(3, 2, 4, 5, 0, 1)
    return to_output @ squares @ to_output.T


def _tensor(matrix: Matrix, like: Tensor) -> Tensor:
    return torch.tensor([[float(value) for value in row] for row in matrix], dtype=like.dtype, device=like.device)


class ConvolutionFunction(Protocol):
    """A function from input [N,C,H,W] and weight [K,C/groups,R,S] to output [N,K,Ho,Wo]."""

    def __call__(self, given: Tensor, weight: Tensor, shape: ConvShape) -> Tensor: ...


# The plane that cuDNN's own whole-plane FFT is documented to take at most, padding counted.
LARGEST_FFT_PLANE = 256


def torch_choice(given: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """The convolution by the algorithm that torch chooses."""
    return functional.conv2d(given, weight, None, shape.stride, shape.padding, shape.dilation, shape.groups)


def _gpu_only(shape: ConvShape) -> str | None:
    return "is a way of reading memory in a GPU kernel; on the CPU it would be gemm"


def _unit_steps(shape: ConvShape) -> str | None:
    if shape.stride != (1, 1):
        return f"takes stride 1, this is {shape.stride[0]}x{shape.stride[1]}"
    if shape.dilation != (1, 1):
        return f"takes dilation 1, this is {shape.dilation[0]}x{shape.dilation[1]}"
    return None


def _spectrum(shape: ConvShape) -> str | None:
    if any(zeros >= taps for zeros, taps in zip(shape.padding, shape.kernel, strict=True)):
        return f"takes padding smaller than the kernel, this is {shape.padding} at {shape.kernel}"
    return _unit_steps(shape)


def _whole_plane(shape: ConvShape) -> str | None:
    if max(shape.padded_size) > LARGEST_FFT_PLANE:
        return f"takes a padded plane of up to {LARGEST_FFT_PLANE}, this is {'x'.join(map(str, shape.padded_size))}"
    return _spectrum(shape)


def _tiled_plane(shape: ConvShape) -> str | None:
    if max(shape.kernel) > TILE:
        return f"takes kernels of up to {TILE}, this is {shape.kernel[0]}x{shape.kernel[1]}"
    return _spectrum(shape)


def _square(sides: tuple[int, ...], shape: ConvShape) -> str | None:
    if shape.kernel not in [(side, side) for side in sides]:
        allowed = " and ".join(f"{side}x{side}" for side in sides)
        return f"takes kernels of {allowed}, this is {shape.kernel[0]}x{shape.kernel[1]}"
    return _unit_steps(shape)


_REFUSALS: Mapping[AlgorithmName, Callable[[ConvShape], str | None]] = {
    "implicit gemm": _gpu_only,
    "implicit precomp gemm": _gpu_only,
    "fft": _whole_plane,
    "fft tiling": _tiled_plane,
    "winograd": partial(_square, (3,)),
    "winograd nonfused": partial(_square, tuple(NONFUSED_OUTPUTS)),
}
# guess: on the CPU there is no heuristic but torch's own.
CPU_ALGORITHMS: Mapping[AlgorithmName, ConvolutionFunction] = {
    "direct": direct,
    "gemm": gemm,
    "fft": fft,
    "fft tiling": fft_tiling,
    "winograd": winograd,
    "winograd nonfused": winograd_nonfused,
    "guess": torch_choice,
    "torch": torch_choice,
}


def supports(algorithm: AlgorithmName, shape: ConvShape) -> str | None:
    """The reason why `CPU_ALGORITHMS[algorithm]` does not compute this, to follow its name; None where it does.

    The limits are those that cuDNN documents for the algorithm of that name.
    """
    return _REFUSALS[algorithm](shape) if algorithm in _REFUSALS else None
