"""One description gives the same marks to both libraries."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from experiments.analyses.charts.chart import (
    Axis,
    Band,
    Bars,
    Chart,
    Dots,
    Line,
    Note,
    Panel,
    Rule,
    flop_unit,
    stacked_bars,
)
from experiments.analyses.charts.matplotlib_charts import figure_of
from experiments.analyses.charts.plotly_charts import plotly_of
from experiments.analyses.charts.style import ink_on

BLUE, ORANGE = "#0072B2", "#E69F00"
PANEL = Panel(
    "title",
    Axis("work (GFLOP)", limits=(1, 100), is_log=True),
    Axis("time (ms)", limits=(0, 8), is_reversed=True),
    [
        Dots([1.0, 2.0], [3.0, 4.0], BLUE, "a<b", [("x<y", "1 & 2"), ("z",)], ["p", ""], "ring",
             y_intervals=[(2.5, 3.25), (4.5, 5.0)]),
        Line([1.0, 2.0], [3.0, 4.0], ORANGE, "line", is_step=True),
        Band([1.0, 2.0], [1.0, 1.0], [2.0, 3.0], BLUE),
        Rule(5.0, False, ORANGE, "aim"),
        Note(10.0, 2.0, "here"),
    ],
)  # fmt: skip


def test_a_panel_for_the_page() -> None:
    figure = plotly_of(PANEL)
    dots, line, band, rule = figure.data
    # Texts are escaped, because plotly reads tags.
    assert dots.name == "a&lt;b" and dots.hovertext == ("<b>x&lt;y</b><br>1 &amp; 2", "<b>z</b>")
    # The second interval does not hold its value: no whisker points below it.
    assert dots.error_y.array == (0.25, 1.0) and dots.error_y.arrayminus == (0.5, 0.0)
    assert line.line.shape == "hv" and band.y == (1.0, 1.0, 3.0, 2.0) and band.fillcolor == "rgba(0,114,178,0.2)"
    assert figure.layout.xaxis.range == (0.0, 2.0) and figure.layout.yaxis.range == (8, 0)
    # The name of a line across the panel is in the legend, where it is not cut.
    assert rule.name == "aim" and rule.x == (None,)
    (note,) = figure.layout.annotations
    assert (note.x, note.y) == (1.0, 2.0)
    # "p" is to the right of its mark: 1 is in the left half of 1 to 100.
    assert dots.textposition == ("top right", "top right")


def test_numbers_of_bars_stand_behind_them_where_no_other_bar_does() -> None:
    axes = Axis(), Axis()
    alone = plotly_of(Panel("", *axes, [Bars([0], [1.8], BLUE, labels=["1.8 %"])])).data[0]
    stacked = plotly_of(Panel("", *axes, [Bars([0], [1.8], BLUE, labels=["1.8 %"], starts=[3.0])])).data[0]
    assert (alone.textposition, alone.cliponaxis, stacked.textposition) == ("outside", False, "inside")


def test_the_same_panel_for_a_file() -> None:
    figure = figure_of(Chart("name", [PANEL], footnote="of 2"), "caption")
    (axes,) = figure.axes
    assert axes.get_xlim() == (1, 100) and axes.get_ylim() == (8, 0) and axes.get_xscale() == "log"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a<b", "line", "aim"]
    assert {text.get_text() for text in axes.texts} == {"p", "here"}
    assert figure.get_supxlabel() == "caption  ·  of 2"


def test_labels_of_all_marks_of_a_panel_stand_clear_of_each_other() -> None:
    """Of a front's setting and of a reference beside it, which are marks of their own, and of one far from both."""
    front = Dots([6.1, 74.0], [0.743, 0.29], BLUE, "front", labels=["own_blocks30_format-bfloat16", "far"])
    reference = Dots([8.1], [0.735], ORANGE, "reference", labels=["own_blocks30, reference"])
    figure = figure_of(Chart("name", [Panel("", Axis(), Axis(), [front, reference])]), "")
    boxes = []
    assert isinstance(figure.canvas, FigureCanvasAgg)
    for text in figure.axes[0].texts:
        text.update_positions(figure.canvas.get_renderer())
        boxes.append(Text.get_window_extent(text))  # without its line to the dot
    assert len(boxes) == 3
    assert not [one for at, one in enumerate(boxes) for other in boxes[:at] if one.overlaps(other)]


def test_bars_stand_on_one_another_in_both() -> None:
    texts = [[(name,)] * 2 for name in ("v", "d")]
    bars = stacked_bars(["vision", "decode"], [[60.0, 97.0], [40.0, 3.0]], [BLUE, ORANGE], texts)
    panel = Panel("", Axis(), Axis(ticks={0: "low", 1: "high"}), bars)
    vision, decode = plotly_of(panel).data
    assert vision.base == (0.0, 0.0) and decode.base == (60.0, 97.0) and decode.text == ("40 %", "")
    (axes,) = figure_of(Chart("name", [panel]), "").axes
    assert [bar.get_x() for bar in axes.patches] == [0.0, 0.0, 60.0, 97.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["low", "high"]


@pytest.mark.parametrize(
    ("limits", "labels"), [((1.5, 60.0), ["2", "5", "10", "20", "50"]), ((0.05, 20.0), ["0.1", "1", "10"])]
)
def test_a_logarithmic_axis_has_plain_numbers_and_more_of_them_over_few_decades(
    limits: tuple[float, float], labels: list[str]
) -> None:
    panel = Panel("", Axis(limits=limits, is_log=True), Axis(), [Line([2.0, 10.0], [1.0, 2.0], BLUE)])
    figure = figure_of(Chart("name", [panel]), "")
    shown = [
        label.get_text()
        for place, label in zip(figure.axes[0].get_xticks(), figure.axes[0].get_xticklabels(), strict=True)
        if limits[0] <= place <= limits[1]
    ]
    assert shown == labels


def test_a_line_has_symbols_in_both() -> None:
    panel = Panel("", Axis(), Axis(), [Line([1.0, 2.0], [1.0, 2.0], BLUE, symbol="open diamond", size=10)])
    (line,) = figure_of(Chart("name", [panel]), "").axes[0].lines
    assert (line.get_marker(), line.get_markersize(), line.get_markerfacecolor()) == ("D", 8.0, "none")
    (scatter,) = plotly_of(panel).data
    assert (scatter.mode, scatter.marker.symbol, scatter.marker.size) == ("lines+markers", "diamond-open", 10)


@pytest.mark.parametrize(("fill", "ink"), [("#0072B2", "#FFFFFF"), ("#E69F00", "#000000"), ("#009E73", "#000000")])
def test_ink_has_the_higher_contrast(fill: str, ink: str) -> None:
    # Relative luminances 0.154, 0.431 and 0.259; white and black are equal at sqrt(1.05 * 0.05) - 0.05 = 0.179.
    assert ink_on(fill) == ink


def test_units() -> None:
    assert flop_unit(9.9e11) == (1e9, "GFLOP") and flop_unit(1e12) == (1e12, "TFLOP")
