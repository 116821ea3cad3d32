"""Whether two samples of results are the same question, and what their runs come to."""

from dataclasses import replace

import pytest

from experiment_core_utils.finishing.setting_content import sample_result
from experiment_core_utils.records.sample_result import is_same_question, times_over_runs
from experiment_core_utils.tasks.interface import Score
from tests.hand_made_records import SETTING, answered_sample, measured_sample, staged_run


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [("b1", "b1", True), ("b1", "c2", False), ("b1", None, True), (None, None, True)],
)
def test_a_picture_is_the_same_by_its_content_where_both_results_have_it(
    one: str | None, other: str | None, is_same: bool
) -> None:
    """Question, name of the picture and answers are equal."""
    samples = [
        sample_result(replace(measured_sample(3), picture_sha256=each), Score(1.0), SETTING) for each in (one, other)
    ]
    assert is_same_question(*samples) == is_same


def test_a_sample_has_the_times_and_places_of_all_its_runs() -> None:
    sample = replace(measured_sample(0, staged_run(), staged_run(vision_s=1.5)), round_places=(4, 0))
    found = sample_result(sample, Score(1.0), SETTING)
    assert (found.T_total, found.run_totals, found.mean_total, found.round_places) == (1500, (1000, 2000), 1500, (4, 0))
    assert sample_result(measured_sample(0), Score(1.0), SETTING).round_places is None
    answered = sample_result(answered_sample(0), Score(1.0), SETTING)
    assert (answered.run_totals, answered.mean_total, answered.round_places) == ((), None, None)


def test_the_times_of_a_sample_are_the_means_of_its_runs() -> None:
    """Runs of three tokens, of one, and of three; 2 of its tokens are thinking, so one decode step of 125 ms."""
    runs = staged_run(), staged_run(vision_s=2.0, inter_token_s=()), staged_run(prefill_s=0.5, inter_token_s=(0.125, 1))
    found = sample_result(replace(measured_sample(0, *runs), thinking_tokens=2), Score(1.0), SETTING)
    assert (found.T_vision_total, found.T_LLM_prefill) == (1000.0, pytest.approx(1000 / 3))
    assert (found.T_LLM_decode, found.T_decode_per_token) == (pytest.approx((250 + 1125) / 3), (125 + 562.5) / 2)
    stages = found.T_vision_total, found.T_LLM_prefill, found.T_LLM_decode
    assert found.T_total == pytest.approx(sum(each or 0.0 for each in stages))
    assert found.T_first_token == pytest.approx(1000 + 1000 / 3) and found.T_thinking == pytest.approx(250 / 3)
    # As it is read again; and of an older file, where they are one run's.
    # At a server no stages are seen, and the first token is what decode leaves of the total.
    served = [run.with_keys(T_vision_total=None, T_LLM_prefill=None) for run in found.runs]
    times = times_over_runs(served, None)
    assert times["T_LLM_prefill"] is None and times["T_thinking"] is None
    assert times["T_first_token"] == pytest.approx((750 + 2250 + 1000) / 3)
    # Without runs there is nothing.
    assert set(times_over_runs([], 0).values()) == {None}


def test_other_answers_make_another_question() -> None:
    samples = [replace(measured_sample(3), references=each) for each in (("a",), ("b",))]
    assert not is_same_question(*(sample_result(each, Score(1.0), SETTING) for each in samples))
