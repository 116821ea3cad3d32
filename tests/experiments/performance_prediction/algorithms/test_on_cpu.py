"""Every algorithm against torch's own convolution, and what each refuses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from experiments.performance_prediction.algorithms.convolution import ALGORITHMS, AlgorithmName, ConvShape
from experiments.performance_prediction.algorithms.on_cpu import CPU_ALGORITHMS, supports
from experiments.performance_prediction.algorithms.reference import error_bound

NAMED: tuple[AlgorithmName, ...] = ("direct", "gemm", "fft", "fft tiling", "winograd", "winograd nonfused")
TAPS: tuple[AlgorithmName, ...] = ("direct", "gemm")
KERNELS: dict[AlgorithmName, list[tuple[int, int]]] = {"winograd": [(3, 3)], "winograd nonfused": [(3, 3), (5, 5)]}
ANY_KERNEL = [(1, 1), (3, 3), (5, 5), (1, 7), (4, 2), (2, 3)]


@st.composite
def shapes(draw: st.DrawFn, algorithm: AlgorithmName) -> ConvShape:
    """Of those that the algorithm supports; strides and dilations for those that take any."""
    kernel = draw(st.sampled_from(KERNELS.get(algorithm, ANY_KERNEL)))
    steps = st.sampled_from([(1, 1), (2, 2), (1, 3)] if algorithm in TAPS else [(1, 1)])
    dilation = draw(st.sampled_from([(1, 1), (2, 1)] if algorithm in TAPS else [(1, 1)]))
    most = [taps if algorithm in TAPS else taps - 1 for taps in kernel]
    padding = (draw(st.integers(0, most[0])), draw(st.integers(0, most[1])))
    least = [max(1, d * (k - 1) + 1 - 2 * p) for d, k, p in zip(dilation, kernel, padding, strict=True)]
    groups, few = draw(st.sampled_from([1, 1, 2, 3])), st.integers(1, 3)
    return ConvShape(
        batch=draw(few),
        in_channels=groups * draw(few),
        height=draw(st.integers(least[0], 45)),
        width=draw(st.integers(least[1], 45)),
        out_channels=groups * draw(few),
        kernel=kernel,
        stride=draw(steps),
        padding=padding,
        dilation=dilation,
        groups=groups,
    )


def tensors(shape: ConvShape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input and weight rounded to `dtype`, and their convolution in float64."""
    generator = torch.Generator().manual_seed(shape.height * 64 + shape.width)
    values = torch.randn(shape.input_shape, generator=generator).to(dtype)
    weight = torch.randn(shape.weight_shape, generator=generator).to(dtype)
    steps = (shape.stride, shape.padding, shape.dilation, shape.groups)
    return values, weight, functional.conv2d(values.double(), weight.double(), None, *steps)


@pytest.mark.parametrize("algorithm", NAMED)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_each_algorithm_is_the_convolution_wherever_it_is_supported(
    algorithm: AlgorithmName, data: st.DataObject
) -> None:
    shape = data.draw(shapes(algorithm))
    assert supports(algorithm, shape) is None
    values, weight, expected = tensors(shape, torch.float64)
    output = CPU_ALGORITHMS[algorithm](values, weight, shape)
    assert output.shape == shape.output_shape and output.is_contiguous()
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12 * float(1 + expected.abs().max()))


@pytest.mark.parametrize("algorithm", NAMED)
@pytest.mark.parametrize("kernel", [(3, 3), (5, 5)])
def test_in_float32_the_error_stays_within_its_bound(algorithm: AlgorithmName, kernel: tuple[int, int]) -> None:
    shape = ConvShape(2, 24, 37, 41, 16, kernel, padding=(1, 1))
    if supports(algorithm, shape) is not None:
        assert (algorithm, kernel) == ("winograd", (5, 5))
        return
    values, weight, expected = tensors(shape, torch.float32)
    output = CPU_ALGORITHMS[algorithm](values, weight, shape)
    assert output.dtype == torch.float32
    error = float((output - expected).norm() / expected.norm())
    assert 1e-9 < error < error_bound(algorithm, shape, torch.float32, "fma")


PLAIN = ConvShape(1, 2, 20, 20, 2, (3, 3), padding=(1, 1))


@pytest.mark.parametrize(
    ("shape", "refusing"),
    [
        (PLAIN, set()),
        (ConvShape(1, 2, 20, 20, 2, (3, 3), stride=(2, 2)), {"fft", "fft tiling", "winograd", "winograd nonfused"}),
        (ConvShape(1, 2, 20, 20, 2, (3, 3), dilation=(2, 2)), {"fft", "fft tiling", "winograd", "winograd nonfused"}),
        (ConvShape(1, 2, 20, 20, 2, (1, 1)), {"winograd", "winograd nonfused"}),
        (ConvShape(1, 2, 20, 20, 2, (5, 5)), {"winograd"}),
        # Padding as large as the kernel; a plane of 255 + 2; a kernel larger than a tile.
        (ConvShape(1, 2, 20, 20, 2, (1, 1), padding=(1, 1)), {"fft", "fft tiling", "winograd", "winograd nonfused"}),
        (ConvShape(1, 2, 255, 20, 2, (3, 3), padding=(1, 1)), {"fft"}),
        (ConvShape(1, 2, 40, 40, 2, (33, 3)), {"fft tiling", "winograd", "winograd nonfused"}),
    ],
)
def test_refusals(shape: ConvShape, refusing: set[str]) -> None:
    found = {algorithm for algorithm in ALGORITHMS if supports(algorithm, shape) is not None}
    assert found == refusing | {"implicit gemm", "implicit precomp gemm"}


def test_a_refusal_says_what_is_taken_and_what_was_given() -> None:
    strided = ConvShape(1, 2, 20, 20, 2, (3, 3), stride=(2, 1))
    assert supports("fft", strided) == "takes stride 1, this is 2x1"
    assert supports("winograd", ConvShape(1, 2, 20, 20, 2, (5, 5))) == "takes kernels of 3x3, this is 5x5"


def test_every_name_has_a_function_or_a_refusal_of_every_shape() -> None:
    assert set(ALGORITHMS) - set(CPU_ALGORITHMS) == {"implicit gemm", "implicit precomp gemm"}
