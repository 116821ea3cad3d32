"""E2 of one grid and of two."""

from dataclasses import replace

import numpy as np

from experiments.analyses.knobs.analysis import analyse_knobs
from experiments.analyses.knobs.objectives import ENERGY, LATENCY_MEAN, NoObjectives
from tests.experiments.hand_made_grid import grid, point

POINTS = (point("low", 1, 3), point("high", 1, 3))


def test_tasks_are_compared_where_there_are_several() -> None:
    # `high` is right more often and takes longer: both are on the front. For the other task it is not: off it.
    one = grid(POINTS, np.array([[0.0] * 10, [1.0] * 10]), np.array([[1.0] * 10, [2.0] * 10]))
    other = replace(one, task="words", scores=one.scores[::-1])
    alone, both = (analyse_knobs(grids, (LATENCY_MEAN, ENERGY), num_draws=100) for grids in ([one], [one, other]))
    assert alone.differences == {} and len(alone.tasks) == 1
    assert isinstance(alone.tasks[0].fronts[1], NoObjectives)
    assert [point.on_front for point in alone.tasks[0].fronts[0].front.points] == [True, True]
    assert [each.key for each in both.differences["latency_mean"]] == [POINTS[1].key]
    assert both.differences["energy"] == []
