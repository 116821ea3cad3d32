"""Errors, noise and coverage by hand, and what is left out of a fit."""

from dataclasses import replace

import numpy as np
import pytest

from experiment_core_utils.primitives.errors import ResultsError
from experiments.analyses.latency.estimator import Prediction
from experiments.analyses.latency.features import of_several_runs
from experiments.analyses.latency.validation import (
    coverage,
    errors,
    errors_left_out,
    fit_forest,
    fit_linear,
    fit_logs,
    left_out_predictions,
    noise_floor,
    repeatability,
    validate,
)
from tests.experiments.analyses.latency.synthetic_samples import working_samples


def test_errors_by_hand() -> None:
    settings = np.array(["a", "a", "a", "b", "b"])
    measured = np.array([10.0, 20.0, 40.0, 10.0, np.nan])
    predicted = np.array([11.0, 22.0, 20.0, 10.0, 5.0])
    found = errors(predicted, measured, settings)
    # +10 %, +10 %, -50 %, 0; medians of a: 20 of 20, of b: 10 of 10.
    assert found.num_samples == 4
    assert found.sample_mape == pytest.approx(0.175) and found.sample_median == pytest.approx(0.1)
    assert found.setting_mape == pytest.approx(0.0) and found.bias == pytest.approx(0.05)
    # Both are 0 % off, whichever are drawn; a single one has no interval.
    assert found.setting_mape_ci95 == (0.0, 0.0)
    assert errors(predicted[:3], measured[:3], settings[:3]).setting_mape_ci95 is None
    # Medians of b: 12 of 10; the mean of 0 and 20 %.
    assert errors(np.where(settings == "b", 12.0, predicted), measured, settings).setting_mape == pytest.approx(0.1)


def test_a_setting_is_drawn_in_all_runs_at_once() -> None:
    settings = np.array(["1:signs a", "1:signs b", "2:signs a", "2:signs b"])
    found = errors(np.array([11.0, 13.0, 11.0, 13.0]), np.full(4, 10.0), settings)
    # 10 % of a and 30 % of b: two draws of a or of b make the ends.
    assert found.setting_mape == pytest.approx(0.2)
    assert found.setting_mape_ci95 == pytest.approx((0.1, 0.3))


def test_a_run_left_out_is_one_that_no_fit_has_seen() -> None:
    samples = working_samples()
    twice = replace(samples, times={name: 2 * column for name, column in samples.times.items()})
    both = of_several_runs([samples, twice])
    found = errors_left_out(both, both.wholes["runs"], 2)
    # The slow run is predicted as half of it, the other as twice: 50 and 100 % off.
    assert found.num_folds == 2 and found.estimator["T_total"].setting_mape == pytest.approx(0.75, abs=0.01)
    assert errors_left_out(both, both.wholes["runs"]).reason == "2 of it, and at least 3 are needed"


def test_noise_by_hand() -> None:
    # Others' median against the sample: 15 / 10, 15 / 10 and 10 / 20; a single sample says nothing.
    found = repeatability(np.array([10.0, 10.0, 20.0, 7.0]), np.array(["a", "a", "a", "b"]))
    assert found.sample_mape == pytest.approx((0.5 + 0.5 + 0.5) / 3)
    # A resampled median of three is 20 where two or three of the draws are: 7 in 27, each 100 % off.
    assert found.setting_mape == pytest.approx(7 / 27, abs=0.1)
    assert repeatability(np.full(4, 3.0), np.array(["a", "a", "b", "b"])).setting_mape == 0.0
    with pytest.raises(ResultsError, match="no setting has two samples"):
        repeatability(np.array([1.0, 2.0]), np.array(["a", "b"]))


def test_the_noise_floor_is_of_runs_of_the_same_sample() -> None:
    runs = np.array([[9.0, 100.0, 7.0], [11.0, 100.0, np.nan]])
    found = noise_floor(runs, np.array(["a", "b", "a"]))
    # 10 % off the mean twice, and 0, each times sqrt(2 / 1); a sample with one run says nothing.
    assert found is not None and found.num_samples == 2
    assert found.sample_mape == pytest.approx(0.05 * 2**0.5)
    # The medians of one sample are its runs, half of them each.
    assert found.setting_mape == pytest.approx(0.05 * 2**0.5, rel=0.05)
    assert noise_floor(np.array([[9.0]]), np.array(["a"])) is None
    # Normal runs have the mean deviation sd sqrt(2 / pi) of a model that knows their mean, however many they are.
    draws = np.random.default_rng(1).normal(100.0, 5.0, (3, 4000))
    normal = noise_floor(draws, np.full(4000, "a"))
    assert normal is not None and normal.sample_mape == pytest.approx(0.05 * (2 / np.pi) ** 0.5, rel=0.03)


def test_coverage_by_hand() -> None:
    columns = {"T_total": np.array([10.0, 10.0, 20.0, 10.0])}
    low, high = {"T_total": columns["T_total"] * 0.9}, {"T_total": columns["T_total"] * 1.3}
    no = np.zeros(4, dtype=bool)
    found = coverage(Prediction(columns, low, high, no, no), "T_total", np.array([9.0, 13.1, 26.0, np.nan]))
    # 9 in [9, 13], 13.1 not in [9, 13], 26 in [18, 26]; the width is 1.3 - 0.9.
    assert found.share == pytest.approx(2 / 3) and found.width == pytest.approx(0.4)


def test_the_line_has_the_terms_of_the_estimator_with_any_sign() -> None:
    samples = working_samples()
    tokens, blocks = samples.requests.prompt_tokens, samples.requests.num_active_blocks
    plane = 50.0 - 0.5 * blocks + 0.002 * blocks * tokens + 0.0003 * (blocks - 1) * samples.requests.top_k * tokens
    samples.times["T_LLM_prefill"][:] = plane  # type: ignore[index]
    assert fit_linear(samples)(samples.requests)["T_LLM_prefill"] == pytest.approx(plane)


def test_the_model_that_adds_in_logs_recovers_powers_and_nothing_of_what_had_one_value() -> None:
    samples = working_samples()
    one = samples.take(samples.requests.top_k == 4)
    law = 0.01 * one.requests.prompt_tokens**1.2 * one.requests.num_active_blocks**0.5
    one.times["T_LLM_prefill"][:] = law  # type: ignore[index]
    predict = fit_logs(one)
    assert predict(one.requests)["T_LLM_prefill"] == pytest.approx(law)
    assert predict(replace(one.requests, top_k=np.full(len(one), 8.0)))["T_LLM_prefill"] == pytest.approx(law)


def test_the_line_is_at_the_median_of_equal_requests() -> None:
    """Of times 10, 10 and 40 of one request it is 10, not their mean of 20; of 10, 40 and 40 it is 40."""
    samples = working_samples().take(np.zeros(3, dtype=int))
    samples.times["T_LLM_prefill"][:] = [10.0, 10.0, 40.0]  # type: ignore[index]
    assert fit_linear(samples)(samples.requests)["T_LLM_prefill"] == pytest.approx([10.0] * 3)
    samples.times["T_LLM_prefill"][:] = [10.0, 40.0, 40.0]  # type: ignore[index]
    assert fit_linear(samples)(samples.requests)["T_LLM_prefill"] == pytest.approx([40.0] * 3)


def test_the_forest_knows_a_step_and_not_what_lies_beyond() -> None:
    samples = working_samples(samples_each=8)
    step = np.where(samples.requests.top_k > 4, 20.0, 10.0)
    samples.times["T_LLM_prefill"][:] = step  # type: ignore[index]
    predict = fit_forest(samples)
    assert predict(samples.requests)["T_LLM_prefill"] == pytest.approx(step, rel=0.02)
    further = replace(samples.requests, top_k=np.full(len(samples), 100.0))
    assert predict(further)["T_LLM_prefill"].max() == pytest.approx(20.0, rel=0.02)


def test_a_level_left_out_is_one_that_no_fit_has_seen() -> None:
    samples = working_samples(noise=0.01)
    found = errors_left_out(samples, samples.requests.num_active_blocks)
    assert (found.num_groups, found.num_folds, found.reason) == (3, 3, None)
    # Decode is 0.2 ms and 0.5 ms a block: a line knows the level left out, a forest repeats a neighbour.
    assert found.estimator["T_decode_per_token"].setting_mape < 0.02
    assert found.forest["T_decode_per_token"].setting_mape > 0.08
    two = samples.take(samples.requests.num_active_blocks != 14)
    assert errors_left_out(two, two.requests.num_active_blocks).reason == "2 of it, and at least 3 are needed"
    few = samples.take(np.isin(samples.knobs, np.unique(samples.knobs)[:8]))
    assert errors_left_out(few, few.knobs.astype("<U10")).reason is not None


def test_a_busy_machine_is_seen_in_the_vision_of_the_request() -> None:
    samples = working_samples()
    # Other processes slow each setting down as a whole, by up to twice.
    speeds = {
        key: 1.0 + place / 26
        for place, key in enumerate(np.random.default_rng(2).permutation(np.unique(samples.knobs)))
    }
    busy = np.array([speeds[key] for key in samples.knobs])
    slow = replace(samples, times={name: busy * column for name, column in samples.times.items()})
    found = errors_left_out(slow, slow.requests.top_k)
    assert found.estimator["T_total"].setting_mape > 0.1
    later = found.after_vision
    assert set(later) == {"T_LLM_prefill", "T_decode_per_token", "T_LLM_decode", "T_first_token", "T_total"}
    # The coefficients bend to the load as well, so that not all of it goes.
    assert later["T_LLM_prefill"].setting_mape < 0.7 * found.estimator["T_LLM_prefill"].setting_mape
    assert later["T_total"].sample_mape < 0.5 * found.estimator["T_total"].sample_mape


def test_a_total_to_be_admitted_does_not_know_its_answers_length() -> None:
    samples = working_samples()
    one = replace(samples.requests, output_tokens=samples.requests.output_tokens * 1.0)
    one.output_tokens[0] = 1000.0
    long = replace(samples, requests=one)
    prediction, totals = left_out_predictions(long, 0.9, 8)
    assert totals["true"][0] == prediction.times["T_total"][0] > 100 * samples.times["T_decode_per_token"].min()
    # Others of the task have 9 to 12 tokens, their 90th percentile is 12; about 20 ms and 8 ms a token.
    assert totals["expected"][0] < totals["p90"][0] < 0.1 * totals["true"][0]


@pytest.mark.parametrize(("settings", "each"), [(7, 4), (8, 3)])
def test_the_size_that_the_message_names_is_enough(settings: int, each: int) -> None:
    samples = working_samples(samples_each=each)
    kept = samples.take(np.isin(samples.settings, np.unique(samples.settings)[:settings]))
    assert len(kept) == settings * each and validate(kept, 0.9).num_folds == settings


def test_settings_left_out_are_predicted_as_far_as_noise_allows() -> None:
    samples = working_samples(noise=0.03)
    found = validate(samples.take(samples.requests.top_k != 6), 0.9)
    assert found.num_folds == 8
    # Lognormal noise of 0.03 has a mean size of 0.024.
    assert found.estimator["T_vision_total"].sample_mape == pytest.approx(0.024, abs=0.006)
    assert found.linear["T_vision_total"].sample_mape == pytest.approx(0.024, abs=0.006)
    assert 0.8 <= found.coverage["T_total"].share <= 1.0


def test_settings_that_cannot_be_left_out_are_refused() -> None:
    samples = working_samples()
    few = samples.take(np.isin(samples.settings, np.unique(samples.settings)[:6]))
    with pytest.raises(ResultsError, match="6 settings are too few to leave one out .* profile 7 or more"):
        validate(few, 0.9)
