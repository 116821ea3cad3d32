"""The parts of a prediction, each against numbers made by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.performance_prediction.algorithms.convolution import ConvShape
from experiments.performance_prediction.prediction.layer_latency import (
    LayerLatency,
    gaussian_process,
    likeliest,
    seconds_by_shape,
)
from experiments.performance_prediction.prediction.measurements import MeasuredLayer
from experiments.performance_prediction.prediction.operations import NetworkOperations, network_operations
from experiments.performance_prediction.prediction.support import RequestedShape, SupportRules, observed
from experiments.performance_prediction.prediction.validation import ForestLatency, LinearLatency, Roofline
from experiments.performance_prediction.prediction.work import multiprocessors_of, work_terms

H200 = "NVIDIA H200"
SHAPE = ConvShape(1, 64, 56, 56, 128, (3, 3), padding=(1, 1))


def test_waves_are_rounds_of_the_multiprocessors_over_the_blocks() -> None:
    # 3136 pixels in blocks of 128 are 25, 128 channels in blocks of 16 are 8: 200 blocks, 2 rounds of 132.
    # A block goes through 64 * 9 = 576 products, .576 thousand.
    terms = work_terms(SHAPE, "direct", multiprocessors_of(H200))
    assert terms["waves"] == pytest.approx(2 * 0.576) and terms["waves of 4"] == pytest.approx(0.576)
    unknown = multiprocessors_of("a device that nobody knows")
    assert work_terms(SHAPE, "direct", unknown)["waves"] == pytest.approx(200 * 0.576)


def test_fft_pads_to_a_power_of_two_and_its_tiles_lose_their_edges() -> None:
    # 56 + 2 is padded to 64; (64 + 128) planes of 64².
    assert work_terms(SHAPE, "fft", 132)["transforms"] == pytest.approx(192 * 64**2 / 1e6)
    # Tiles keep 32 - 2 = 30 outputs a side: 2 x 2 of them.
    assert work_terms(SHAPE, "fft tiling", 132)["tiles"] == 4


def test_winograd_counts_tiles() -> None:
    # 28 x 28 tiles of 2x2 outputs, 16 products each and pair of channels.
    assert work_terms(SHAPE, "winograd", 132)["products"] == pytest.approx(28**2 * 16 * 64 * 128 / 1e9)
    # 14 x 14 tiles of 4x4 outputs, 36 products each.
    assert work_terms(SHAPE, "winograd nonfused", 132)["products"] == pytest.approx(14**2 * 36 * 64 * 128 / 1e9)


def test_a_process_goes_through_its_points_and_doubts_itself_far_from_them() -> None:
    points = np.linspace(0, 6, 40)[:, None]
    values = np.sin(points[:, 0])
    process = gaussian_process(points, values, likeliest(points, values))
    mean, spread = process.predict(np.array([[1.03], [60.0]]), return_std=True)
    assert mean[0] == pytest.approx(math.sin(1.03), abs=0.02) and abs(mean[1]) < 0.2
    assert spread[1] > 5 * spread[0]


def test_a_law_of_terms_is_found_again_where_nothing_was_measured() -> None:
    def law(shape: ConvShape) -> float:
        return 5e-6 + shape.flops / 30e12

    shapes = [
        ConvShape(1, 64, side, side, out, (3, 3), padding=(1, 1)) for side in range(14, 60, 4) for out in (32, 64)
    ]
    model = LayerLatency("implicit gemm", 132, {shape: law(shape) for shape in shapes})
    unseen = [
        ConvShape(1, 64, 32, 32, 48, (3, 3), padding=(1, 1)),
        ConvShape(1, 64, 90, 90, 64, (3, 3), padding=(1, 1)),
    ]
    for shape, found in zip(unseen, model.predict(unseen), strict=True):
        assert found.seconds == pytest.approx(law(shape), rel=0.03)
        assert found.low < found.seconds < found.high


def test_the_interval_contains_as_many_new_layers_as_it_says() -> None:
    """Each layer is off by a factor of its own at all of its sizes, which near sizes of it would give away."""
    generator = np.random.default_rng(3)
    drawn = []
    for channels in range(16, 16 + 4 * 120, 4):
        factor = float(np.exp(generator.normal(0.0, 0.3)))
        shapes = [ConvShape(1, channels, side, side, 32, (3, 3), padding=(1, 1)) for side in (14, 28)]
        drawn.append({shape: factor * (5e-6 + shape.flops / 30e12) for shape in shapes})
    order = generator.permutation(len(drawn))
    known = {shape: seconds for place in order[:70] for shape, seconds in drawn[place].items()}
    unseen = {shape: seconds for place in order[70:] for shape, seconds in drawn[place].items()}
    found = LayerLatency("implicit gemm", 132, known).predict(list(unseen))
    inside = [each.low <= seconds <= each.high for each, seconds in zip(found, unseen.values(), strict=True)]
    assert np.mean(inside) >= 0.9


def test_a_forest_of_each_algorithm_knows_what_it_saw_and_nothing_beyond() -> None:
    shapes = [ConvShape(1, 8, side, side, 32, (3, 3)) for side in range(10, 90, 2)]
    slow = {shape: 2e-3 if shape.height > 50 else 1e-3 for shape in shapes}
    measured = {"gemm": slow, "fft": dict.fromkeys(shapes, 0.004)}
    forest = ForestLatency({name: LayerLatency(name, 132, each) for name, each in measured.items()})  # type: ignore[misc, arg-type]
    sides = [ConvShape(1, 8, side, side, 32, (3, 3)) for side in (21, 71, 400, 21)]
    assert forest.layers_s(sides, ["gemm", "gemm", "gemm", "fft"]) == pytest.approx([1e-3, 2e-3, 2e-3, 4e-3], rel=0.05)


def test_multiprocessors_are_read_from_a_device_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(name="NVIDIA New", multi_processor_count=160)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: here)
    assert [multiprocessors_of(name) for name in ("NVIDIA New", "NVIDIA L4", "unknown")] == [160, 58, 1]


def test_layers_count_for_what_ran_and_what_fell_back_for_guess() -> None:
    granted = MeasuredLayer("a", SHAPE, "fft", "fft", False, None, 2.0)
    fell_back = MeasuredLayer("b", SHAPE, "winograd", "implicit gemm", True, "no", 4.0)
    guess = MeasuredLayer("c", SHAPE, "guess", "implicit gemm", False, None, 6.0)
    layers = [granted, fell_back, guess]
    assert seconds_by_shape(layers, "fft") == {SHAPE: 2.0}
    assert seconds_by_shape(layers, "winograd") == {}
    assert seconds_by_shape(layers, "guess") == seconds_by_shape(layers, "implicit gemm") == {SHAPE: 5.0}


def sided(side: int, kernel: int = 3) -> ConvShape:
    return ConvShape(1, 8, side, side, 8, (kernel, kernel))


def test_support_is_what_was_observed_and_else_that_of_alike_layers() -> None:
    refused = [RequestedShape(sided(side), "too large") for side in (300, 400)]
    granted = [RequestedShape(sided(side), None) for side in (10, 200)]
    rules = SupportRules("fft", [*granted, *refused, RequestedShape(sided(50, 5), None)])
    assert rules.of(sided(300)).basis == "measured in this very shape: too large"
    assert rules.of(sided(150)).granted and not rules.of(sided(350)).granted
    between = rules.of(sided(250))
    assert not between.granted and "between is not known" in between.basis
    assert rules.of(sided(900, 5)).granted
    never = rules.of(sided(10, 7))
    assert not never.granted and never.basis == "no layer with kernel 7x7 and stride 1x1 was requested fft"


def test_where_the_side_does_not_decide_the_nearest_layer_does() -> None:
    answers = {10: None, 20: "no", 40: None}
    rules = SupportRules("fft", [RequestedShape(sided(side), refusal) for side, refusal in answers.items()])
    assert not rules.of(sided(19)).granted and rules.of(sided(38)).granted
    assert "the nearest measured layer" in rules.of(sided(19)).basis


def test_only_layers_requested_with_an_algorithm_say_whether_it_is_supported() -> None:
    fell_back = MeasuredLayer("b", SHAPE, "winograd", "implicit gemm", True, "no", 4.0)
    assert observed([fell_back], "winograd") == [RequestedShape(SHAPE, "no")]
    assert observed([fell_back], "guess") == []


def test_the_roofline_is_the_data_sheet() -> None:
    roofline = Roofline(H200, "fma")
    assert roofline.layer_s(SHAPE) == SHAPE.flops / 67e12
    thin = ConvShape(1, 64, 56, 56, 1, (1, 1))
    assert roofline.layer_s(thin) == 4 * (64 * 3136 + 64 + 3136) / 4.8e12
    assert "not known" in str(Roofline("Abacus", "fma").reason)


@pytest.mark.parametrize(("precision", "element_bytes"), [("fma", 4), ("tf32", 4), ("half", 2)])
def test_the_rooflines_bytes_are_the_precisions(precision: str, element_bytes: int) -> None:
    roofline = Roofline(H200, precision)
    thin = ConvShape(1, 64, 56, 56, 1, (1, 1))
    # An input of 64 x 56 x 56, 64 weights and an output of 56 x 56.
    assert roofline.layer_s(thin) == pytest.approx(element_bytes * 203_904 / 4.8e12)
    # 300 and 700 elements, counted as in float32.
    others = NetworkOperations({}, 5, other_bytes=1200, product_bytes=2800)
    assert roofline.rest_s(others) == pytest.approx(element_bytes * 1000 / 4.8e12)


def test_the_line_finds_a_line() -> None:
    shapes = [ConvShape(1, 8, side, side, out, (3, 3)) for side in (10, 30, 60) for out in (4, 32)]
    line = LinearLatency({"gemm": {shape: 1e-5 + 2e-13 * shape.flops for shape in shapes}})
    assert line.layer_s(SHAPE, "gemm") == pytest.approx(1e-5 + 2e-13 * SHAPE.flops, rel=1e-6)


def test_the_operations_of_a_network_are_counted_without_its_convolutions() -> None:
    found = network_operations("alexnet", 224, 1)
    # 7 activations, 3 poolings, an adaptive one, 3 fully connected layers.
    assert (len(found.convolutions), found.others) == (5, 14)
    # Weights of 9216 x 4096, 4096 x 4096 and 4096 x 1000, biases, inputs and outputs, 4 bytes each.
    products = 9216 * 4096 + 4096 * 4096 + 4096 * 1000
    assert found.product_bytes == 4 * (products + 2 * (4096 + 4096 + 1000) + 9216 + 4096 + 4096)
