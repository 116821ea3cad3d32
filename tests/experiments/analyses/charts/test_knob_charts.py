"""Figures of many values: what is named, and that there is room for all of it."""

import warnings
from pathlib import Path

from experiments.analyses.charts.chart import Axis, Dots, Line, Panel
from experiments.analyses.charts.knob_charts import coupling_chart, fronts_chart
from experiments.analyses.charts.matplotlib_charts import figure_of, save_figure
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


def ticks_of(axis: Axis) -> list[str]:
    assert axis.ticks is not None
    return list(axis.ticks.values())


def labels_of(panel: Panel) -> list[str]:
    return [label for mark in panel.marks if isinstance(mark, Dots) for label in mark.labels if label]


def test_some_of_many_values_are_named_so_that_there_is_room(tmp_path: Path) -> None:
    chart = coupling_chart(analysis(40, 1.0))
    held, lost = chart.panels
    names = [mark.name for mark in held.marks if isinstance(mark, Line) and mark.name is not None]
    # That of all knobs free, and twelve of forty.
    assert len(names) == 13 and names[:2] == ["all knobs free", "vision 288 tokens"]
    assert ticks_of(lost.x) == [f"{288 + at} tokens" for at in (0, 13, 26, 39)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_figure(figure_of(chart, "caption"), tmp_path, "coupling")


def test_settings_at_one_place_have_one_name() -> None:
    (panel,) = fronts_chart([analysis(3, 0.0)]).panels
    assert labels_of(panel) == ["tokens288_topk1_blocks12 and 2 equal"]
    (panel,) = fronts_chart([analysis(40, 1.0)]).panels
    assert len(labels_of(panel)) == 30


def test_accuracy_ends_at_its_best_score() -> None:
    (panel,) = fronts_chart([analysis(40, 1.0)]).panels
    assert panel.y.title == "accuracy" and panel.y.limits is not None and panel.y.limits[1] == 1.05
