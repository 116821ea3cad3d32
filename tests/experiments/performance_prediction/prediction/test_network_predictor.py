"""Whole networks on a device whose laws are known; what is left out of a fit never reaches it."""

from dataclasses import replace

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiments.performance_prediction.algorithms.convolution import ConvShape
from experiments.performance_prediction.prediction.measurements import MeasuredInference, Measurements
from experiments.performance_prediction.prediction.mix import best_mix, counts_of, measured_gains
from experiments.performance_prediction.prediction.network_predictor import fit_device
from experiments.performance_prediction.prediction.validation import (
    DEVICE,
    END_SIZES,
    ENERGY,
    INNER_SIZES,
    LAYER,
    MODEL,
    WHOLE,
    folds,
    score_of,
    score_rows,
    validate,
)
from tests.experiments.performance_prediction.prediction.made_measurements import (
    CALL_S,
    FLOP_S,
    HOST_S,
    OPERATION_S,
    WHOLE_W,
    inference,
    measurements,
    quick_law,
)

SIZES = (128, 192, 256, 320)


def slow_law(shape: ConvShape) -> float:
    """Dear to call, cheap a FLOP: quicker than the quick one from 1.2e9 FLOPs on."""
    return 4 * CALL_S + FLOP_S * shape.flops / 2


def is_strided(shape: ConvShape) -> bool:
    return shape.stride != (1, 1)


MEASURED = measurements(
    [
        made
        for model in ("alexnet", "vgg16")
        for size in SIZES
        for made in (
            inference(model, "guess", size),
            inference(model, "implicit gemm", size),
            inference(model, "direct", size, slow_law),
            inference(model, "winograd", size, slow_law, refuses=is_strided),
        )
    ]
)


def test_laws_are_found_again_at_a_size_that_was_not_measured() -> None:
    predictor = fit_device(MEASURED)
    truth = inference("vgg16", "implicit gemm", 288)
    found = predictor.predict("vgg16", "implicit gemm", 288)
    assert found.device_s == pytest.approx(truth.device_s, rel=0.02)
    for layer, its in zip(found.layers, truth.layers, strict=True):
        assert layer.latency.seconds == pytest.approx(its.latency_s, rel=0.05)
    assert predictor.rest.per_operation_s == pytest.approx(OPERATION_S, rel=0.02)
    assert found.energy_j == pytest.approx(truth.energy_j, rel=0.02)
    assert predictor.energy is not None and predictor.energy.whole_w == pytest.approx(WHOLE_W, rel=0.05)
    shares = [layer.energy_j or 0.0 for layer in found.layers]
    assert sum(shares) == pytest.approx((found.energy_j or 0.0) * found.convolutions_s / found.device_s)


def test_a_network_that_waits_for_the_host_takes_as_long_as_the_host() -> None:
    predictor = fit_device(MEASURED)
    found = predictor.predict("alexnet", "implicit gemm", 160)
    assert found.whole_s == pytest.approx(5 * HOST_S, rel=0.02) and found.whole_s > found.device_s
    dear = predictor.predict("vgg16", "implicit gemm", 320)
    assert dear.whole_s == pytest.approx(max(inference("vgg16", "implicit gemm", 320).device_s, 13 * HOST_S), rel=0.02)


def test_a_layer_that_was_refused_runs_guess_and_says_why() -> None:
    first, second = fit_device(MEASURED).predict("alexnet", "winograd", 288).layers[:2]
    assert (first.requested, first.runs, second.runs) == ("winograd", "guess", "winograd")
    assert "too large" in first.support.basis and first.latency.seconds == pytest.approx(
        quick_law(first.shape), rel=0.1
    )


def test_what_is_left_out_does_not_reach_the_fit() -> None:
    """Figures of the part left out are a thousand times too long: the fit must be the same."""

    def spoilt(each: MeasuredInference) -> MeasuredInference:
        layers = tuple(replace(layer, latency_s=1000 * layer.latency_s) for layer in each.layers)
        return replace(each, layers=layers, device_s=1000 * each.device_s, whole_s=5.0, energy_j=1e6)

    for whole in folds(MEASURED):
        test = {each.key for each in whole.test.inferences}
        assert test.isdisjoint(each.key for each in whole.train.inferences)
        assert test.isdisjoint(each.key for each in whole.train.energies)
        changed = [spoilt(each) if each.key in test else each for each in MEASURED.inferences]
        other = next(fold for fold in folds(measurements(changed)) if fold.name == whole.name)
        one, two = fit_device(whole.train, whole.left_out), fit_device(other.train, other.left_out)
        assert one.predict("vgg16", "implicit gemm", 256) == two.predict("vgg16", "implicit gemm", 256)


def test_shapes_of_a_model_left_out_are_not_seen_in_another_one() -> None:
    twin = [replace(each, model="vgg16") for each in MEASURED.inferences if each.model == "alexnet"]
    fold = folds(measurements([each for each in MEASURED.inferences if each.model == "alexnet"] + twin))[-1]
    shapes = {layer.shape for each in twin for layer in each.layers}
    assert (fold.kind, fold.name, fold.left_out) == (MODEL, "vgg16", shapes)
    with pytest.raises(ResultsError, match="no algorithm ran in 8 different layers"):
        fit_device(fold.train, fold.left_out)


def test_layers_without_a_network_are_fitted_to_and_never_left_out() -> None:
    layers = inference("sampled_layers", "guess", 400)
    alone = next(fold for fold in folds(MEASURED) if fold.kind == MODEL)
    found = folds(measurements([*MEASURED.inferences, layers]))
    assert [(fold.kind, fold.name) for fold in found] == [(fold.kind, fold.name) for fold in folds(MEASURED)]
    assert all(layers in fold.train.inferences and layers not in fold.test.inferences for fold in found)
    both = fit_device(found[2].train, found[2].left_out)
    assert len(both.latencies["guess"].measured) > 200 > len(fit_device(alone.train).latencies["guess"].measured)
    # They have no operations beside: what a network has is fitted to networks.
    assert both.rest == fit_device(alone.train).rest


def test_folds_leave_out_sizes_between_both_ends_and_each_model() -> None:
    found = [(fold.kind, fold.name) for fold in folds(MEASURED)]
    assert found == [(INNER_SIZES, "192"), (END_SIZES, "128, 320"), (MODEL, "alexnet"), (MODEL, "vgg16")]
    assert folds(MEASURED, [256])[0].name == "256"
    with pytest.raises(ConfigurationError, match="size 200 cannot be held out: .* measured are 128, 192, 256, 320"):
        folds(MEASURED, [200])


def test_validation_scores_what_was_left_out() -> None:
    result = validate(folds(MEASURED)[0])
    rows = score_rows([result])
    assert result.support_wrong == 0 and result.layers_known == 0 and result.layers_covered > 0.9
    for level, count in ((LAYER, 4 * (5 + 13)), (DEVICE, 8), (WHOLE, 8), (ENERGY, 8)):
        found = score_of(rows, INNER_SIZES, level)
        assert found is not None and found.n == count and found.mape < 0.06


def test_the_mix_takes_the_quicker_law_in_each_layer_and_its_gain_is_measured() -> None:
    fold = folds(MEASURED)[0]
    predictor = fit_device(fold.train)
    _, chosen = best_mix(predictor, "vgg16", 192)
    guess = inference("vgg16", "guess", 192)
    quicker = {layer.layer: slow_law(layer.shape) < 0.95 * quick_law(layer.shape) for layer in guess.layers}
    assert {name: choice in ("direct", "winograd") for name, choice in chosen.items()} == quicker
    gain = next(each for each in measured_gains(predictor, fold.test) if each.model == "vgg16")
    best = sum(min(slow_law(layer.shape), quick_law(layer.shape)) for layer in guess.layers)
    assert gain.mix_s == pytest.approx(best) and gain.best_s == pytest.approx(best)
    assert gain.guess_s == pytest.approx(sum(layer.latency_s for layer in guess.layers))
    assert counts_of(["fft", "gemm", "fft"]) == "fft 2, gemm 1"


def test_an_algorithm_that_was_not_fitted_is_named_with_those_that_were() -> None:
    with pytest.raises(ConfigurationError, match="fft was not fitted for NVIDIA H200; there are: guess, implicit gemm"):
        fit_device(MEASURED).predict("vgg16", "fft", 224)


def test_energy_of_an_algorithm_that_was_not_measured_is_none_with_the_reason() -> None:
    some = tuple(each for each in MEASURED.energies if each.requested in ("guess", "implicit gemm"))
    predictor = fit_device(Measurements(MEASURED.inferences, some))
    assert predictor.predict("vgg16", "guess", 224).energy_j is not None
    found = predictor.predict("vgg16", "direct", 224)
    assert (found.energy_j, found.energy_reason) == (
        None, "energy of direct was not measured, of implicit gemm it was"
    )  # fmt: skip


def test_without_enough_energies_there_is_a_reason() -> None:
    predictor = fit_device(Measurements(MEASURED.inferences, MEASURED.energies[:3]))
    found = predictor.predict("vgg16", "guess", 224)
    assert found.energy_j is None and found.layers[0].energy_j is None
    assert found.energy_reason == "energy was measured of 3 inferences; a fit needs 8"
