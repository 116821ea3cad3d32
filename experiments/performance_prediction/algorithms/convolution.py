"""The shape of a 2-D convolution as one record, with output size, FLOPs and bytes."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

from torch import Tensor, nn

from experiment_core_utils.primitives.errors import ConfigurationError, SettingError

AlgorithmName = Literal[
    "direct",
    "gemm",
    "implicit gemm",
    "implicit precomp gemm",
    "fft",
    "fft tiling",
    "winograd",
    "winograd nonfused",
    "guess",
    "torch",
]
ALGORITHMS: tuple[AlgorithmName, ...] = get_args(AlgorithmName)
# fma: float32 products in float32. tf32: a float32 product may be rounded to TF32 first. half: 16-bit inputs, float32
# sums.
Precision = Literal["fma", "tf32", "half"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Pair = tuple[int, int]


class AlgorithmRefused(SettingError):
    """An algorithm does not cover a convolution: record it with the reason, and continue or fall back."""


def algorithm_named(name: str) -> AlgorithmName:
    """The algorithm of this published name; raises ConfigurationError for another."""
    for known in ALGORITHMS:
        if name == known:
            return known
    raise ConfigurationError(f"no convolution algorithm {name!r}; there are: {', '.join(ALGORITHMS)}")


@dataclass(frozen=True)
class ConvShape:
    """The shape of one call of a 2-D convolution (cross-correlation) over a zero-padded NCHW input, without bias.

    Raises:
        ConfigurationError: sizes that make no convolution.
    """

    #: batch, in_channels, height, width: of the input
    batch: int
    in_channels: int
    height: int
    width: int
    out_channels: int  #: in all groups together
    #: kernel, stride, padding, dilation: vertical, then horizontal; the padding is added on both sides
    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1  #: each sees in_channels / groups input channels and makes out_channels / groups

    def __post_init__(self) -> None:
        counts = (self.batch, self.in_channels, self.height, self.width, self.out_channels, self.groups)
        if min(*counts, *self.kernel, *self.stride, *self.dilation) < 1 or min(self.padding) < 0:
            raise ConfigurationError(f"no convolution has such sizes: {self}")
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise ConfigurationError(
                f"{self.groups} groups do not divide {self.in_channels} input and {self.out_channels} output channels"
            )
        if min(self.output_size) < 1:
            raise ConfigurationError(
                f"an input of {self.height}x{self.width} is too small for a kernel of {self.kernel}, padding "
                f"{self.padding}, dilation {self.dilation}; take a larger input"
            )

    @property
    def padded_size(self) -> Pair:
        """Height and width of the input with its zeros."""
        return self.height + 2 * self.padding[0], self.width + 2 * self.padding[1]

    @property
    def output_size(self) -> Pair:
        """Height and width of the output."""
        axes = zip(self.padded_size, self.kernel, self.dilation, self.stride, strict=True)
        height, width = ((size - spread * (taps - 1) - 1) // step + 1 for size, taps, spread, step in axes)
        return height, width

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.in_channels, self.height, self.width

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        return self.out_channels, self.in_channels // self.groups, *self.kernel

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.out_channels, *self.output_size

    @property
    def products_per_output(self) -> int:
        """Multiply-adds for one output element."""
        return prod(self.weight_shape[1:])

    @property
    def flops(self) -> int:
        """FLOPs of the definition, products with padding counted, 2 per multiply-add, whichever algorithm runs.

        FFT and Winograd need fewer, so that their FLOP/s by this count can exceed the device's peak.
        """
        return 2 * prod(self.output_shape) * self.products_per_output

    def bytes(self, element_bytes: int) -> int:
        """Bytes of input, weight and output moved once each: the least traffic; workspace not counted."""
        return element_bytes * (prod(self.input_shape) + prod(self.weight_shape) + prod(self.output_shape))

    def __str__(self) -> str:
        return (
            f"{self.kernel[0]}x{self.kernel[1]} {self.in_channels}->{self.out_channels} at {self.height}x{self.width}, "
            f"batch {self.batch}, stride {self.stride[0]}x{self.stride[1]}, padding {self.padding[0]}x"
            f"{self.padding[1]}, dilation {self.dilation[0]}x{self.dilation[1]}, groups {self.groups}"
        )


def shape_of_call(module: nn.Conv2d, given: Tensor) -> ConvShape:
    """The convolution that `module` makes of an input [batch, channels, height, width].

    Raises:
        ConfigurationError: padding with other values than zeros, or with more zeros on one side than on the other.
    """
    if module.padding_mode != "zeros":
        raise ConfigurationError(f"padding_mode {module.padding_mode!r} is not covered; zeros is")
    if given.dim() != 4:
        raise ConfigurationError(f"an input of {given.dim()} dimensions is not covered; 4 (NCHW) are")
    batch, channels, height, width = given.shape
    if channels != module.in_channels:
        raise ConfigurationError(f"the input has {channels} channels, the convolution takes {module.in_channels}")
    return ConvShape(
        batch=batch,
        in_channels=channels,
        height=height,
        width=width,
        out_channels=module.out_channels,
        kernel=_pair(module.kernel_size),
        stride=_pair(module.stride),
        padding=_zeros_around(module),
        dilation=_pair(module.dilation),
        groups=module.groups,
    )


def _pair(values: tuple[int, ...]) -> Pair:
    vertical, horizontal = values
    return vertical, horizontal


def _zeros_around(module: nn.Conv2d) -> Pair:
    if not isinstance(module.padding, str):
        return _pair(module.padding)
    if module.padding == "valid":
        return 0, 0
    both = [spread * (taps - 1) for taps, spread in zip(module.kernel_size, module.dilation, strict=True)]
    if any(zeros % 2 for zeros in both):
        raise ConfigurationError(f"padding='same' with a kernel of {module.kernel_size} pads unequally: not covered")
    return both[0] // 2, both[1] // 2


# Whose code runs: plain torch operations, cuDNN called directly, the project's Triton kernel, torch's own choice, ai3.
Engine = Literal["operations", "cudnn", "triton", "torch", "ai3"]


def nothing_to_close() -> None:
    """The close function of engines that use no resource."""


@dataclass(frozen=True)
class PreparedConvolution:
    """A convolution that its engine has granted."""

    shape: ConvShape  #: of the only call that it covers
    requested: AlgorithmName  #: the algorithm that was requested
    runs: AlgorithmName  #: the one that runs; another than `requested` only for `guess`, which makes a choice
    engine: Engine  #: whose code runs
    #: beside input, weight and output, while it runs; None where the engine does not report it
    workspace_bytes: int | None
    #: input [N,C,H,W] and weight [K,C/groups,R,S], both contiguous, to output [N,K,Ho,Wo]; no bias
    run: Callable[[Tensor, Tensor], Tensor]
    #: releases the engine's resources for it; `run` must not be called after
    close: Callable[[], None] = nothing_to_close
