"""Policies on a hand-made grid: what the oracle takes, what static settings give, which budgets can be met."""

from dataclasses import replace

import numpy as np
import pytest

from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiments.controller.evaluation.outcomes import figures_at
from experiments.controller.evaluation.replay import (
    PerSampleOracle,
    best_static,
    meetable,
    possible,
    replay,
    requests_in,
    spread_budgets,
)
from experiments.controller.knob_choices import choice_of
from experiments.controller.policies.interface import RandomPolicy, StaticPolicy
from tests.experiments.controller.hand_made_requests import FAST, MIDDLE, SLOW, grid, request


def test_the_oracle_takes_the_cheapest_right_answer_within_the_budget():
    oracle = PerSampleOracle(grid())
    assert [oracle.choose(request(each), 1.0) for each in range(4)] == [FAST, MIDDLE, SLOW, FAST]
    # At 0.5 s request 2 cannot be right: the fastest wrong answer.
    assert [oracle.choose(request(each), 0.5) for each in range(4)] == [FAST, MIDDLE, FAST, FAST]
    # At 0.15 s request 3 fits nowhere: the fastest, though it is right only by chance of being that.
    assert [oracle.choose(request(each), 0.15) for each in range(4)] == [FAST] * 4


def test_the_oracle_of_a_request_that_fits_nowhere_takes_the_fastest_not_the_most_accurate():
    oracle = PerSampleOracle(grid())
    assert oracle.choose(request(2), 0.05) == FAST


def test_the_oracle_does_not_know_other_requests():
    with pytest.raises(ConfigurationError, match="sample 9 of signs is not in the grid"):
        PerSampleOracle(grid()).choose(request(9), 1.0)


def test_a_replay_looks_up_scores_and_times():
    found = replay(PerSampleOracle(grid()), grid(), (0.5, 1.0))
    assert found.choices[1] == (FAST, MIDDLE, SLOW, FAST)
    assert found.scores.tolist() == [[1, 1, 0, 1], [1, 1, 1, 1]]
    assert found.latency_s.tolist() == [[0.1, 0.2, 0.1, 0.2], [0.1, 0.2, 0.6, 0.2]]
    assert (found.overhead_s > 0).all()


def test_a_choice_that_was_not_measured_is_refused():
    with pytest.raises(ResultsError, match="tier-low_topk8_blocks12, which the grid has not measured"):
        replay(StaticPolicy(choice_of("low", 8, 12)), grid(), (1.0,))


def test_random_depends_on_the_seed_and_uses_every_choice():
    choices = grid().choices
    ids = range(60)
    picks = [RandomPolicy(choices, 3).choose(request(each), 0.5) for each in ids]
    assert picks == [RandomPolicy(choices, 3).choose(request(each), 0.5) for each in ids]
    assert picks != [RandomPolicy(choices, 4).choose(request(each), 0.5) for each in ids]
    assert picks != [RandomPolicy(choices, 3).choose(request(each), 0.6) for each in ids]
    # Of 60 draws each of three choices is expected 20 times; fewer than 8 would be a chance of about 1 in 10 000.
    assert all(picks.count(choice) >= 8 for choice in choices)


def test_the_best_static_setting_counts_late_answers_as_wrong():
    # At 0.5 s: fast 2 of 4; middle 2 of 4, slower; slow right and in time on requests 0 and 1 only.
    # At 1.0 s: slow 3 of 4. At 0.65 s: slow 0, 1, 2 in time: 3 of 4.
    found = best_static(grid(), (0.5, 0.65, 1.0))
    assert [row[0] for row in found.choices] == [FAST, SLOW, SLOW]
    assert all(len(set(row)) == 1 for row in found.choices)


def test_a_request_is_late_by_its_runs() -> None:
    """The middle choice takes 0.2 s in one run of every request and 0.4 s in the other."""
    made = grid()
    runs = np.stack([made.total_s, made.total_s])
    runs[:, 1] = [[0.2] * 4, [0.4] * 4]
    made = replace(made, total_s=runs.mean(axis=0), runs_s=runs)
    assert made.late(0.3)[1].tolist() == [0.5] * 4 and made.late(0.4)[1].tolist() == [0.0] * 4
    (row,) = replay(StaticPolicy(MIDDLE), made, (0.3,)).times_s.swapaxes(0, 1)
    assert row.tolist() == [[0.2] * 4, [0.4] * 4]
    figures = figures_at(replay(StaticPolicy(MIDDLE), made, (0.3,)), 0, (0.3,), requests_in(made), None)
    # Right on two of four, half in time.
    assert (figures.accuracy, figures.accuracy_in_time, figures.violation_rate) == (0.5, 0.25, 0.5)
    # Of 4 runs of 0.2 s and 4 of 0.4 s: the mean, and half way between the middle two.
    assert figures.latency_mean_s == pytest.approx(0.3) and figures.latency_p50_s == pytest.approx(0.3)
    assert (figures.latency_p95_s, figures.latency_p99_s) == (0.4, 0.4)
    # Request 1 is right at the middle choice only, in half of the runs, which is more than never.
    assert PerSampleOracle(made).choose(request(1), 0.3) == MIDDLE
    # Requests 0 and 3 are right at the fast one.
    assert PerSampleOracle(made).choose(request(0), 0.3) == FAST
    part = made.take(np.array([1]))
    assert part.runs_s is not None and part.runs_s.shape == (2, 3, 1)
    alone = made.rows([1])
    assert (alone.choices, possible(alone, (0.3, 0.4)).tolist()) == ((MIDDLE,), [[False] * 4, [True] * 4])
    assert meetable(alone, (0.3, 0.4)) == [False, True]


def test_which_budgets_can_be_met():
    assert possible(grid(), (0.05, 0.1, 0.2)).tolist() == [[False] * 4, [True, True, True, False], [True] * 4]
    # 95 % of four requests are all four.
    assert meetable(grid(), (0.1, 0.199, 0.2, 5.0)) == [False, False, True, True]


def test_budgets_are_spread_by_equal_ratios():
    # Medians 0.1, 0.25, 0.55 s; the slow one's 95th percentile is 0.6 + 0.85 * 0.1 = 0.685 s.
    low, middle, high = spread_budgets(grid(), 3)
    assert (low, high) == pytest.approx((0.1, 0.685))
    assert middle / low == pytest.approx(high / middle)
    with pytest.raises(ConfigurationError, match="give at least 2"):
        spread_budgets(grid(), 1)


def test_only_complete_requests_are_replayed():
    made = grid()
    scores = made.scores.copy()
    scores[0, 1] = np.nan
    kept = replace(made, scores=scores).complete()
    assert kept.sample_ids == (0, 2, 3)
    assert kept.total_s[2].tolist() == [0.4, 0.6, 0.7]
    scores[0] = np.nan
    with pytest.raises(ResultsError, match="at all 3 settings"):
        replace(made, scores=scores).complete()
