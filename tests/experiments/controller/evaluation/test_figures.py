"""The figure of an evaluation: policies in the same place are all to be seen."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from experiments.analyses.charts.chart import Band, Chart, Line
from experiments.analyses.charts.matplotlib_charts import figure_of
from experiments.controller.evaluation.figures import evaluation_chart
from experiments.controller.evaluation.record import BEST_STATIC, Budget, Evaluation, evaluate
from experiments.controller.evaluation.replay import best_static, replay, requests_in
from experiments.controller.lookup import build
from tests.experiments.controller.hand_made_requests import grid

BUDGETS = (0.15, 0.25, 0.35, 0.5, 0.7, 1.0)
# As many as there can be.
SAME = (BEST_STATIC, "random", "lookup_mean", "lookup_guardrail", "two_stage", "oracle")


def coinciding(names: tuple[str, ...]) -> Evaluation:
    """Policies that all choose what the lookup does."""
    found = grid()
    outcome = replay(build(found), found, BUDGETS)
    budgets = [Budget(seconds, True, 1.0) for seconds in BUDGETS]
    return evaluate("replay", [replace(outcome, name=name) for name in names], requests_in(found), budgets, None, ())


def described(names: tuple[str, ...]) -> Chart:
    found = grid()
    return evaluation_chart(coinciding(names), found.total_s.mean(axis=1), found.shares.mean(axis=1))


def lines_of(chart: Chart, panel: int) -> list[Line]:
    return [mark for mark in chart.panels[panel].marks if isinstance(mark, Line) and mark.name]


def pixels_of(figure: Figure, panel: int, colour: str) -> int:
    """How many pixels of a panel have exactly the colour; smoothed edges have others."""
    figure.set_dpi(250)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    box = figure.axes[panel].get_window_extent()
    picture = np.asarray(canvas.buffer_rgba())[::-1, :, :3]
    inside = picture[int(box.y0) : int(box.y1), int(box.x0) : int(box.x1)]
    return int((inside == np.round(255 * np.array(to_rgb(colour)))).all(axis=-1).sum())


@pytest.mark.parametrize("names", [("lookup_mean", "two_stage"), SAME])
@pytest.mark.parametrize("panel", [1, 2])
def test_lines_in_the_same_place_are_all_seen(names: tuple[str, ...], panel: int) -> None:
    chart = described(names)
    figure = figure_of(chart, "caption")
    seen = {line.name: pixels_of(figure, panel, line.colour) for line in lines_of(chart, panel)}
    assert len(seen) == len(names) and min(seen.values()) > 30, seen


def test_each_policy_is_drawn_over_the_one_before_it_thinner_and_in_a_colour_of_its_own() -> None:
    assert best_static(grid(), BUDGETS).name == SAME[0]
    lines = lines_of(described(SAME), 0)
    assert [line.name for line in lines] == [name.replace("_", " ") for name in SAME]
    for values in ([line.width for line in lines], [line.size for line in lines]):
        assert values == sorted(set(values), reverse=True)
    assert len({line.colour for line in lines}) == len(SAME)


def test_budgets_that_no_setting_meets_are_shaded_half_way_to_the_next() -> None:
    found = coinciding(("two_stage",))
    budgets = tuple(replace(each, meetable=each.seconds > 0.2) for each in found.budgets)
    _, in_time, violations = evaluation_chart(replace(found, budgets=budgets), (), ()).panels
    for panel in (in_time, violations):
        shade = panel.marks[0]
        # 150 and 250 ms; the axis leaves 5 % of 850 ms free below 150 ms.
        assert isinstance(shade, Band) and shade.x == pytest.approx((107.5, 200.0))
