"""Answers, of samples that were measured and of others."""

from experiment_core_utils.tasks.interface import Answer, Sample, answer_of, answer_to
from tests.hand_made_records import measured_sample


def test_an_answer_is_beside_all_that_it_is_scored_against() -> None:
    sample = Sample(7, "img", "which?", ("blue",), None, "choice", {}, ("red", "blue"), 1)
    assert answer_to(sample, "B") == Answer("B", ("blue",), ("red", "blue"), 1, "choice", "img")
    assert answer_of(measured_sample(3, prediction="0.3", question_type="count")) == Answer(
        "0.3", ("stop",), (), None, "count", "picture-3"
    )
