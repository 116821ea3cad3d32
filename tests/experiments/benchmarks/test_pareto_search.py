"""The replay and its judgement, on numbers made by hand."""

import numpy as np
import pytest

from experiment_core_utils.sweep.front_search import SearchResult, SearchRules, Survivor
from experiments.analyses.recorded_table import RecordedTable
from experiments.benchmarks.pareto_search import (
    compare_fronts,
    made_up_table,
    replay,
)


def found(*front: str) -> SearchResult:
    standings = tuple(Survivor(key, 10, 0.5, 1.0, ()) for key in front)
    return SearchResult(standings, (), (), (), (), 3.0, 9.0, ({},), "budget")


def by_hand() -> RecordedTable:
    """20 samples of own pictures: a and b are right on 10, b is slower; c on all, d on 19 and a bit faster; e never."""
    scores = np.array([[1.0] * 10 + [0.0] * 10, [1.0] * 10 + [0.0] * 10, [1.0] * 20, [1.0] * 19 + [0.0], [0.0] * 20])
    jitter = np.tile([0.99, 1.01], 10)
    seconds = np.array([1.0, 2.0, 3.0, 2.99, 0.5])[:, None] * jitter
    pictures = tuple(f"p{at}" for at in range(20))
    return RecordedTable(tuple("abcde"), tuple(range(20)), pictures, scores, seconds, seconds, 1.0, {})


def test_what_counts_as_found() -> None:
    # By means the front is e, a, d, c (b is as accurate as a and slower).
    whole = compare_fronts(by_hand(), found("a", "c", "d", "e"))
    assert (whole.points, whole.lost, whole.lost_paired, whole.gap, whole.wrong) == (4, (), (), 0.0, 0)
    # d stands for c, with which it agrees within the intervals; c is a little slower than d by every sample.
    assert compare_fronts(by_hand(), found("a", "d", "e")).lost == ()
    assert compare_fronts(by_hand(), found("a", "d", "e")).gap == pytest.approx(0.05)
    # Without a nobody as fast is as accurate: e is 0.5 below.
    lost = compare_fronts(by_hand(), found("c", "d", "e"))
    assert (lost.lost, lost.lost_paired, lost.gap) == (("a",), ("a",), 0.5)
    # b is beaten by c? c is slower. By a: as accurate, not better by more than chance, so not shown.
    assert compare_fronts(by_hand(), found("a", "b", "c", "d", "e")).wrong == 0
    assert compare_fronts(by_hand(), found("a")).share == pytest.approx(3.0 / by_hand().costs.sum())


def test_a_setting_that_the_full_run_shows_to_be_dominated_is_counted() -> None:
    table = by_hand()
    table.seconds[1] = 4 * table.seconds[3]
    assert compare_fronts(table, found("a", "b", "c", "d", "e")).wrong == 1


def test_the_replay_keeps_to_its_budget_and_finds_the_front_of_a_made_up_grid() -> None:
    table = made_up_table(300, seed=1)
    assert len(table.settings) == 60
    for seed in (0, 1):
        result = compare_fronts(table, replay(table, SearchRules(), seed))
        assert result.share <= 1 / 3
        assert not result.lost
