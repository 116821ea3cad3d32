"""Answers, of samples that were measured and of others."""

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.tasks.interface import (
    Answer,
    Sample,
    Score,
    Scoring,
    answer_of,
    answer_to,
    check_scorable,
    scored,
    scores_of,
)
from experiment_core_utils.tasks.scoring.metrics import AnswerMetric
from tests.hand_made_records import measured_sample


def test_an_answer_is_beside_all_that_it_is_scored_against() -> None:
    sample = Sample(7, "img", "which?", ("blue",), None, "choice", {}, ("red", "blue"), 1)
    assert answer_to(sample, "B") == Answer("B", ("blue",), ("red", "blue"), 1, "choice", "img")
    assert answer_of(measured_sample(3, prediction="0.3", question_type="count")) == Answer(
        "0.3", ("stop",), (), None, "count", "picture-3"
    )


class Generous:
    """A metric that gives what it is told to, whatever the answer."""

    name, best, scores_each_answer = "generous", 1.0, True

    def __init__(self, *values: float | None) -> None:
        self._values = values

    def score(self, answers: Sequence[Answer]) -> Scoring:
        return Scoring(tuple(map(Score, self._values)), None)


def test_scores_within_the_range_or_none_are_taken() -> None:
    answers = [Answer("a", ("b",))] * 3
    assert [each.value for each in scored(answers, Generous(0.0, None, 1.0)).scores] == [0.0, None, 1.0]


@pytest.mark.parametrize("value", [-5.0, 1e308, math.nan, math.inf, 1.0000001])
def test_a_score_out_of_the_metrics_range_is_named_with_the_sample(value: float) -> None:
    given = re.escape(f"metric generous gave {value} to ")
    with pytest.raises(ConfigurationError, match=f"^{given}'B'; a score is from 0 to 1, or None$"):
        scores_of([Answer("B", ("b",))], Generous(value))
    with pytest.raises(ConfigurationError, match=f"^{given}sample 7, of which the answer is empty; "):
        check_scorable(Sample(7, "img", "which?", ("blue",), None, "choice"), Generous(value))


def test_a_metric_gives_one_score_for_each_answer() -> None:
    with pytest.raises(ConfigurationError, match="metric generous gave 2 scores of 1 answers"):
        scored([Answer("B", ("b",))], Generous(0.5, 0.5))


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        ({"unparsed": 1.0}, "metric own gave a detail called unparsed to 'cat'; give it another name, of one line"),
        ({"a\nb": 1.0}, r"a detail called a\\nb to 'cat'"),
        ({"half": float("nan")}, "metric own gave nan as half to 'cat'; give a finite number"),
    ],
)
def test_details_are_finite_numbers_with_names_of_their_own(details: dict[str, Any], reason: str) -> None:
    metric = AnswerMetric("own", lambda answer: Score(1.0, details=details))
    with pytest.raises(ConfigurationError, match=reason):
        scored([Answer("cat", ("cat",))], metric)
