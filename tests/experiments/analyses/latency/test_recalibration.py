"""A device that is an affine change away is recovered from few samples; what was monotone stays so."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.setting_result import Order, Precision, SettingResult
from experiments.analyses.latency.features import RequestSetting, TimedSamples
from experiments.analyses.latency.recalibration import (
    METHODS,
    errors_against_samples,
    recalibrate,
    study_by_order,
)
from experiments.analyses.latency.stage_regression import measured_times
from experiments.analyses.sweeps import StoredSetting, Sweep
from experiments.fitting.held_out import relative_error
from tests.experiments.analyses.latency.synthetic_samples import (
    SLOWER,
    samples_of,
    slower_device,
    working_estimator,
    working_samples,
)


def test_a_line_for_each_stage_is_recovered() -> None:
    target = slower_device(working_samples())
    found = recalibrate(working_estimator(), target, "stage_affine").predict(target.requests)
    for name, measured in measured_times(target).items():
        # The constant is drawn towards 0 by one pseudo-sample of 108.
        assert relative_error(found.times[name], measured) < 0.01


def test_one_line_for_all_is_recovered() -> None:
    samples = working_samples()
    vision, prefill, token = (2.0 * samples.times[name] for name in SLOWER)
    target = samples_of(samples.requests, samples.settings, vision, prefill, token)
    found = recalibrate(working_estimator(), target, "global_affine").predict(target.requests)
    assert relative_error(found.times["T_LLM_prefill"], prefill) < 0.01
    assert relative_error(found.times["T_vision_total"], vision) < 0.01


def test_refit_forgets_the_source() -> None:
    target = slower_device(working_samples())
    found = recalibrate(working_estimator(), target, "refit").predict(target.requests)
    assert found.times["T_total"] == pytest.approx(target.times["T_total"], rel=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_more_is_not_faster_after_recalibration_to_noise(method: str) -> None:
    source = working_estimator(0.05)
    target = slower_device(working_samples(noise=0.4, seed=3))
    drawn = target.take(np.arange(0, 100, 10))
    found = recalibrate(source, drawn, method).predict(
        [
            RequestSetting(288, 1, 12, {"top_k": 4, "num_active_blocks": 12}, 9),
            RequestSetting(1376, 15, 12, {"top_k": 4, "num_active_blocks": 12}, 9),
            RequestSetting(1376, 15, 12, {"top_k": 8, "num_active_blocks": 16}, 9),
        ]
    )
    for name in ("T_vision_total", "T_first_token", "T_decode_per_token", "T_total"):
        assert (np.diff(found.times[name]) >= -1e-9).all() and (found.times[name] >= 0).all()


def test_errors_fall_with_samples_and_are_of_those_not_drawn() -> None:
    target = slower_device(working_samples(noise=0.1, seed=5, samples_each=8))
    found = {
        (each.method, each.num_samples): each
        for each in errors_against_samples(working_estimator(), target, ["T_total"], draws=12)
    }
    # 216 samples: 100 can be drawn and leave 116.
    assert {size for _, size in found} == {10, 25, 50, 100}
    assert found["none", 10].median > 0.15
    assert found["stage_affine", 100].median < 0.1
    assert found["refit", 100].high - found["refit", 100].low <= found["refit", 10].high - found["refit", 10].low
    assert all(each.low <= each.median <= each.high for each in found.values())


def test_an_unknown_method_is_refused_and_a_recalibration_is_named() -> None:
    samples = working_samples()
    with pytest.raises(ConfigurationError, match="no recalibration 'quadratic'; choose among none, global_affine"):
        recalibrate(working_estimator(), samples, "quadratic")
    caveats = recalibrate(working_estimator(), samples, "refit").fitted.caveats
    assert caveats[-1].startswith("recalibrated by refit with 108 samples")


def ordered_sweep(samples: TimedSamples, how: str, until_precision: float | None = None) -> Sweep:
    """A sweep of the samples' settings, measured in alphabetical order."""
    settings = []
    for position, name in enumerate(np.unique(samples.settings)):
        task, key = str(name).split(" ")
        order = Order(how=how, position=position)
        result = SettingResult.model_construct(setting_order=order, precision=Precision(asked=until_precision))
        settings.append(StoredSetting(task, key, Path(), result))
    return Sweep(None, tuple(settings))  # type: ignore[arg-type]


def test_the_second_half_of_a_run_is_of_settings_or_in_rounds_of_samples() -> None:
    samples = working_samples(samples_each=8)
    # The last 4 samples of each setting, or the settings after the 13th, take twice as long.
    late_sample = np.arange(len(samples)) % 8 >= 4
    late_setting = np.isin(samples.settings, np.unique(samples.settings)[13:])
    for how, is_late in (("rounds", late_sample), ("shuffled", late_setting)):
        slow = np.where(is_late, 2.0, 1.0)
        study = study_by_order(
            ordered_sweep(samples, how),
            replace(samples, times={name: slow * column for name, column in samples.times.items()}),
            0.9,
        )
        found = {(each.method, each.num_samples): each for each in study.errors if each.name == "T_total"}
        # Half of what was measured, and recovered by one factor.
        assert found["none", 10].median == pytest.approx(0.5, abs=0.01), how
        assert found["global_affine", 50].median < 0.02, how


def test_a_run_whose_halves_are_not_known_or_too_small_says_so() -> None:
    samples = working_samples()
    random = study_by_order(ordered_sweep(samples, "rounds", 0.02), samples, 0.9)
    assert not random.errors and random.reason == "the results do not say when in the run each was measured"
    few = samples.take(np.isin(samples.settings, np.unique(samples.settings)[:8]))
    study = study_by_order(ordered_sweep(few, "shuffled"), few, 0.9)
    assert not study.errors and study.reason == "the run has too few settings or samples to be split in two"
