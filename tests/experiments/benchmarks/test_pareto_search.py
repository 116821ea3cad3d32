"""The replay and what it is compared by, on numbers made by hand."""

import numpy as np
import pytest

from experiment_core_utils.primitives.statistics import on_front
from experiments.analyses.recorded_table import RecordedTable
from experiments.benchmarks.pareto_search import Grid, RuleOutcome, outcome, outcomes


def by_hand() -> Grid:
    """60 samples of own pictures: a is right on half, b too and slower, c on all and slowest, d never and quickest."""
    scores = np.array([[1.0, 0.0] * 30, [1.0, 0.0] * 30, [1.0] * 60, [0.0] * 60])
    seconds = np.array([1.0, 2.0, 3.0, 0.5])[:, None] * np.tile([0.99, 1.01], 30)
    pictures = tuple(f"p{at}" for at in range(60))
    return Grid.recorded(RecordedTable(tuple("abcd"), tuple(range(60)), pictures, scores, seconds, seconds, 1.0, {}))


def test_what_a_front_is_compared_by() -> None:
    # The true front is a, c, d. Of those b stands for a, but slower: the best that is not slower is d, worse by 0.5.
    found = outcome(by_hand(), [1, 2, 3], [0], 0.3)
    assert list(vars(found).values()) == pytest.approx([2 / 3, 1 / 3, 1 / 3, 0.5 / 3, 0.3])
    assert outcome(by_hand(), [0, 2, 3], [], 1.0) == RuleOutcome(1.0, 0.0, 0.0, 0.0, 1.0)


def test_the_search_the_trivial_rule_and_all_samples() -> None:
    found = outcomes(by_hand(), seed=1)
    assert found["all samples"] == RuleOutcome(1.0, 0.0, 0.0, 0.0, 1.0)
    assert found["random third"].share == pytest.approx(1 / 3, abs=0.01)
    assert found["search"].excluded == 0.0 and found["search"].share < 0.35


def test_synthetic_grids_are_what_they_say() -> None:
    for kind, size, front in (("dominated", 60, 6), ("trade-offs", 12, 11)):
        grid = Grid.drawn(kind, 4000, seed=3)
        assert (len(grid.table.settings), on_front(grid.seconds, grid.accuracy).sum()) == (size, front)
        assert grid.table.scores.mean(axis=1) == pytest.approx(grid.accuracy, abs=0.04)
        # A factor exp(N(0, 0.25)) has mean exp(0.25^2 / 2) = 1.032.
        assert grid.table.seconds.mean(axis=1) / grid.seconds == pytest.approx(1.032, abs=0.03)


def test_the_search_beats_the_trivial_rule_where_most_settings_are_dominated() -> None:
    done = [outcomes(Grid.drawn("dominated", 100, seed), seed) for seed in range(8)]
    found = {rule: np.mean([each[rule].found for each in done]) for rule in done[0]}
    assert found["search"] > found["random third"] + 0.05
