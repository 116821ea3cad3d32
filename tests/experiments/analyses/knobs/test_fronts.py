"""Fronts, hypervolumes and what is sure of them, by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.primitives.statistics import bounded_mean_interval, on_front
from experiments.analyses.knobs.analysis import analyse_knobs
from experiments.analyses.knobs.conclusion import conclude
from experiments.analyses.knobs.conclusion import front_words as conclusion_words
from experiments.analyses.knobs.fronts import (
    Front,
    _dominators,
    area,
    compare_tasks,
    front,
    front_words,
    hypervolume,
    reference_cost_of,
    scored_area,
)
from experiments.analyses.knobs.grid import grid_of_table
from experiments.analyses.knobs.objectives import LATENCY_MEAN, LATENCY_P95
from experiments.analyses.recorded_table import read_table
from tests.experiments.hand_made_grid import grid, measured, point
from tests.hand_made_replication import with_variance

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
    assert [each.word for each in found.points] == ["yes"] * 3 + ["no"]
    # Accuracy 0.8 dominates at the least cost, though all three do.
    assert found.points[3].dominated_by == POINTS[2].key and found.points[0].dominated_by is None
    # Of the two that are cheaper and more accurate, 9 and 18 answers of 30, the second is the surer one.
    assert found.points[3].surely_dominated_by == POINTS[2].key and found.points[0].surely_dominated_by is None
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
    assert [each.word for each in found.points] == ["yes", "can't tell"]


def test_a_setting_that_may_be_more_accurate_is_possible() -> None:
    # Right 15 times each, on different samples.
    scores = [[1.0] * 15 + [0.0] * 15, [0.0] * 15 + [1.0] * 15]
    found = front(measured(grid(POINTS[:2], scores, times(10, 20))))
    assert [each.status for each in found.points] == ["established", "possible"]
    assert (found.points[1].word, found.points[1].p_value) == ("can't tell", 1.0)
    assert found.points[1].surely_dominated_by is None


@pytest.mark.parametrize(("std", "status"), [(0.01, "dominated"), (0.3, "possible")])
def test_a_latency_that_may_be_the_machine_dominates_nothing(std: float, status: str) -> None:
    # 24 and 6 right of 30, 10 and 12 ms, of settings that were measured one after another.
    scores = [[1.0] * right + [0.0] * (30 - right) for right in (24, 6)]
    variance = with_variance(std**2, 20, 2)
    found = front(measured(grid(POINTS[:2], scores, times(10, 12), variance=variance)))
    assert found.points[1].status == status
    assert found.ties == (((POINTS[0].key,), (POINTS[1].key,)) if std == 0.01 else ((POINTS[0].key, POINTS[1].key),))


def test_twins_are_both_on_the_front_and_noise_to_each_other() -> None:
    same = [1.0] * 15 + [0.0] * 15
    found = front(measured(grid(POINTS[:2], [same, same], times(10, 10))))
    assert [each.status for each in found.points] == ["within_noise"] * 2


def test_a_percentile_of_few_pictures_gives_no_verdict() -> None:
    made = grid(POINTS[:2], [[1.0] * 15 + [0.0] * 15] * 2, times(10, 20))
    tail, mean = measured(made, LATENCY_P95), measured(made)
    assert tail.no_verdict == "P95 of end-to-end latency needs 86 pictures for a verdict and has 30"
    assert mean.no_verdict is None
    assert [each.status for each in front(mean).points] == ["established", "possible"]
    # Twice as slow on every sample, but a P95 has neither a verdict nor an interval.
    assert [(each.status, each.cost_ci95) for each in front(tail).points] == [
        ("within_noise", None),
        ("possible", None),
    ]


def test_among_more_settings_the_same_difference_says_less() -> None:
    # 10 % more, with a spread that is as large: t = 0.0953 / (0.0953 / 2.9) of 20.
    random = np.random.default_rng(1)
    spread = np.tile([1.0, -1.0], 10) * np.log(1.1) * np.sqrt(19) / 2.9
    close = 10.0 * np.exp(np.stack([np.zeros(20), np.log(1.1) + spread]))
    slow = 30.0 * np.exp(0.1 * random.normal(size=(8, 20)))
    points = [point("low", top_k, blocks) for top_k in (1, 2) for blocks in range(1, 6)]
    scores = np.tile([1.0, 0.0], (10, 10))
    few, many = (
        front(measured(grid(points[: len(rows)], scores[: len(rows)], rows)))
        for rows in (close, np.concatenate([close, slow]))
    )
    # Twice the p-value, since it may be better in accuracy or in cost.
    assert 2 * stats.t.sf(2.9, 19) < few.points[0].p_value < 0.05 < many.points[0].p_value
    assert (few.points[0].status, many.points[0].status) == ("established", "within_noise")
    assert many.points[0].not_better_than == (points[1].key,)
    assert many.ties is not None and many.ties[0] == (points[0].key, points[1].key)


def test_every_setting_of_a_front_can_be_established() -> None:
    # Twelve settings, each a tenth dearer than the one before and right on 20 more of 300 answers.
    points = [point("low", top_k, blocks) for top_k in (1, 2) for blocks in range(1, 7)]
    scores = np.array([np.arange(300) < 20 * (at + 1) for at in range(12)], dtype=float)
    noise = 0.05 * np.random.default_rng(2).normal(size=(12, 300))
    found = front(measured(grid(points, scores, np.outer(1.1 ** np.arange(12), np.ones(300)) * np.exp(noise))))
    assert [each.status for each in found.points] == ["established"] * 12
    assert found.ties == tuple((each.key,) for each in found.points)


def test_an_accuracy_has_the_interval_of_every_accuracy() -> None:
    (only,) = front(measured(grid(POINTS[:1], [[1.0] * 10 + [0.0] * 6], [[10.0] * 16]))).points
    assert only.accuracy_ci95 == pytest.approx(bounded_mean_interval([1.0] * 10 + [0.0] * 6))
    assert only.accuracy_ci95 == pytest.approx((0.3543, 0.8480), abs=1e-4)


def test_a_single_setting_is_its_front() -> None:
    found = front(measured(grid(POINTS[:1], [[1.0, 0.0]], [[10.0, 20.0]])))
    assert [(each.status, each.word) for each in found.points] == [("established", "yes")]
    # Mean 15 ms: 0.5 x (16.5 - 15).
    assert found.hypervolume.value == pytest.approx(0.75)


def test_all_settings_without_a_right_answer_have_no_hypervolume() -> None:
    found = front(measured(grid(POINTS[:2], np.zeros((2, 30)), times(10, 20))))
    assert found.hypervolume.value == 0.0
    # The faster one is surely so; that neither is ever right, 30 samples do not show to 0.02.
    assert [each.word for each in found.points] == ["yes", "can't tell"]


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


def test_a_dominator_is_the_cheapest_of_the_most_accurate_that_cost_no_more() -> None:
    # The first has none but itself; of the equal third and fourth the third counts.
    cost, accuracy = np.array([5.0, 20.0, 10.0, 10.0, 12.0]), np.array([0.5, 0.5, 0.8, 0.8, 0.8])
    assert _dominators(cost, accuracy).tolist() == [0, 2, 2, 2, 2]


def compared(*statuses: tuple[list[list[float]], list[float]]) -> dict[str, Front]:
    return {f"task{n}": front(measured(grid(POINTS[:2], s, times(*t)))) for n, (s, t) in enumerate(statuses)}


def test_tasks_differ_where_a_setting_is_on_one_front_only() -> None:
    low, high = [1.0] * 6 + [0.0] * 24, [1.0] * 24 + [0.0] * 6
    # The dearer setting pays for the first task, and loses in the second.
    (only,) = compare_tasks(compared(([low, high], [10, 20]), ([high, low], [10, 20])))
    assert only.key == POINTS[1].key and only.difference == "established"
    assert only.statuses == {"task0": "established", "task1": "dominated"}
    assert only.words == {"task0": "yes", "task1": "no"}
    # With one answer more instead, it is on the first front by noise only.
    one_more = [1.0] * 7 + [0.0] * 23
    (only,) = compare_tasks(compared(([low, one_more], [10, 20]), ([low, low], [10, 20])))
    assert only.difference == "within_noise"
    assert compare_tasks(compared(([low, high], [10, 20]), ([low, high], [10, 20]))) == []


def test_the_same_answers_are_a_no_where_samples_are_enough_for_the_margin() -> None:
    """Twice as slow with the same answers: no change in n has the p-value 0.98^n / 2, which counts twice for the family
    of one pair in both directions, and twice since the time is tested, too: 4 * 0.98^n / 2 <= 0.05 from 183 on.
    """
    words = []
    for number in (150, 220):
        scores = np.tile(np.arange(number) < number // 2, (2, 1)).astype(float)
        words.append(
            front_words(measured(grid(POINTS[:2], scores, np.outer((20.0, 10.0), np.linspace(1, 1.1, number)))))
        )
    assert words == [["can't tell", "yes"], ["no", "yes"]]


def test_no_may_be_said_of_a_setting_that_is_ahead_by_less_than_the_margin() -> None:
    """One answer of 2,000 more for twice the time: on the front by the figures, and nobody's choice."""
    scores = np.tile(np.arange(2000) < 1000, (2, 1)).astype(float)
    scores[0, 1500] = 1.0
    dear, cheap = front(measured(grid(POINTS[:2], scores, np.outer((20.0, 10.0), np.ones(2000))))).points[::-1]
    assert (dear.on_front, dear.word, dear.status) == (True, "no", "dominated")
    assert dear.surely_dominated_by == cheap.key and cheap.word == "yes"


@pytest.mark.parametrize(
    ("num_samples", "num_settings", "loss", "changed"), [(52, 8, 0.01, 0.06), (52, 8, 0.03, 0.1), (52, 12, 0.005, 0.06)]
)
def test_the_most_accurate_setting_is_hardly_ever_called_off_the_front(
    num_samples: int, num_settings: int, loss: float, changed: float
) -> None:
    """In none or one of 20 runs, and in nearly all where the word was a share of draws; the rivals are all faster."""
    generator, wrong = np.random.default_rng(5), 0
    points = [point("low", 1 + at // 6, 1 + at % 6) for at in range(num_settings)]
    for _ in range(20):
        own = generator.random(num_samples) < 0.8
        chances = generator.random((num_settings - 1, num_samples))
        rivals = np.where(own, chances >= (changed + loss) / 1.6, chances < (changed - loss) / 0.4)
        scores = np.vstack([rivals[:2], own, rivals[2:]]).astype(float)
        ms = np.concatenate([[80.0, 85.0, 100.0], np.linspace(60, 95, num_settings - 3)])
        noise = 0.04 * generator.normal(size=scores.shape)
        made = grid(points, scores, ms[:, None] * np.exp(noise))
        wrong += front_words(measured(made, num_draws=2))[2] == "no"
    assert wrong <= 1


@pytest.mark.parametrize("name", ["pareto_table.json", "pareto_table_knowledge.json"])
def test_front_and_conclusion_answer_alike_whether_the_reference_can_be_replaced(name: str) -> None:
    (analysis,) = analyse_knobs(
        [grid_of_table(read_table(REPOSITORY / "docs" / "core_exp" / name))], (LATENCY_MEAN,), num_draws=2
    ).tasks
    concluded, words = conclude(analysis), conclusion_words(analysis)
    assert concluded.is_reference and concluded.against is not None and concluded.word == "can't tell"
    assert words[concluded.against] == "can't tell" and "yes" not in words.values()


def test_a_measured_grid_has_the_front_that_the_search_is_compared_with() -> None:
    table = read_table(REPOSITORY / "docs" / "core_exp" / "pareto_table.json")
    accuracy, seconds = table.scores.mean(axis=1), table.seconds.mean(axis=1)
    means = list(zip(seconds, accuracy, strict=True))
    expected = {
        key
        for key, own in zip(table.settings, means, strict=True)
        if not any(other != own and other[0] <= own[0] and other[1] >= own[1] for other in means)
    }
    is_on = on_front(seconds, accuracy)
    assert {key for key, on in zip(table.settings, is_on, strict=True) if on} == expected
