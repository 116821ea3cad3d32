"""The roofline: ways that take the same time are all visible, and cases are distinguishable."""

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from experiments.benchmarks.execution_table import COLOURS, Rates, Work, draw_roofline

WAYS, CASES = ("generate", "eager", "graph"), ("top-k 8", "top-k 1")
RATES = Rates(1e9, 1e12)


def drawn() -> Figure:
    """Two stages of two cases, which take every way a millisecond."""
    work = {"vision": Work(2e6, 1e4), "decode": Work(1e6, 1e6)}
    rows = [
        {"case": case, "way": way, "vision_ms": 1.0, "prefill_ms": None, "decode_ms": 1.0}
        for case in CASES
        for way in WAYS
    ]
    return draw_roofline(rows, dict.fromkeys(CASES, work), RATES)


def test_ways_in_the_same_place_are_all_seen() -> None:
    figure = drawn()
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
    figure = drawn()
    (legend,) = figure.legends
    # No prefill was run.
    assert [text.get_text() for text in legend.get_texts()] == [*WAYS, "vision", "decode", *CASES]
    marks = [line for line in figure.axes[0].lines if line.get_marker() in ("s", "^")]
    sizes = [line.get_markersize() for line in marks]
    assert len(marks) == len(WAYS) * len(CASES) * 2
    assert set(sizes[: len(marks) // 2]) == {11.0} and set(sizes[len(marks) // 2 :]) == {4.0}
    assert {line.get_markerfacecolor() for line in marks} == {"none"}


def test_a_marker_is_at_the_measured_value() -> None:
    """2e6 operations of 200 a byte in a millisecond are 2e9 a second; of three ways the middle one is at its place."""
    figure = drawn()
    vision = [line for line in figure.axes[0].lines if line.get_marker() == "s"][: len(WAYS)]
    xs, ys = ([float(values[0]) for values in each] for each in zip(*(line.get_data() for line in vision), strict=True))
    np.testing.assert_allclose(ys, [2e9] * 3)
    np.testing.assert_allclose(xs, [200 / 1.12, 200, 200 * 1.12])
