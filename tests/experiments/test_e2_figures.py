"""Figures of many values: what is named, and that there is room for all of it."""

import warnings
from pathlib import Path

from experiments.analyses.charts.knob_figures import draw_coupling, draw_fronts
from experiments.analyses.charts.stage_figures import _drawn
from experiments.analyses.charts.style import save_figure
from experiments.analyses.knobs.coupling import fixed_values
from experiments.analyses.knobs.fronts import front
from experiments.analyses.knobs.records import FrontAnalysis
from tests.experiments.hand_made_grid import grid, measured, point


def analysis(points: int, ms: float) -> FrontAnalysis:
    """Settings that differ in vision, each dearer by `ms` and right once more in 40."""
    settings = [point(f"{288 + each} tokens") for each in range(points)]
    scores = [[1.0] * (each + 1) + [0.0] * (39 - each) for each in range(points)]
    times = [[100.0 + each * ms] * 40 for each in range(points)]
    found = measured(grid(settings, scores if ms else [scores[0]] * points, times), num_draws=100)
    return FrontAnalysis(found, front(found), fixed_values(found), (), ())


def test_some_of_many_values_are_named_so_that_there_is_room(tmp_path: Path) -> None:
    figure = draw_coupling(analysis(40, 1.0), "caption")
    top, bottom = figure.axes
    legend = top.get_legend()
    assert legend is not None
    # Twelve of forty, and that of all knobs free.
    assert [text.get_text() for text in legend.get_texts()][::12] == ["288 tokens", "all knobs free"]
    assert [label.get_text() for label in bottom.get_xticklabels()] == [f"{288 + at} tokens" for at in (0, 13, 26, 39)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_figure(figure, tmp_path, "coupling")


def test_settings_at_one_place_have_one_name() -> None:
    (axes,) = draw_fronts([analysis(3, 0.0)], "caption").axes
    assert [text.get_text() for text in axes.texts] == ["288 tokens k1 b12 and 2 equal"]
    (axes,) = draw_fronts([analysis(40, 1.0)], "caption").axes
    assert len(axes.texts) == 30


def test_figures_of_stages_draw_some_of_many_values_and_say_so() -> None:
    assert _drawn([("signs", "low"), ("signs", "low"), ("signs", "high")]) == (
        [("signs", "low"), ("signs", "high")],
        "",
    )
    kept, output = _drawn(("signs", f"{each} tokens") for each in range(23))
    assert kept == [("signs", f"{each} tokens") for each in range(0, 23, 2)]
    assert output == "  ·  12 of 23 values of vision drawn"
