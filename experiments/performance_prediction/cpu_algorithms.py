"""In: an algorithm and a convolution; out: whether plain torch operations compute it that way, and the function.

The functions transform the weight in each call, as cuDNN's do. They run wherever the tensors are, but stand for an
algorithm on the CPU only: on a GPU an algorithm's name means cuDNN's kernel or the project's own.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from experiments.performance_prediction.convolution import AlgorithmName, ConvShape
from experiments.performance_prediction.fourier_algorithms import TILE, fft, fft_tiling
from experiments.performance_prediction.tap_algorithms import direct, gemm
from experiments.performance_prediction.winograd_algorithms import NONFUSED_OUTPUTS, winograd, winograd_nonfused


class ConvolutionFunction(Protocol):
    """Input [N,C,H,W] and weight [K,C/groups,R,S] to output [N,K,Ho,Wo]."""

    def __call__(self, given: Tensor, weight: Tensor, shape: ConvShape) -> Tensor: ...


# The plane that cuDNN's own whole-plane FFT is documented to take at most, padding counted.
LARGEST_FFT_PLANE = 256


def torch_choice(given: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """What torch chooses by itself."""
    return functional.conv2d(given, weight, None, shape.stride, shape.padding, shape.dilation, shape.groups)


def _any_shape(shape: ConvShape) -> str | None:
    return None


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


def _three_by_three(shape: ConvShape) -> str | None:
    return _square((3,), shape)


def _three_or_five(shape: ConvShape) -> str | None:
    return _square(tuple(NONFUSED_OUTPUTS), shape)


_REFUSALS: Mapping[AlgorithmName, Callable[[ConvShape], str | None]] = {
    "direct": _any_shape,
    "gemm": _any_shape,
    "implicit gemm": _gpu_only,
    "implicit precomp gemm": _gpu_only,
    "fft": _whole_plane,
    "fft tiling": _tiled_plane,
    "winograd": _three_by_three,
    "winograd nonfused": _three_or_five,
    "guess": _any_shape,
    "torch": _any_shape,
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
    """None where `CPU_ALGORITHMS[algorithm]` computes this convolution; else the reason, to stand after its name.

    The limits are those that cuDNN documents for the algorithm of that name.
    """
    return _REFUSALS[algorithm](shape)
