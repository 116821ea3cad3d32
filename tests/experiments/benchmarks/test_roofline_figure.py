"""The roofline: ways that take the same time are all visible, and cases are distinguishable."""

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb

from experiments.analyses.charts.chart import Chart, Dots
from experiments.analyses.charts.matplotlib_charts import figure_of
from experiments.benchmarks.execution_table import COLOURS, Rates, Work, roofline_chart

WAYS, CASES = ("generate", "eager", "graph"), ("top-k 8", "top-k 1")
RATES = Rates(1e9, 1e12)


def described() -> Chart:
    """Two stages of two cases, which take every way a millisecond."""
    work = {"vision": Work(2e6, 1e4), "decode": Work(1e6, 1e6)}
    rows = [
        {"case": case, "way": way, "vision_ms": 1.0, "prefill_ms": None, "decode_ms": 1.0}
        for case in CASES
        for way in WAYS
    ]
    return roofline_chart(rows, dict.fromkeys(CASES, work), RATES)


def dots_of(chart: Chart) -> list[Dots]:
    """The marks of measured stages; those without places are in the legend only."""
    return [mark for mark in chart.panels[0].marks if isinstance(mark, Dots) and mark.name is None]


def test_ways_in_the_same_place_are_all_seen() -> None:
    figure = figure_of(described(), "caption")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    box = figure.axes[0].get_window_extent()
    picture = np.asarray(canvas.buffer_rgba())[::-1, :, :3]
    inside = picture[int(box.y0) : int(box.y1), int(box.x0) : int(box.x1)]
    seen = [
        int((inside == np.round(255 * np.array(to_rgb(colour)))).all(axis=-1).sum()) for colour in COLOURS[: len(WAYS)]
    ]
    assert min(seen) > 20, seen


def test_cases_have_sizes_of_their_own_and_all_are_named() -> None:
    chart = described()
    (legend,) = figure_of(chart, "caption").legends
    # No prefill was run.
    assert [text.get_text() for text in legend.get_texts()] == [*WAYS, "vision", "decode", *CASES]
    marks = dots_of(chart)
    sizes = [mark.size for mark in marks]
    assert len(marks) == len(WAYS) * len(CASES) * 2
    assert set(sizes[: len(marks) // 2]) == {13.8} and set(sizes[len(marks) // 2 :]) == {5.0}
    assert {mark.symbol for mark in marks} == {"open square", "open triangle"}


def test_a_marker_is_at_the_measured_value() -> None:
    """2e6 operations of 200 a byte in a millisecond are 2e9 a second; of three ways the middle one is at its place."""
    vision = [mark for mark in dots_of(described()) if mark.symbol == "open square"][: len(WAYS)]
    np.testing.assert_allclose([mark.y for mark in vision], [[2e-3]] * 3)
    np.testing.assert_allclose([mark.x for mark in vision], [[200 / 1.12], [200], [200 * 1.12]])
