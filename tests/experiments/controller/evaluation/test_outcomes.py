"""Accuracy, latency and violations of hand-made outcomes, and differences between policies."""

import numpy as np
import pytest

from experiments.controller.evaluation.outcomes import AnsweredRequests, Outcomes, figures_at, fraction_of_gain, paired
from tests.experiments.controller.hand_made_requests import FAST, SLOW

# Two tasks, of which the second is scored from 0 to 10.
REQUESTS = AnsweredRequests(
    ("signs", "signs", "captions", "captions"), ("a", "b", "c", "d"), np.array([1.0, 1.0, 10.0, 10.0])
)


def outcomes(scores, latency_s, name="own", overhead_s=0.001):
    times = np.array(latency_s, dtype=float)
    choices = tuple((FAST,) * (times.shape[1] - 1) + (SLOW,) for _ in times)
    return Outcomes(name, choices, np.array(scores, dtype=float), times, np.full(times.shape, overhead_s))


def test_figures_at_a_budget():
    made = outcomes([[1, 0, 5, 10]], [[0.1, 0.1, 0.2, 0.4]])
    possible = np.array([[True, True, True, False]])
    found = figures_at(made, 0, [0.3], REQUESTS, possible)
    assert found.accuracy_by_task == {"signs": 0.5, "captions": 7.5}
    # (1 + 0 + 0.5 + 1) / 4, and without the last one, which took 0.4 s.
    assert found.accuracy == pytest.approx(0.625)
    assert found.accuracy_in_time == pytest.approx(0.375)
    assert found.violation_rate == 0.25
    assert found.violation_rate_possible == 0.0
    assert found.latency_mean_s == pytest.approx(0.2)
    # Of 0.1, 0.1, 0.2, 0.4: half way between the middle two; 0.2 + 0.85 * 0.2; 0.2 + 0.97 * 0.2.
    assert found.latency_p50_s == pytest.approx(0.15)
    assert found.latency_p95_s == pytest.approx(0.37)
    assert found.latency_p99_s == pytest.approx(0.394)
    # 0.001 of 0.1, 0.1, 0.2, 0.4: (0.01 + 0.01 + 0.005 + 0.0025) / 4
    assert found.overhead_share == pytest.approx(0.006875)
    assert found.choices == {"tier-low_topk4_blocks12": 3, "tier-high_topk8_blocks16": 1}


def test_a_latency_equal_to_the_budget_is_in_time():
    assert figures_at(outcomes([[1, 1, 1, 1]], [[0.3] * 4]), 0, [0.3], REQUESTS, None).violation_rate == 0.0


def test_absent_scores_do_not_count_and_are_not_0():
    found = figures_at(outcomes([[1, np.nan, np.nan, np.nan]], [[0.1] * 4]), 0, [0.3], REQUESTS, None)
    assert found.accuracy == 1.0
    assert found.accuracy_by_task == {"signs": 1.0, "captions": None}
    assert found.violation_rate_possible is None


def test_the_fraction_of_the_oracles_gain():
    assert fraction_of_gain(0.75, 0.5, 1.0) == 0.5
    assert fraction_of_gain(0.25, 0.5, 1.0) == -0.5
    assert fraction_of_gain(0.75, 1.0, 1.0) is None
    assert fraction_of_gain(None, 0.5, 1.0) is None


def test_a_difference_that_every_request_shares_may_hide_others():
    """None among 4 pictures: (1 - p)^4 = 0.025 at p = 0.6024."""
    own = outcomes([[1, 1, 10, 10]], [[0.2] * 4])
    other = outcomes([[0, 0, 0, 0]], [[0.1] * 4], "other")
    found = paired(own, other, [0.3], REQUESTS, [0])
    assert found.accuracy is not None and found.accuracy_in_time is not None
    # 1 - 0.6024 * (1 + 1), and no better than 1; 0 -+ 0.6024.
    assert found.accuracy.value == 1.0
    assert found.accuracy.ci95 == pytest.approx((-0.2047, 1.0), abs=1e-4)
    assert found.accuracy_in_time.ci95 == found.accuracy.ci95
    assert found.violation_rate is not None and found.violation_rate.ci95 == pytest.approx((-0.6024, 0.6024), abs=1e-4)
    assert found.latency_s.value == pytest.approx(0.1)
    assert found.latency_s.ci95 is None


def test_what_is_over_the_budget_counts_0_in_time():
    own = outcomes([[1, 1, 10, 10]], [[0.4] * 4])
    other = outcomes([[1, 1, 10, 10]], [[0.1] * 4], "other")
    found = paired(own, other, [0.3], REQUESTS, [0])
    assert found.accuracy is not None and found.accuracy_in_time is not None
    assert found.accuracy.value == 0.0
    assert found.accuracy_in_time.value == -1.0
    assert found.violation_rate is not None and found.violation_rate.value == 1.0


def test_the_mean_over_budgets_counts_each_the_same():
    own = outcomes([[1, 1, 10, 10], [0, 0, 0, 0]], [[0.1] * 4, [0.5] * 4])
    other = outcomes([[0, 0, 0, 0], [0, 0, 0, 0]], [[0.1] * 4, [0.1] * 4], "other")
    found = paired(own, other, [0.3, 0.6], REQUESTS, [0, 1])
    assert found.accuracy is not None
    assert found.accuracy.value == 0.5
    assert found.latency_s.value == pytest.approx(0.2)


def test_pictures_are_drawn_whole():
    """Four requests of one picture say no more than one: none in 1 has the bound 0.975."""
    own = outcomes([[1, 0, 10, 0]], [[0.1, 0.2, 0.3, 0.4]])
    other = outcomes([[0, 0, 0, 0]], [[0.1] * 4], "other")
    together = AnsweredRequests(REQUESTS.tasks, ("a",) * 4, REQUESTS.best)
    found = paired(own, other, [1.0], together, [0]).accuracy
    apart = paired(own, other, [1.0], REQUESTS, [0]).accuracy
    assert found is not None and apart is not None
    # 0.5 - 0.975 * 1.5 and 0.5 + 0.975 * 0.5
    assert found.value == 0.5
    assert found.ci95 == pytest.approx((-0.9625, 0.9875), abs=1e-4)
    # 2 of 4 are 1: Clopper's and Pearson's upper bound; the lower one is for values down to -1.
    assert apart.ci95 == (pytest.approx(-0.46, abs=0.03), pytest.approx(0.9324, abs=1e-4))
