"""Columns of requests, the terms of the model by hand, and which of them samples can identify."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiments.analyses.latency.features import (
    MEASURED,
    RequestColumns,
    RequestSetting,
    columns_of,
    identifiable,
    of_several_runs,
    requests_of,
    timed_samples,
)
from tests.experiments.analyses.latency.synthetic_samples import grid_requests, working_samples


def test_terms_by_hand() -> None:
    # 100 + 20 tokens, 3 tiles and the whole picture, 5 blocks of which 4 use 2 experts; 11 output tokens.
    requests = requests_of([RequestSetting(100, 3, 20, {"top_k": 2, "num_active_blocks": 5}, 11)])
    terms = [
        "request", "image_crops", "blocks", "tokens", "experts", "blocks_x_tokens", "experts_x_tokens",
        "blocks_x_tokens_squared", "blocks_x_context",
    ]  # fmt: skip
    expected = [1, 4, 5, 120, 4 * 2, 5 * 120, 4 * 2 * 120, 5 * 120**2, 5 * (120 + 11 / 2)]
    assert columns_of(terms, requests)[0].tolist() == expected


def test_an_unknown_output_length_has_the_context_of_the_first_step() -> None:
    assert requests_of([RequestSetting(100, 3, 20, {"top_k": 2, "num_active_blocks": 5})]).context.tolist() == [121.0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 0}, "top_k 0 is not possible; give a number from 1"),
        ({"vision_tokens": -1}, "vision_tokens -1 is not possible; give a number from 0"),
        ({"output_tokens": 0}, "output_tokens 0 is not possible"),
        ({"crops": float("nan")}, "crops nan is not possible"),
    ],
)
def test_impossible_requests_are_refused(change: dict[str, float], words: str) -> None:
    good = {"vision_tokens": 9, "crops": 1, "text_tokens": 3, "top_k": 2, "num_active_blocks": 4, "output_tokens": 2}
    with pytest.raises(ConfigurationError, match=words):
        RequestColumns(**{name: np.array([value]) for name, value in (good | change).items()})


def test_a_dense_model_has_one_expert_and_further_knobs_are_not_looked_at() -> None:
    requests = requests_of([RequestSetting(100, 3, 20, {"num_active_blocks": 5, "vision": "low", "volume": 2})])
    assert (requests.top_k.tolist(), requests.num_active_blocks.tolist()) == ([1.0], [5.0])


def test_a_request_without_a_level_that_counts_is_refused() -> None:
    words = "the knobs of a request lack num_active_blocks; give its level, as results have it"
    with pytest.raises(ConfigurationError, match=words):
        requests_of([RequestSetting(100, 3, 20, {"top_k": 2})])


def test_columns_of_different_lengths_are_refused_and_scalars_are_spread() -> None:
    one, two, three = np.array([1.0]), np.ones(2), np.ones(3)
    assert len(RequestColumns(two, one, one, one, one, one)) == 2
    with pytest.raises(ConfigurationError, match=r"columns of different lengths: vision_tokens \(2,\), crops \(3,\)"):
        RequestColumns(two, three, one, one, one, one)


def test_a_knob_with_one_value_loses_its_terms() -> None:
    requests, _ = grid_requests()
    terms = ("request", "blocks", "experts", "tokens", "experts_x_tokens")
    assert identifiable(terms, requests) == terms
    # With one top-k, later experts are a multiple of blocks less one; with tokens they are still a thing of their own.
    assert identifiable(terms, requests.take(requests.top_k == 6)) == (
        "request",
        "blocks",
        "tokens",
        "experts_x_tokens",
    )
    assert identifiable(terms, requests.take(requests.num_active_blocks == 14)) == (
        "request", "experts", "tokens", "experts_x_tokens",
    )  # fmt: skip
    one = requests.take(np.array([0]))
    assert identifiable(terms, one) == ("request",)


def test_samples_are_those_with_times_and_no_picture_is_0() -> None:
    frame = pd.DataFrame(
        {
            "task": ["signs"] * 3, "setting": ["a", "a", "b"], "actual_vision_tokens": [288.0, 0.0, 288.0],
            "actual_num_crops": [1.0, np.nan, 1.0], "input_text_tokens": [5.0] * 3, "top_k": [2] * 3,
            "num_active_blocks": [4] * 3, "output_tokens": [3.0] * 3, "T_vision_total_ms": [2.0, np.nan, np.nan],
            "T_LLM_prefill_ms": [4.0, 3.0, np.nan], "T_decode_per_token_ms": [1.0, 1.0, np.nan],
            "T_total_ms": [8.0, 5.0, np.nan], "vision": ["low", "288 tokens", "low"],
            "image_id": ["p", None, "p"], "sample_id": [7, 8, 9],
        }
    )  # fmt: skip
    samples = timed_samples(frame)
    assert samples.wholes["vision"].tolist() == ["low", "288 tokens"]
    assert samples.wholes["pictures"].tolist() == ["p", "8"]
    assert samples.runs == {}
    runs = pd.DataFrame({"sample": [0, 0, 1], "run": [0, 1, 0], "T_total_ms": [8.0, 9.0, 5.0]})
    runs = runs.assign(T_vision_total_ms=2.0, T_LLM_prefill_ms=4.0, T_decode_per_token_ms=1.0)
    measured = timed_samples(frame, runs).take(np.array([0, 1])).runs["T_total"]
    assert measured[:, 0].tolist() == [8.0, 9.0] and measured[0, 1] == 5.0 and np.isnan(measured[1, 1])
    assert samples.settings.tolist() == ["signs a", "signs a"] and samples.tasks.tolist() == ["signs", "signs"]
    assert samples.requests.crops.tolist() == [1.0, 0.0]
    assert samples.times["T_LLM_prefill"].tolist() == [4.0, 3.0] and np.isnan(samples.times["T_vision_total"][1])
    with pytest.raises(ResultsError, match="T_LLM_prefill is 0 ms in a sample"):
        timed_samples(frame.assign(T_LLM_prefill_ms=0.0))
    with pytest.raises(ResultsError, match="no sample of these results has times"):
        timed_samples(frame.assign(T_total_ms=np.nan))


def test_several_runs_are_told_apart_and_their_settings_are_one() -> None:
    one = working_samples()
    first = replace(one, wholes={"top_k": one.requests.top_k}, runs={name: one.times[name][None] for name in MEASURED})
    part = first.take(np.arange(8))
    again = {name: np.concatenate([part.runs[name], part.runs[name]]) for name in MEASURED}
    both = of_several_runs([first, replace(part, runs=again)])
    assert len(both) == 116 and both.knobs[0] == both.knobs[108] and both.settings[108] == f"2:{one.settings[0]}"
    assert both.wholes["runs"].tolist() == ["1"] * 108 + ["2"] * 8 and len(both.wholes["top_k"]) == 116
    # The samples of the first run have one run each, those of the second have two.
    assert np.isfinite(both.runs["T_total"]).sum(axis=0).tolist() == [1] * 108 + [2] * 8
    # A run without the single runs, and without the levels of a knob, leaves them out.
    without = of_several_runs([first, replace(part, runs={}, wholes={})])
    assert without.runs == {} and list(without.wholes) == ["runs"]
