"""Whether two samples of results are the same question, and what their runs come to."""

from dataclasses import replace

import pytest

from experiment_core_utils.j_results_saving import sample_result
from experiment_core_utils.records.sample_result import is_same_question
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
    assert (found.T_total, found.run_totals, found.mean_total, found.round_places) == (1000, (1000, 2000), 1500, (4, 0))
    assert sample_result(measured_sample(0), Score(1.0), SETTING).round_places is None
    answered = sample_result(answered_sample(0), Score(1.0), SETTING)
    assert (answered.run_totals, answered.mean_total, answered.round_places) == ((), None, None)


def test_other_answers_make_another_question() -> None:
    samples = [replace(measured_sample(3), references=each) for each in (("a",), ("b",))]
    assert not is_same_question(*(sample_result(each, Score(1.0), SETTING) for each in samples))
