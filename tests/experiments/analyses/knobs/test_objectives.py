"""Which samples settings are compared on, and what counts as surely better."""

import numpy as np
import pytest

from experiment_core_utils.primitives.replication import (
    COUNTED,
    IN_ROUNDS,
    OPEN_LOOP,
    UNKNOWN,
    Replication,
)
from experiments.analyses.charts.knob_charts import fronts_chart
from experiments.analyses.knobs.analysis import FrontAnalysis, analyse_knobs
from experiments.analyses.knobs.coupling import fixed_values
from experiments.analyses.knobs.fronts import front
from experiments.analyses.knobs.objectives import (
    ENERGY,
    FLOPS,
    LATENCY_MEAN,
    LATENCY_P95,
    NoObjectives,
    objectives,
)
from experiments.fitting.intervals import interval
from tests.experiments.hand_made_grid import grid, measured, point
from tests.hand_made_replication import with_variance

NAN = float("nan")
POINTS = [point("low"), point("high")]


def variance(std: float) -> Replication:
    """That of settings measured one after another, of 20 degrees of freedom."""
    return with_variance(std**2, 20, 2)


def test_settings_are_compared_on_the_samples_that_all_have() -> None:
    scores = [[1.0, 1.0, NAN, 0.0], [0.0, 1.0, 1.0, NAN]]
    times = [[10.0, NAN, 30.0, NAN], [20.0, 40.0, 60.0, NAN]]
    found = measured(grid(POINTS, scores, times))
    # Scores on samples 0 and 1, times on 0 and 2.
    assert found.accuracy.tolist() == [1.0, 0.5]
    assert found.cost.tolist() == [20.0, 40.0]
    assert (found.num_score_samples, found.num_cost_samples, found.num_dropped_samples) == (2, 2, 2)
    assert found.left_out == {}


def test_a_setting_without_times_is_left_out_and_reported() -> None:
    made = grid(POINTS, [[1.0, 0.0], [1.0, 1.0]], [[10.0, 20.0], [NAN, NAN]])
    found = measured(made)
    assert [each.key for each in found.points] == [POINTS[0].key]
    assert found.left_out == {POINTS[1].key: "no sample has mean end-to-end latency"}


def test_absent_energy_is_a_reason_and_no_number() -> None:
    found = objectives(grid(POINTS, [[1.0], [1.0]], [[1.0], [2.0]]), ENERGY, 100, 0)
    assert isinstance(found, NoObjectives) and "--energy" in found.reason


def test_settings_that_share_no_sample_cannot_be_paired() -> None:
    found = objectives(grid(POINTS, [[1.0, NAN], [NAN, 1.0]], [[1.0, 1.0], [1.0, 1.0]]), LATENCY_MEAN, 100, 0)
    assert isinstance(found, NoObjectives)
    assert found.reason == "no sample has a score at all 2 settings, so none can be paired"
    found = objectives(grid(POINTS, [[NAN], [NAN]], [[1.0], [1.0]]), LATENCY_MEAN, 100, 0)
    assert isinstance(found, NoObjectives) and found.reason == "no sample has a score by read_off"


def test_costs_are_taken_by_their_statistic() -> None:
    made = grid(POINTS[:1], [[1.0] * 21], [[float(each) for each in range(21)]])
    # 0 to 20: the mean is 10, 95 % of the way is 19; operations are ten times as many.
    assert [measured(made, of).cost[0] for of in (LATENCY_MEAN, LATENCY_P95, FLOPS)] == [10.0, 19.0, 100.0]
    draws = measured(made, LATENCY_P95).cost_draws[:, 0]
    assert draws.shape == (400,) and draws.max() <= 20.0 and 15 < np.median(draws) < 20


def test_every_draw_has_times_where_few_samples_have() -> None:
    times = np.full((2, 40), NAN)
    times[:, :2] = 10.0
    found = measured(grid(POINTS, np.ones((2, 40)), times))
    assert found.num_cost_samples == 2 and (found.cost_draws == 10.0).all()


def test_what_is_common_to_the_settings_does_not_blur_their_difference() -> None:
    # Times from 10 to 300 ms, the second setting always 1 % longer.
    times = np.linspace(10, 300, 30)
    found = measured(grid(POINTS, np.ones((2, 30)), np.stack([times, 1.01 * times])))
    assert [found.cheaper(at).tolist() for at in (0, 1)] == [[False, True], [False, False]]
    low, high = interval(found.cost_draws[:, 0])
    assert low < 130 and high > 175


def test_a_latency_of_blocked_settings_is_lower_only_by_more_than_what_may_be_the_machine() -> None:
    # 10 and 12 ms, log ratio 0.182: errors 0.02 and 0.2 of a setting, times sqrt 2 and about Student's 2.09 of 20.
    ms = [[10.0] * 20, [12.0] * 20]
    rounds, little, much, unknown = (
        grid(POINTS, np.ones((2, 20)), ms, energy_j=ms, variance=each)
        for each in (IN_ROUNDS, variance(0.02), variance(0.2), UNKNOWN)
    )
    assert [measured(made).cheaper(0)[1] for made in (rounds, little, much, unknown)] == [True, True, False, False]
    assert measured(unknown).no_verdict == (
        "mean end-to-end latency of settings that were measured one after another shows no change of the machine"
    )
    assert measured(rounds).cost_intervals()[0] == pytest.approx((10.0, 10.0)) and measured(
        unknown
    ).cost_intervals() == [None, None]
    # Draws have it too: a fifth of 10 ms.
    assert measured(rounds).cost_draws[:, 0].std() < 1e-9
    assert measured(much).cost_draws[:, 0].std() == pytest.approx(2.0, rel=0.2)
    # Operations and energy do not drift.
    for of in (FLOPS, ENERGY):
        assert measured(much, of).cheaper(0)[1] and measured(much, of).replication == COUNTED


def test_a_percentile_of_blocked_settings_needs_as_much() -> None:
    ms = np.outer([10.0, 12.0], np.linspace(0.95, 1.05, 120))
    made = [grid(POINTS, np.ones((2, 120)), ms, variance=each) for each in (IN_ROUNDS, variance(0.02), variance(0.2))]
    assert [measured(each, LATENCY_P95).cheaper(0)[1] for each in made] == [True, True, False]


def test_times_of_requests_that_waited_for_each_other_have_neither_verdict_nor_interval() -> None:
    ms = np.outer([10.0, 20.0], np.linspace(0.95, 1.05, 120))
    made = grid(POINTS, np.ones((2, 120)), ms, variance=OPEN_LOOP)
    for of in (LATENCY_MEAN, LATENCY_P95):
        found = measured(made, of)
        assert not found.cheaper(0).any() and found.cost_intervals() == [None, None]
        assert found.no_verdict == f"{of.label} is of requests that came at a rate and waited for each other"
        # Nor is it said whether such a setting is on the front, or what a knob loses or changes.
        assert [(each.word, each.p_value) for each in front(found).points] == [("can't tell", 1.0)] * 2
        assert {row.value: row.loss.beyond_noise for row in fixed_values(found)} == {"low": False, "high": False}
        ((analysis,),) = [analyse_knobs([made], (of,), 50).tasks]
        assert [(each.p_value, each.family_p_value) for each in analysis.effects[of.name].terms] == [(None, None)]
        (panel,) = fronts_chart([each for each in analysis.fronts if isinstance(each, FrontAnalysis)]).panels
        assert panel.title.endswith(": no verdicts, since requests waited for each other")


def test_contrasts_are_of_logarithms_of_times_and_of_scores() -> None:
    found = measured(grid(POINTS, [[1.0, 0.0] * 10, [1.0, 1.0] * 10], [[10.0, 40.0] * 10, [20.0, 20.0] * 10]))
    # Half of the time and twice the time: equal in the logarithm, 25 and 20 ms in the mean.
    assert found.cost_contrasts().ratio(0, 1) == pytest.approx(1.0) and found.cost.tolist() == [25.0, 20.0]
    assert found.score_contrasts().difference(1, 0) == pytest.approx(0.5)
    assert not found.told_apart().any()
    one = found.cost_contrasts(reference=0)
    assert one.reference == 0 and one.num_comparisons == 1


def test_few_pictures_prove_no_lower_cost() -> None:
    five, six = ([[10.0] * n, [12.0] * n] for n in (5, 6))
    assert not measured(grid(POINTS, np.ones((2, 5)), five)).cheaper(0).any()
    assert measured(grid(POINTS, np.ones((2, 6)), six)).cheaper(0)[1]


def test_accuracy_is_higher_where_answers_differ_often_enough() -> None:
    def better(more: int) -> bool:
        scores = [[1.0] * (10 + more) + [0.0] * (50 - more), [1.0] * 10 + [0.0] * 50]
        return bool(measured(grid(POINTS, scores, np.ones((2, 60)))).accuracy_p_values(0)[1] <= 0.05)

    # An exact sign test has 0.125 for 4 of 4 either way, 0.0039 for 9 of 9.
    assert [better(more) for more in (1, 4, 9)] == [False, False, True]


def test_scores_above_one_are_taken_as_they_are() -> None:
    scores = [[4.0, 6.0] * 10, [1.0, 3.0] * 10]
    found = measured(grid(POINTS, scores, np.ones((2, 20)), best=10.0))
    assert found.accuracy.tolist() == [5.0, 2.0] and found.best == 10.0
    assert [(found.accuracy_p_values(at) <= 0.05).tolist() for at in (0, 1)] == [[False, True], [False, False]]


def test_the_same_seed_draws_the_same() -> None:
    made = grid(POINTS, [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]], [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]])
    np.testing.assert_allclose(measured(made).cost_draws, measured(made).cost_draws, rtol=1e-12)
