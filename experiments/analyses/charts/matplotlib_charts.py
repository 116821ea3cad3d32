"""Charts as matplotlib's figures, for PNG and SVG files."""

from collections.abc import Iterable, Sequence
from io import BytesIO
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, LogLocator, MaxNLocator, NullFormatter, NullLocator
from PIL import Image

from experiment_core_utils.primitives.files import replaced_whole
from experiment_core_utils.tasks.datasets.pictures import open_picture
from experiments.analyses.charts.chart import Band, Bars, Chart, Dots, Interval, Line, Note, Numbers, Panel, Rule
from experiments.analyses.charts.style import GRID, INK, QUIET, ink_on, joined_caption

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    # Element ids that do not change from run to run.
    "svg.hashsalt": "figures",
    "path.simplify": True,
}
DPI = 110
COLOURS = 128
SYMBOLS = {"circle": "o", "ring": "o", "square": "s", "open square": "s", "triangle": "^", "open triangle": "^",
           "open diamond": "D", "tick": "|"}  # fmt: skip
HOLLOW = {"ring", "open square", "open triangle", "open diamond"}
DASHES: dict[str, Any] = {"solid": "-", "longdash": (0, (7, 1)), "dash": "--", "dashdot": "-.", "dot": ":"}
# Dots beyond this count are pixels in the SVG, which would be large otherwise.
MOST_VECTOR_DOTS = 300
# The white edge of a narrower bar would lighten it to another colour.
LEAST_PIXELS_WITH_EDGE = 6
# Decades of a logarithmic axis below which ticks stand between the powers of ten too.
FEW_DECADES = 2


def new_figure(width_in: float, height_in: float, caption: str) -> Figure:
    """An empty figure in the common look; `caption` (device, model, n) is written small at its foot.

    Make axes with `figure.subplots`, inside `with mpl.rc_context(STYLE):`, so that they have the look too.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        FigureCanvasAgg(figure)
        # An artist of the figure itself, so that the layout keeps room for it.
        # Names are given by users: no formula begins at a dollar, and half a surrogate pair has no glyph.
        shown = fill(caption.encode(errors="backslashreplace").decode(), int(16 * width_in))
        figure.supxlabel(shown, fontsize=7.5, color=QUIET, x=0.01, ha="left", parse_math=False)
        return figure


def save_figure(figure: Figure, folder: Path, name: str) -> tuple[Path, Path]:
    """Write `name`.png and `name`.svg into `folder`, which is created, and return both; equal data give equal files.

    Raises:
        ResultsNotSaved: the disk does not take it.
    """
    paths = folder / f"{name}.png", folder / f"{name}.svg"
    with mpl.rc_context(STYLE):
        pixels = BytesIO()
        figure.savefig(pixels, dpi=DPI, format="png")
        # Few colours are in it, so that a palette is a third of the size. It is spread over all of them, however few
        # pixels have one: by their count alone rare colours of a legend become one.
        picture = open_picture(pixels.getvalue(), name).image.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE)
        with replaced_whole(paths[0]) as temporary:
            picture.save(temporary, format="png", optimize=True)
        # The places found for the pixels are those of the drawing too.
        figure.set_layout_engine("none")
        with replaced_whole(paths[1]) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None, "Creator": None})
    return paths


def save_chart(chart: Chart, caption: str, folder: Path) -> tuple[Path, Path]:
    """Write the chart's PNG and SVG into `folder` and return both; raises ResultsNotSaved where the disk refuses."""
    return save_figure(figure_of(chart, caption), folder, chart.name)


def figure_of(chart: Chart, caption: str) -> Figure:
    """The figure of a chart with `caption` (device, model, n) and the chart's footnote at its foot."""
    columns = min(chart.columns, len(chart.panels))
    rows = ceil(len(chart.panels) / columns)
    width, height = chart.panel_size_in
    with mpl.rc_context(STYLE):
        foot = joined_caption(filter(None, (caption, chart.footnote)))
        figure = new_figure(width * columns, 0.6 + height * rows, foot)
        grid = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, panel in zip(grid, chart.panels, strict=False):
            _draw(axes, panel)
        for axes in grid[len(chart.panels) :]:
            axes.set_axis_off()
        # One legend of all panels, each name once.
        artists: dict[str, Artist] = {}
        for axes in grid:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                artists.setdefault(label, handle)
        if artists:
            own_columns = max(1, int(figure.get_size_inches()[0] / 2.1))
            figure.legend(list(artists.values()), list(artists), loc="outside upper left", ncols=own_columns,
                          fontsize=8.5, labelcolor=INK)  # fmt: skip
        figure.draw_without_rendering()
        for axes, panel in zip(grid, chart.panels, strict=False):
            _label(axes, (mark for mark in panel.marks if isinstance(mark, Dots) and mark.labels))
            for bar in axes.patches:
                if min(bar.get_window_extent().size) < LEAST_PIXELS_WITH_EDGE:
                    bar.set(linewidth=0, antialiased=False)
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x.title)
    axes.set_ylabel(panel.y.title)
    for order, mark in enumerate(panel.marks, start=2):
        _DRAWN[type(mark)](axes, mark, order)  # type: ignore[operator]
    for axis, of, set_limits in ((panel.x, axes.xaxis, axes.set_xlim), (panel.y, axes.yaxis, axes.set_ylim)):
        if axis.is_log:
            (axes.set_xscale if of is axes.xaxis else axes.set_yscale)("log")
        low, high = axis.limits or of.get_view_interval()
        if axis.ticks is not None:
            of.set_major_locator(FixedLocator(list(axis.ticks)))
            of.set_major_formatter(FixedFormatter(list(axis.ticks.values())))
            of.set_minor_locator(NullLocator())
            of.grid(visible=axis.is_log)
        elif axis.is_log:
            of.set_major_locator(LogLocator(subs=(1, 2, 5) if high < low * 10**FEW_DECADES else (1,)))
            of.set_major_formatter(lambda value, _: f"{value:.10g}")
            of.set_minor_formatter(NullFormatter())
        else:
            of.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
        if axis.from_zero:
            low = 0.0
        set_limits(*((high, low) if axis.is_reversed else (low, high)))
    if panel.is_square:
        axes.set_aspect("equal")


def _dots(axes: Axes, mark: Dots, order: int) -> None:
    face = "none" if mark.symbol in HOLLOW else mark.colour
    many = len(mark.x) > MOST_VECTOR_DOTS
    whiskers = {"fmt": "none", "color": mark.colour, "alpha": 0.4, "linewidth": 0.9, "zorder": 1}
    if mark.x_intervals:
        axes.errorbar(mark.x, mark.y, xerr=_whiskers(mark.x, mark.x_intervals), **whiskers)  # type: ignore[arg-type]
    if mark.y_intervals:
        axes.errorbar(mark.x, mark.y, yerr=_whiskers(mark.y, mark.y_intervals), **whiskers)  # type: ignore[arg-type]
    axes.plot(mark.x, mark.y, SYMBOLS[mark.symbol], color=mark.colour, markerfacecolor=face, alpha=mark.opacity,
              markersize=mark.size * (2.2 if mark.symbol == "tick" else 0.8), label=mark.name, zorder=order,
              markeredgewidth=2.5 if mark.symbol == "tick" else 1.3 if mark.symbol in HOLLOW else 0,
              rasterized=many)  # fmt: skip


def _whiskers(values: Numbers, intervals: Sequence[Interval]) -> np.ndarray:
    """Lengths below and above each value, 0 where the interval does not reach it."""
    low, high = np.array(intervals).T
    return np.maximum([values - low, high - values], 0)


def _line(axes: Axes, mark: Line, order: int) -> None:
    axes.plot(mark.x, mark.y, linestyle=DASHES[mark.dash], color=mark.colour, linewidth=mark.width,
              alpha=mark.opacity, label=mark.name, drawstyle="steps-post" if mark.is_step else "default",
              marker=mark.symbol and SYMBOLS[mark.symbol], markersize=0.8 * mark.size, zorder=order,
              markerfacecolor="none" if mark.symbol in HOLLOW else mark.colour)  # fmt: skip


def _band(axes: Axes, mark: Band, order: int) -> None:
    axes.fill_between(mark.x, mark.low, mark.high, color=mark.colour, alpha=mark.opacity, linewidth=0,
                      label=mark.name, zorder=order)  # fmt: skip


def _bars(axes: Axes, mark: Bars, order: int) -> None:
    starts = mark.starts if len(mark.starts) else [0.0] * len(mark.lengths)
    drawn = axes.barh(mark.places, mark.lengths, mark.thickness, starts, color=mark.colour, edgecolor="white",
                      linewidth=0.4, label=mark.name, zorder=order)  # fmt: skip
    for bar, pale in zip(drawn, mark.pale, strict=False):
        bar.set_alpha(0.4 if pale else 1.0)
    for place, start, length, label in zip(mark.places, starts, mark.lengths, mark.labels, strict=False):
        if label:
            at_end = not len(mark.starts)
            axes.annotate(label, (start + (1.0 if at_end else 0.5) * length, place), xytext=(-3 * at_end, 0),
                          textcoords="offset points", ha="right" if at_end else "center", va="center",
                          color=ink_on(mark.colour), fontsize=8, zorder=order + 1)  # fmt: skip


def _rule(axes: Axes, mark: Rule, _order: int) -> None:
    draw = axes.axvline if mark.is_vertical else axes.axhline
    draw(mark.at, color=mark.colour, linestyle=DASHES[mark.dash], linewidth=1.2, label=mark.name, zorder=1)


def _note(axes: Axes, mark: Note, order: int) -> None:
    axes.text(mark.x, mark.y, mark.text, color=mark.colour, fontsize=8, ha=mark.align, va="center", zorder=order,
              parse_math=False, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})  # fmt: skip


_DRAWN = {Dots: _dots, Line: _line, Band: _band, Bars: _bars, Rule: _rule, Note: _note}


def _label(axes: Axes, marks: Iterable[Dots]) -> None:
    """Write labels to the upper left of their dots, inside the panel, each above the lower ones that it would touch."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    pixel, left_end = figure.dpi / 72, axes.bbox.x0
    height = 10.5 * pixel
    taken: list[tuple[float, float, float]] = []  # left end, right end and bottom of each label
    for y, x, label in sorted(each for mark in marks for each in zip(mark.y, mark.x, mark.labels, strict=True)):
        if not label:
            continue
        place = axes.transData.transform((x, y))
        width = 4.8 * len(label) * pixel
        to_left = place[0] - width - 8 * pixel >= left_end
        left = place[0] - width - 8 * pixel if to_left else place[0] + 8 * pixel
        bottom = place[1] + 3 * pixel
        for other_left, other_right, other_bottom in taken:
            if left < other_right and other_left < left + width and bottom < other_bottom + height:
                bottom = other_bottom + height
        taken.append((left, left + width, bottom))
        axes.annotate(label, (x, y), xytext=(-8 if to_left else 8, (bottom - place[1]) / pixel),
                      textcoords="offset points", ha="right" if to_left else "left", va="bottom", fontsize=7.5,
                      color=INK, parse_math=False,
                      arrowprops={"arrowstyle": "-", "color": QUIET, "linewidth": 0.6, "shrinkB": 3})  # fmt: skip
