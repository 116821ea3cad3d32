"""Fronts, hypervolumes and what is sure of them, by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.primitives.statistics import bounded_mean_interval, on_front
from experiment_core_utils.sweep.front_search import Survivor, front_of
from experiments.analyses.knobs.fronts import (
    Front,
    _dominators,
    area,
    areas,
    areas_beside_slower,
    compare_tasks,
    front,
    hypervolume,
    reference_cost_of,
    scored_area,
)
from experiments.analyses.knobs.objectives import LATENCY_P95
from experiments.analyses.recorded_table import read_table
from tests.experiments.hand_made_grid import grid, measured, point

figures = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12)


@given(figures)
def test_the_front_alone_has_the_hypervolume_of_all(found: list[tuple[int, int]]) -> None:
    cost, accuracy = np.array(found, dtype=float).T
    is_on = on_front(cost, accuracy)
    assert area(cost, accuracy, 7.0) == pytest.approx(float(area(cost[is_on], accuracy[is_on], 7.0)))


def test_the_hypervolume_is_the_area_under_the_steps() -> None:
    # From 1 to 3 at 0.5, from 3 to 10 at 0.8: 1.0 + 5.6. The third is below the steps.
    cost, accuracy = np.array([3.0, 1.0, 4.0]), np.array([0.8, 0.5, 0.6])
    assert float(area(cost, accuracy, 10.0)) == pytest.approx(6.6)
    # Up to 2 only the first step is there; up to 1 nothing.
    assert float(area(cost, accuracy, 2.0)) == pytest.approx(0.5)
    assert float(area(cost, accuracy, 1.0)) == 0.0


def test_a_budgets_setting_may_be_counted_with_another_accuracy() -> None:
    # Chosen: the first from 1 to 3, the second from 3 to 5, never the third; counted 0.4 and 0.1: 0.8 + 0.2.
    cost, accuracy = np.array([1.0, 3.0, 4.0]), np.array([0.5, 0.8, 0.8])
    chosen, counted = scored_area(cost, accuracy, np.array([0.4, 0.1, 0.9]), 5.0)
    # By its own accuracy: 2 at 0.5 and 2 at 0.8.
    assert (float(chosen), float(counted)) == (pytest.approx(2.6), pytest.approx(1.0))


def clear_cut() -> list[list[float]]:
    """30 samples: 6 right, 15 right, 24 right, and 6 right at the highest cost."""
    return [[1.0] * right + [0.0] * (30 - right) for right in (6, 15, 24, 6)]


def times(*ms: float) -> np.ndarray:
    """30 samples a setting, between 5 % less and 5 % more than each."""
    return np.outer(ms, np.linspace(0.95, 1.05, 30))


POINTS = [point(vision, top_k) for vision in ("low", "high") for top_k in (1, 2)]


def test_clear_differences_are_established_and_the_rest_dominated() -> None:
    found = front(measured(grid(POINTS, clear_cut(), times(10, 20, 30, 40))))
    assert [each.status for each in found.points] == ["established"] * 3 + ["dominated"]
    assert [each.probability for each in found.points] == [1.0, 1.0, 1.0, 0.0]
    # Accuracy 0.8 dominates at the least cost, though all three do.
    assert found.points[3].dominated_by == POINTS[2].key and found.points[0].dominated_by is None
    # 1.1 x 40 = 44: 0.2 x 10 + 0.5 x 10 + 0.8 x 14.
    assert found.reference_cost == pytest.approx(44.0)
    assert found.hypervolume.value == pytest.approx(18.2)
    assert found.hypervolume.mean_accuracy == pytest.approx(18.2 / 44)


def test_one_answer_more_is_noise_and_says_against_what() -> None:
    scores = [[1.0] * 15 + [0.0] * 15, [1.0] * 16 + [0.0] * 14]
    found = front(measured(grid(POINTS[:2], scores, times(10, 20))))
    assert [each.on_front for each in found.points] == [True, True]
    # The cheaper one is confidently cheaper; the other is better by one answer of 30.
    assert [each.status for each in found.points] == ["established", "within_noise"]
    assert found.points[1].not_better_than == (POINTS[0].key,)
    # It is on the front where a draw holds the 16th sample: 1 - (29/30)^30 = 0.638.
    assert found.points[1].probability == pytest.approx(0.638, abs=0.08)


def test_a_setting_that_is_often_on_the_front_is_possible() -> None:
    # Right 15 times each, on different samples: the dearer one is ahead in nearly half of the draws.
    scores = [[1.0] * 15 + [0.0] * 15, [0.0] * 15 + [1.0] * 15]
    found = front(measured(grid(POINTS[:2], scores, times(10, 20))))
    assert [each.status for each in found.points] == ["established", "possible"]
    assert 0.3 < found.points[1].probability < 0.5


@pytest.mark.parametrize(("drift", "status"), [(0.15, "dominated"), (0.25, "possible")])
def test_a_latency_that_drift_can_make_dominates_nothing(drift: float, status: str) -> None:
    # The same answers, 10 and 12 ms: without drift the second is never on the front.
    same = [1.0] * 15 + [0.0] * 15
    found = front(measured(grid(POINTS[:2], [same, same], times(10, 12), drift=drift)))
    assert (found.points[1].status, found.points[1].probability) == (status, 0.0)
    assert found.points[1].drift_probability == (1.0 if status == "possible" else 0.0)


def test_twins_are_both_on_the_front_and_noise_to_each_other() -> None:
    same = [1.0] * 15 + [0.0] * 15
    found = front(measured(grid(POINTS[:2], [same, same], times(10, 10))))
    assert [each.status for each in found.points] == ["within_noise"] * 2


def test_a_percentile_of_few_pictures_gives_no_verdict() -> None:
    made = grid(POINTS[:2], [[1.0] * 15 + [0.0] * 15] * 2, times(10, 20))
    tail, mean = measured(made, LATENCY_P95), measured(made)
    assert tail.no_verdict == "P95 of end-to-end latency needs 86 pictures for a verdict and has 30"
    assert mean.no_verdict is None
    assert [each.status for each in front(mean).points] == ["established", "dominated"]
    # Twice as slow on every sample, but a P95 has neither a verdict nor an interval.
    assert [(each.status, each.cost_ci95) for each in front(tail).points] == [
        ("within_noise", None),
        ("possible", None),
    ]


def test_among_more_settings_the_same_difference_says_less() -> None:
    # 1 ms more, 1.468 either way: t = sqrt(19) / 1.468 = 2.969 of 19, p = 0.0039, twice that for accuracy or cost.
    alike = np.outer([10.0, 11.0], np.ones(20))
    alike[1] += np.tile([1.468, -1.468], 10)
    slow = np.full((8, 20), 30.0)
    points = [point("low", top_k, blocks) for top_k in (1, 2) for blocks in range(1, 6)]
    scores = np.tile([1.0, 0.0], (10, 10))
    few, many = (
        front(measured(grid(points[: len(rows)], scores[: len(rows)], rows)))
        for rows in (alike, np.concatenate([alike, slow]))
    )
    assert few.points[0].p_value == many.points[0].p_value == pytest.approx(0.0079, abs=1e-4)
    # 0.025 / 2 for the first of two settings, 0.025 / 10 for the first of ten.
    assert (few.points[0].status, many.points[0].status) == ("established", "within_noise")
    assert many.points[0].not_better_than == (points[1].key,)


def test_an_accuracy_has_the_interval_of_every_accuracy() -> None:
    (only,) = front(measured(grid(POINTS[:1], [[1.0] * 10 + [0.0] * 6], [[10.0] * 16]))).points
    assert only.accuracy_ci95 == pytest.approx(bounded_mean_interval([1.0] * 10 + [0.0] * 6))
    assert only.accuracy_ci95 == pytest.approx((0.3543, 0.8480), abs=1e-4)


def test_a_single_setting_is_its_front() -> None:
    found = front(measured(grid(POINTS[:1], [[1.0, 0.0]], [[10.0, 20.0]])))
    assert [(each.status, each.probability) for each in found.points] == [("established", 1.0)]
    # Mean 15 ms: 0.5 x (16.5 - 15).
    assert found.hypervolume.value == pytest.approx(0.75)


def test_all_settings_without_a_right_answer_have_no_hypervolume() -> None:
    found = front(measured(grid(POINTS[:2], np.zeros((2, 30)), times(10, 20))))
    assert found.hypervolume.value == 0.0
    assert [each.status for each in found.points] == ["established", "dominated"]


def test_unseen_samples_take_the_luck_out_of_the_hypervolume() -> None:
    # 12 settings of the same time and of coin tosses: the best one is so by luck.
    scores = np.random.default_rng(3).random((12, 40)) < 0.5
    points = [point("low", top_k, blocks) for top_k in (1, 2, 4, 8) for blocks in (12, 14, 16)]
    found = measured(grid(points, scores.astype(float), np.full((12, 40), 10.0)))
    volume = hypervolume(found, np.arange(12))
    assert volume.unseen is not None
    per_cost = reference_cost_of(found) - 10.0
    assert volume.value / per_cost == pytest.approx(scores.mean(axis=1).max())
    # Nearer to the truth, 0.5, by more than half.
    assert volume.unseen / per_cost - 0.5 < (volume.value / per_cost - 0.5) / 2


@pytest.mark.parametrize("members", [[1], [0, 2, 3], [0, 1, 2, 3]])
def test_areas_of_members_beside_slower_others_are_those_of_all_at_those_costs(members: list[int]) -> None:
    found = measured(grid(POINTS, clear_cut(), times(10, 20, 30, 40), drift=0.2))
    others = [at for at in range(4) if at not in members]
    slower = found.cost_draws.copy()
    slower[:, others] *= 1.2
    as_slow = replace(found, cost_draws=slower)
    expected = areas(as_slow, np.arange(4))[2]
    parts = [np.array(each) for each in (members, others) if each]
    assert areas_beside_slower(found, parts)[0] == pytest.approx(expected, rel=1e-12, nan_ok=True)
    # Of the members alone, in order of cost, as if they were a grid of their own.
    part = areas(found, np.array(members))
    own = replace(found, cost_draws=found.cost_draws[:, members], accuracy_draws=found.accuracy_draws[:, members])
    assert part[1] == pytest.approx(area(own.cost_draws, own.accuracy_draws, reference_cost_of(found)), rel=1e-12)


def test_a_dominator_is_the_cheapest_of_the_most_accurate_that_cost_no_more() -> None:
    # The first has none but itself; of the equal third and fourth the third counts.
    cost, accuracy = np.array([5.0, 20.0, 10.0, 10.0, 12.0]), np.array([0.5, 0.5, 0.8, 0.8, 0.8])
    assert _dominators(cost, accuracy).tolist() == [0, 2, 2, 2, 2]


def compared(*statuses: tuple[list[list[float]], list[float]]) -> dict[str, Front]:
    return {f"task{n}": front(measured(grid(POINTS[:2], s, times(*t)))) for n, (s, t) in enumerate(statuses)}


def test_tasks_differ_where_a_setting_is_on_one_front_only() -> None:
    low, high = [1.0] * 6 + [0.0] * 24, [1.0] * 24 + [0.0] * 6
    # The dearer setting pays for the first task, not at all for the second.
    (only,) = compare_tasks(compared(([low, high], [10, 20]), ([low, low], [10, 20])))
    assert only.key == POINTS[1].key and only.difference == "established"
    assert only.statuses == {"task0": "established", "task1": "dominated"}
    # With one answer more instead, it is on the first front by noise only.
    one_more = [1.0] * 7 + [0.0] * 23
    (only,) = compare_tasks(compared(([low, one_more], [10, 20]), ([low, low], [10, 20])))
    assert only.difference == "within_noise"
    assert compare_tasks(compared(([low, high], [10, 20]), ([low, high], [10, 20]))) == []


def test_a_measured_grid_has_the_front_that_the_search_is_compared_with() -> None:
    table = read_table(REPOSITORY / "docs" / "core_exp" / "pareto_table.json")
    accuracy, seconds = table.scores.mean(axis=1), table.seconds.mean(axis=1)
    standings = [
        Survivor(key, len(table.sample_ids), float(accuracy[at]), float(seconds[at]), ())
        for at, key in enumerate(table.settings)
    ]
    expected = {each.key for each in front_of(standings)}
    is_on = on_front(seconds, accuracy)
    assert {key for key, on in zip(table.settings, is_on, strict=True) if on} == expected
