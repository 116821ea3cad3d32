"""What the estimator promises: known laws come back, nothing falls or is negative, intervals hold, files round-trip."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiments.analyses.latency.estimator import LatencyEstimator, caveats_of, expected_output_tokens
from experiments.analyses.latency.features import RequestSetting, TimedSamples
from experiments.analyses.latency.stage_regression import PREDICTED, measured_times
from tests.experiments.analyses.latency.synthetic_samples import working_estimator, working_samples


def test_a_setting_that_was_not_measured_is_predicted_by_the_law() -> None:
    estimator = working_estimator()
    found = estimator.predict([RequestSetting(700, 6, 13, {"top_k": 5, "num_active_blocks": 13}, 21)])
    # Vision 2 + 7; prefill 3 + 713 x (13 x 0.001 + 12 x 5 x 0.0005); a token 0.2 + 13 x 0.5, 20 steps.
    expected = {"T_vision_total": 9.0, "T_LLM_prefill": 33.659, "T_decode_per_token": 6.7, "T_LLM_decode": 134.0}
    for name, value in expected.items():
        assert found.times[name][0] == pytest.approx(value, rel=2e-3)
    assert found.times["T_total"][0] == pytest.approx(176.659, rel=2e-3)
    assert not found.extrapolated[0]


requests = st.builds(
    RequestSetting,
    vision_tokens=st.integers(1, 5000),
    crops=st.integers(1, 40),
    text_tokens=st.integers(0, 2000),
    knobs=st.fixed_dictionaries({"top_k": st.integers(1, 64), "num_active_blocks": st.integers(1, 64)}),
    output_tokens=st.integers(1, 2000),
)
GROWING = ("vision_tokens", "crops", "text_tokens", "top_k", "num_active_blocks", "output_tokens")


@settings(max_examples=150, deadline=None)
@given(
    request=requests,
    knob=st.sampled_from(GROWING),
    more=st.integers(1, 300),
)
def test_nothing_is_negative_and_more_is_never_faster(request: RequestSetting, knob: str, more: int) -> None:
    if knob in request.knobs:
        larger = replace(request, knobs={**request.knobs, knob: request.knobs[knob] + more})
    else:
        larger = replace(request, **{knob: getattr(request, knob) + more})
    found = working_estimator(0.1).predict([request, larger])
    for name in PREDICTED:
        for column in (found.times[name], found.low[name], found.high[name]):
            assert (column >= 0).all()
            assert column[1] >= column[0] * (1 - 1e-12)
        assert (found.low[name] <= found.high[name]).all()


def test_intervals_contain_their_fraction_of_new_samples_at_new_settings() -> None:
    fractions: dict[str, list[float]] = {name: [] for name in PREDICTED}
    for seed in range(1, 4):
        fitted = LatencyEstimator(0.8).fit(working_samples(noise=0.1, seed=seed, samples_each=12))
        fresh = working_samples(noise=0.1, seed=seed + 100, samples_each=40)
        found, measured = fitted.predict(fresh.requests), measured_times(fresh)
        for name in PREDICTED:
            inside = (found.low[name] <= measured[name]) & (measured[name] <= found.high[name])
            fractions[name].append(float(inside.mean()))
    # Each end is an order statistic of 324 ratios: 0.8 +- 0.03 for one fit, +- 0.02 for the mean of three.
    assert {name: pytest.approx(float(np.mean(each)), abs=0.06) for name, each in fractions.items()} == dict.fromkeys(
        PREDICTED, 0.8
    )


def test_a_file_gives_the_same_predictions(tmp_path: Path) -> None:
    path, requested = tmp_path / "model.json", working_samples().requests
    working_estimator(0.1).save(path)
    loaded = LatencyEstimator.load(path)
    assert loaded.fitted == working_estimator(0.1).fitted and loaded.level == 0.9
    before, after = working_estimator(0.1).predict(requested), loaded.predict(requested)
    for name in PREDICTED:
        # Float64 of the same numbers at other addresses, which may be summed in another order: some 1e-15.
        np.testing.assert_allclose(after.times[name], before.times[name], rtol=1e-12)
        np.testing.assert_allclose(after.high[name], before.high[name], rtol=1e-12)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    working_estimator(0.1).save(path)
    content = json.loads(path.read_text())
    for change, words in (
        ({"schema_version": 2}, "is not a latency_estimator of schema 1 .its schema is 2"),
        ({"kind": "validation"}, "it has kind 'validation'"),
        ({"stages": 3}, "is broken: stages is 3"),
        ({"stages": {}}, "it lacks T_LLM_prefill"),
        ({"ratios": {}}, "it lacks T_vision_total"),
        ({"level": 10**400}, "is broken: level is "),
        ({"level": 2.0}, "is broken: level is 2.0"),
        ({"num_samples": "x"}, "is broken: num_samples is 'x'"),
    ):
        path.write_text(json.dumps(content | change))
        with pytest.raises(ResultsError, match=words):
            LatencyEstimator.load(path)
    # A model of before, whose prefill is the longer of work and launches.
    other = {"form": "roofline", "work": {"tokens": 1.0}, "floor": {"blocks": 2.0}, "runs_ahead": False}
    path.write_text(json.dumps(content | {"stages": {**content["stages"], "T_LLM_prefill": other}}))
    with pytest.raises(ResultsError, match=r"stages\.T_LLM_prefill\.form is 'roofline'.*; fit it again with e3"):
        LatencyEstimator.load(path)
    del content["ranges"]
    path.write_text(json.dumps(content))
    with pytest.raises(ResultsError, match="lacks 'ranges'"):
        LatencyEstimator.load(path)


def test_knobs_outside_those_measured_are_marked() -> None:
    inside = RequestSetting(700, 6, 13, {"top_k": 5, "num_active_blocks": 13}, 21)
    others = {"top_k": 9, "num_active_blocks": 13}, {"top_k": 5, "num_active_blocks": 11}
    changed = [*(replace(inside, knobs=knobs) for knobs in others), replace(inside, crops=16)]
    found = working_estimator(0.1).predict([inside, *changed, replace(inside, vision_tokens=3000)])
    assert found.unseen_knobs.tolist() == [False, True, True, True, False]
    assert found.extrapolated.tolist() == [False, True, True, True, True]


def test_a_knob_with_one_value_is_named_and_has_no_coefficient() -> None:
    samples = working_samples()
    fitted = LatencyEstimator().fit(samples.take(samples.requests.num_active_blocks == 14)).fitted
    assert (
        "num_active_blocks had one value (14): its effect is not known, other values are extrapolated" in fitted.caveats
    )
    assert "blocks" not in fitted.stages["T_decode_per_token"].work


def test_prompts_that_are_nearly_equally_long_are_named() -> None:
    samples = working_samples()
    prompts = samples.requests.prompt_tokens
    least = float(prompts.min())
    assert not [each for each in caveats_of(samples) if "prompt_tokens" in each.sentence]
    near = samples.take(prompts < 1.5 * least)
    most = float(near.requests.prompt_tokens.max())
    assert (
        f"prompt_tokens was {least:g} to {most:g}: its effect is not known, other values are extrapolated"
        in [each.sentence for each in caveats_of(near)]
    )  # fmt: skip


def test_too_few_samples_are_refused() -> None:
    samples = working_samples()
    few = samples.take(np.isin(samples.settings, np.unique(samples.settings)[:5]))
    with pytest.raises(ResultsError, match="5 settings with 20 samples are too few .* 7 settings and 24 samples"):
        LatencyEstimator().fit(few)
    silent = TimedSamples(
        samples.requests,
        {**samples.times, "T_decode_per_token": np.full(len(samples), np.nan)},
        samples.settings,
        samples.tasks,
    )
    with pytest.raises(ResultsError, match="no sample has two output tokens"):
        LatencyEstimator().fit(silent)


def test_misuse_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="call fit or load first"):
        LatencyEstimator().predict([RequestSetting(1, 1, 1, {"top_k": 1, "num_active_blocks": 1})])
    with pytest.raises(ConfigurationError, match="a level of 90 is not possible"):
        LatencyEstimator(90)


def test_expected_output_is_the_mean_of_the_task() -> None:
    samples = working_samples()
    tasks = np.where(np.arange(len(samples)) % 4 < 2, "signs", "counts")
    # Outputs are 9, 10, 11, 12 in turn.
    found = expected_output_tokens(replace(samples, tasks=tasks))
    assert found == {"signs": 9.5, "counts": 11.5}
