"""Sizes, FLOPs and bytes of a convolution by hand."""

import pytest
import torch
from torch import nn

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.performance_prediction.algorithms.convolution import ConvShape, algorithm_named, shape_of_call

# AlexNet's first layer: (224 + 4 - 11) // 4 + 1 = 55.
ALEXNET = ConvShape(2, 3, 224, 224, 64, (11, 11), (4, 4), (2, 2))


def test_the_first_layer_of_alexnet() -> None:
    assert ALEXNET.output_shape == (2, 64, 55, 55)
    assert ALEXNET.flops == 2 * (2 * 64 * 55 * 55) * (3 * 11 * 11)
    # Input 2·3·224², weight 64·3·11², output 2·64·55² elements of 4 bytes.
    assert ALEXNET.bytes(4) == 4 * (301_056 + 23_232 + 387_200)


def test_groups_and_dilation() -> None:
    shape = ConvShape(1, 8, 10, 12, 4, (3, 2), (1, 2), (0, 1), (2, 3), 4)
    # Rows 10 - 2·2 = 6; columns (12 + 2 - 3 - 1) // 2 + 1 = 6.
    assert shape.output_shape == (1, 4, 6, 6) and shape.weight_shape == (4, 2, 3, 2)
    assert shape.flops == 2 * (4 * 6 * 6) * (2 * 3 * 2)


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(4, 6, (3, 5), (2, 1), (1, 2), (1, 2), groups=2),
        nn.Conv2d(4, 6, (3, 5), padding="same", dilation=(2, 1)),
        nn.Conv2d(4, 6, 3, padding="valid"),
        nn.Conv2d(4, 6, 1, stride=3),
    ],
)
def test_the_shape_of_a_call_is_that_of_torch(module: nn.Conv2d) -> None:
    given = torch.zeros(2, 4, 17, 19)
    shape = shape_of_call(module, given)
    assert shape.output_shape == module(given).shape and shape.weight_shape == module.weight.shape


@pytest.mark.parametrize(
    ("module", "given", "message"),
    [
        (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), torch.zeros(1, 4, 8, 8), "padding_mode 'reflect'"),
        (nn.Conv2d(4, 6, 2, padding="same"), torch.zeros(1, 4, 8, 8), "pads unequally"),
        (nn.Conv2d(4, 6, 3), torch.zeros(4, 8, 8), "3 dimensions"),
        (nn.Conv2d(4, 6, 3), torch.zeros(1, 5, 8, 8), "5 channels"),
        (nn.Conv2d(4, 6, 9), torch.zeros(1, 4, 8, 8), "take a larger input"),
    ],
)
def test_calls_that_are_not_covered(module: nn.Conv2d, given: torch.Tensor, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        shape_of_call(module, given)


def test_sizes_that_make_no_convolution() -> None:
    with pytest.raises(ConfigurationError, match="no convolution has such sizes"):
        ConvShape(1, 4, 8, 8, 4, (3, 3), stride=(0, 1))
    with pytest.raises(ConfigurationError, match="3 groups do not divide 4 input"):
        ConvShape(1, 4, 8, 8, 6, (3, 3), groups=3)


def test_names() -> None:
    assert algorithm_named("implicit precomp gemm") == "implicit precomp gemm"
    with pytest.raises(ConfigurationError, match="no convolution algorithm 'smm'; there are: direct, gemm"):
        algorithm_named("smm")
