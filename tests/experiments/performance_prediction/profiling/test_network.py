"""Whole networks with their convolutions run by an algorithm, against torch; what is recorded and put back."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.performance_prediction.algorithms.convolution import AlgorithmName, AlgorithmRefused
from experiments.performance_prediction.algorithms.engines import Placement
from experiments.performance_prediction.algorithms.reference import relative_l2
from experiments.performance_prediction.algorithms.support import CombinationReport, combination_report, conv_shapes
from experiments.performance_prediction.networks.registry import MODELS, build_model
from experiments.performance_prediction.profiling.network import AlgorithmConv2d, SwappedConvolutions
from tests.same_floats import assert_same_floats

CPU = Placement(torch.device("cpu"))
NAMED: tuple[AlgorithmName, ...] = ("direct", "gemm", "fft", "fft tiling", "winograd", "winograd nonfused", "guess")
SMALL = {"vgg16": 32, "alexnet": 63}
# Layers where an algorithm is refused, by the table of kernels and strides: for vgg16 none of those named.
REFUSED = {
    "alexnet": {"fft": 1, "fft tiling": 1, "winograd": 2, "winograd nonfused": 1},
    "googlenet": {"fft": 1, "fft tiling": 1, "winograd": 57 - 19, "winograd nonfused": 57 - 19},
    "resnet50": {"fft": 7, "fft tiling": 7, "winograd": 53 - 13, "winograd nonfused": 53 - 13},
    "resnet152": {"fft": 7, "fft tiling": 7, "winograd": 155 - 47, "winograd nonfused": 155 - 47},
    "densenet121": {"fft": 1, "fft tiling": 1, "winograd": 120 - 58, "winograd nonfused": 120 - 58},
    "mobilenet_v2": {"fft": 5, "fft tiling": 5, "winograd": 52 - 13, "winograd nonfused": 52 - 13},
    "unet": {"winograd": 1, "winograd nonfused": 1},
}


class TwoLayers(nn.Module):
    """A strided convolution with bias and a plain one without, the second grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.second = nn.Sequential(nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1, groups=2, bias=False))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(self.first(given))
        return output


@pytest.fixture
def small() -> nn.Module:
    torch.manual_seed(3)
    return TwoLayers().eval()


@pytest.mark.parametrize("name", MODELS)
def test_each_algorithm_leaves_what_the_network_computes(name: str) -> None:
    side = SMALL.get(name, 32)
    model = build_model(name)
    images = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(1))
    shapes = conv_shapes(model, images.shape)
    with torch.inference_mode():
        expected = model(images).double()
        for algorithm in NAMED:
            with SwappedConvolutions(model, shapes, algorithm, CPU, "fallback", name) as swapped:
                error = relative_l2(model(images), expected)
            assert error is not None and error < 1e-5, algorithm
            assert len(swapped.report.refused) == REFUSED.get(name, {}).get(algorithm, 0), algorithm
            assert all(layer.runs == "torch" for layer in swapped.report.refused)
        assert_same_floats(model(images).double(), expected)


def test_bias_groups_and_what_is_put_back(small: nn.Module) -> None:
    given = torch.randn(2, 3, 11, 9)
    shapes = conv_shapes(small, given.shape)
    before, state = small(given), list(small.state_dict())
    with SwappedConvolutions(small, shapes, "direct", CPU) as swapped:
        assert isinstance(small.first, AlgorithmConv2d)
        assert [layer.engine for layer in swapped.report.layers] == ["operations", "operations"]
        torch.testing.assert_close(small(given), before)
        torch.testing.assert_close(small(given.to(memory_format=torch.channels_last)), before)
        with pytest.raises(ConfigurationError, match=r"prepared for an input of \(2, 3, 11, 9\), not \(1, 3, 11, 9\)"):
            small(given[:1])
    assert isinstance(small.first, nn.Conv2d) and list(small.state_dict()) == state
    assert_same_floats(small(given), before)
    swapped.restore()


def test_fail_names_every_layer_and_leaves_the_network(small: nn.Module) -> None:
    shapes = conv_shapes(small, (1, 3, 16, 16))
    with pytest.raises(AlgorithmRefused, match="does not cover 1 of 2 .*\n  fft takes stride 1, this is 2x2: first"):
        SwappedConvolutions(small, shapes, "fft", CPU, model_name="small")
    assert isinstance(small.first, nn.Conv2d)


def test_a_fallback_is_recorded_as_one(small: nn.Module) -> None:
    shapes = conv_shapes(small, (1, 3, 16, 16))
    report = combination_report("small", "winograd", shapes, CPU, "fallback")
    first, second = report.layers
    assert (first.layer, first.requested, first.runs, first.engine) == ("first", "winograd", "torch", "torch")
    assert first.fell_back
    assert first.reason == "winograd takes stride 1, this is 2x2"
    assert (second.layer, second.runs, second.fell_back, second.reason) == ("second.1", "winograd", False, None)
    # At 8x8 outputs: 8·3·9 multiply-adds refused, 4·4·9 run.
    assert report.refused_flops_share == pytest.approx(216 / (216 + 144))
    assert report.lines() == [
        "winograd does not cover 1 of 2 convolutions of small (60% of their FLOPs)",
        "  winograd takes stride 1, this is 2x2: first",
    ]


def test_without_fallback_a_report_names_what_is_missing_and_runs_nothing(small: nn.Module) -> None:
    report: CombinationReport = combination_report("small", "implicit gemm", conv_shapes(small, (1, 3, 16, 16)), CPU)
    assert [layer.runs for layer in report.layers] == [None, None]
    assert report.lines()[1].endswith("first, second.1")


def test_a_granted_combination_in_one_line(small: nn.Module) -> None:
    report = combination_report("small", "gemm", conv_shapes(small, (1, 3, 16, 16)), CPU)
    assert report.refused == () and report.lines() == ["gemm covers all 2 convolutions of small"]


def test_shapes_are_found_without_computing_and_a_small_input_is_an_error(small: nn.Module) -> None:
    shapes: Mapping[str, object] = conv_shapes(small, (5, 3, 16, 10))
    assert list(shapes) == ["first", "second.1"]
    assert {tensor.device.type for tensor in small.state_dict().values()} == {"cpu"}
    with pytest.raises(ConfigurationError, match="take a larger one"):
        conv_shapes(build_model("alexnet"), (1, 3, 30, 30))


def test_a_layer_called_with_two_shapes_is_not_covered() -> None:
    shared = nn.Conv2d(3, 3, 3)
    with pytest.raises(ConfigurationError, match="called with two shapes"):
        conv_shapes(nn.Sequential(shared, shared), (1, 3, 9, 9))


def test_what_no_cpu_runs() -> None:
    with pytest.raises(ConfigurationError, match="does not run on the CPU"):
        Placement(torch.device("cpu"), precision="tf32")
    with pytest.raises(ConfigurationError, match="with its index"):
        Placement(torch.device("cuda"))
    with pytest.raises(ConfigurationError, match="backend ai3 runs on the CPU only"):
        Placement(torch.device("cuda", 0), backend="ai3")
