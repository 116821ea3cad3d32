"""The figure of an evaluation: policies in the same place are all to be seen."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from experiments.controller.evaluation.figures import draw_evaluation, line_styles
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


def drawn(names: tuple[str, ...]) -> Figure:
    found = grid()
    return draw_evaluation(coinciding(names), found.total_s.mean(axis=1), found.shares.mean(axis=1), found.caption)


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
    figure = drawn(names)
    seen = {name: pixels_of(figure, panel, style["color"]) for name, style in line_styles(names).items()}
    assert min(seen.values()) > 30, seen


def test_each_policy_is_drawn_over_the_one_before_it_thinner_and_in_a_colour_of_its_own() -> None:
    assert best_static(grid(), BUDGETS).name == SAME[0]
    styles = list(line_styles(SAME).values())
    assert [each["zorder"] for each in styles] == sorted(each["zorder"] for each in styles)
    for name in ("linewidth", "markersize"):
        values = [each[name] for each in styles]
        assert values == sorted(set(values), reverse=True)
    assert len({each["color"] for each in styles}) == len({each["marker"] for each in styles}) == len(SAME)
