"""The distance by hand, and that the bounds are neither idle nor crossed by rounding alone."""

import math

import pytest
import torch

from experiments.performance_prediction.algorithms.convolution import ConvShape
from experiments.performance_prediction.algorithms.reference import error_bound, float64_reference, relative_l2

SHAPE = ConvShape(1, 64, 12, 12, 16, (3, 3), padding=(1, 1))


def test_the_distance_is_relative_to_the_reference() -> None:
    # |(3, 4) - (3, 3)| = 1, |(3, 3)| = √18.
    assert relative_l2(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0]).double()) == pytest.approx(1 / math.sqrt(18))


def test_a_reference_of_zeros_has_no_relative_distance_and_no_number_is_no_agreement() -> None:
    assert relative_l2(torch.ones(2), torch.zeros(2).double()) is None
    error = relative_l2(torch.tensor([math.nan, 1.0]), torch.ones(2).double())
    assert error is not None and math.isnan(error)


def test_the_reference_is_in_float64() -> None:
    given, weight = torch.randn(SHAPE.input_shape), torch.randn(SHAPE.weight_shape)
    assert float64_reference(given, weight, SHAPE).dtype == torch.float64


def test_bounds_by_hand() -> None:
    # 64·3·3 = 576 products: 2 + √576 / 4 = 8 steps of 2^-23 in float32, of 2^-10 in TF32, of 2^-7 in bfloat16.
    assert error_bound("gemm", SHAPE, torch.float32, "fma") == 8 * 2.0**-23
    assert error_bound("gemm", SHAPE, torch.float32, "tf32") == 8 * 2.0**-10
    assert error_bound("gemm", SHAPE, torch.bfloat16, "half") == 8 * 2.0**-7
    assert error_bound("fft", SHAPE, torch.float32, "fma") == 8 * 8 * 2.0**-23
    assert error_bound("guess", SHAPE, torch.float32, "fma") == 256 * 8 * 2.0**-23


def test_a_wrong_tap_is_beyond_every_bound() -> None:
    given, weight = torch.randn(SHAPE.input_shape), torch.randn(SHAPE.weight_shape)
    wrong = weight.clone()
    wrong[..., 0, 0] = wrong[..., 0, 1]
    reference = float64_reference(given, weight, SHAPE)
    error = relative_l2(float64_reference(given, wrong, SHAPE), reference)
    assert error is not None and error > 100 * error_bound("winograd nonfused", SHAPE, torch.float32, "fma")
