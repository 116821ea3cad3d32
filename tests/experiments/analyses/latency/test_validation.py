"""Errors, noise and coverage by hand; at settings left out the estimator beats the linear model where physics bends."""

import numpy as np
import pytest

from experiment_core_utils.primitives.errors import ResultsError
from experiments.analyses.latency.estimator import Prediction
from experiments.analyses.latency.validation import coverage, errors, fit_linear, repeatability, validate
from tests.experiments.analyses.latency.synthetic_samples import launching_samples, working_samples


def test_errors_by_hand() -> None:
    settings = np.array(["a", "a", "a", "b", "b"])
    measured = np.array([10.0, 20.0, 40.0, 10.0, np.nan])
    predicted = np.array([11.0, 22.0, 20.0, 10.0, 5.0])
    found = errors(predicted, measured, settings)
    # +10 %, +10 %, -50 %, 0; medians of a: 20 of 20, of b: 10 of 10.
    assert found.num_samples == 4
    assert found.sample_mape == pytest.approx(0.175) and found.sample_median == pytest.approx(0.1)
    assert found.setting_mape == pytest.approx(0.0) and found.bias == pytest.approx(0.05)
    # Medians of b: 12 of 10; the mean of 0 and 20 %.
    assert errors(np.where(settings == "b", 12.0, predicted), measured, settings).setting_mape == pytest.approx(0.1)


def test_noise_by_hand() -> None:
    # Others' median against the sample: 15 / 10, 15 / 10 and 10 / 20; a single sample says nothing.
    found = repeatability(np.array([10.0, 10.0, 20.0, 7.0]), np.array(["a", "a", "a", "b"]))
    assert found.sample_mape == pytest.approx((0.5 + 0.5 + 0.5) / 3)
    # A resampled median of three is 20 where two or three of the draws are: 7 in 27, each 100 % off.
    assert found.setting_mape == pytest.approx(7 / 27, abs=0.1)
    assert repeatability(np.full(4, 3.0), np.array(["a", "a", "b", "b"])).setting_mape == 0.0
    with pytest.raises(ResultsError, match="no setting has two samples"):
        repeatability(np.array([1.0, 2.0]), np.array(["a", "b"]))


def test_coverage_by_hand() -> None:
    columns = {"T_total": np.array([10.0, 10.0, 20.0, 10.0])}
    low, high = {"T_total": columns["T_total"] * 0.9}, {"T_total": columns["T_total"] * 1.3}
    no = np.zeros(4, dtype=bool)
    found = coverage(Prediction(columns, low, high, no, no), "T_total", np.array([9.0, 13.1, 26.0, np.nan]))
    # 9 in [9, 13], 13.1 not in [9, 13], 26 in [18, 26]; the width is 1.3 - 0.9.
    assert found.share == pytest.approx(2 / 3) and found.width == pytest.approx(0.4)


def test_the_linear_model_recovers_a_plane() -> None:
    samples = working_samples()
    plane = 1.0 + 0.5 * samples.requests.top_k + 0.1 * samples.requests.vision_tokens
    samples.times["T_LLM_prefill"][:] = plane  # type: ignore[index]
    assert fit_linear(samples)(samples.requests)["T_LLM_prefill"] == pytest.approx(plane)


def test_settings_left_out_are_predicted_and_the_linear_model_is_beaten_on_a_floor() -> None:
    samples = launching_samples(noise=0.03)
    found = validate(samples.take(samples.requests.top_k != 6), 0.9)
    assert found.num_folds == 8
    assert np.isfinite(found.left_out.times["T_total"]).all()
    # Lognormal noise of 0.03 has a mean size of 0.024.
    assert found.estimator["T_vision_total"].sample_mape == pytest.approx(0.024, abs=0.006)
    assert found.linear["T_vision_total"].sample_mape > 1.5 * found.estimator["T_vision_total"].sample_mape
    assert 0.8 <= found.coverage["T_total"].share <= 1.0


def test_settings_that_cannot_be_left_out_are_refused() -> None:
    samples = working_samples()
    few = samples.take(np.isin(samples.settings, np.unique(samples.settings)[:6]))
    with pytest.raises(ResultsError, match="6 settings are too few to leave one out .* profile 7 or more"):
        validate(few, 0.9)
