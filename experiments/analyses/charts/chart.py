"""A picture described once: panels with axes, marks, units and hover texts, without any drawing library.

`matplotlib_charts.py` renders a chart for files, `plotly_charts.py` for the page of a report.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from experiments.analyses.charts.style import INK

Symbol = Literal["circle", "ring", "square", "open square", "triangle", "open triangle", "open diamond", "tick"]
Dash = Literal["solid", "longdash", "dash", "dashdot", "dot"]
Width = Literal["third", "half", "full"]
Interval = tuple[float, float]
Numbers = Sequence[float] | np.ndarray
# Larger sets of dots are thinned evenly: more cannot be distinguished, and files would be large and slow.
MOST_DOTS = 2500
# Percentages from this one on are written into their bars.
SMALLEST_LABELLED = 6.0


@dataclass(frozen=True)
class Axis:
    """An axis of a panel."""

    title: str = ""  #: what is on it, with the unit in brackets
    limits: Interval | None = None  #: its ends; None for those of the marks
    #: place -> text, instead of numbers; an empty mapping for no ticks
    ticks: Mapping[int, str] | Mapping[float, str] | None = None
    is_log: bool = False
    from_zero: bool = False  #: whether it begins at zero
    is_reversed: bool = False  #: whether it runs from top to bottom


@dataclass(frozen=True)
class Dots:
    """A mark for each pair."""

    x: Numbers
    y: Numbers
    colour: str
    name: str | None = None  #: in the legend; None for none
    texts: Sequence[Sequence[str]] = ()  #: shown where a reader points, a heading and lines; empty or one each
    labels: Sequence[str] = ()  #: written beside the marks; empty or one each, "" for none
    symbol: Symbol = "circle"
    size: float = 7.0
    opacity: float = 1.0
    x_intervals: Sequence[Interval] = ()  #: drawn as whiskers; empty or one each. They need not contain their value.
    y_intervals: Sequence[Interval] = ()


@dataclass(frozen=True)
class Line:
    """A line through the pairs; `is_step` holds each value until the next place."""

    x: Numbers
    y: Numbers
    colour: str
    name: str | None = None
    texts: Sequence[Sequence[str]] = ()
    width: float = 2.0
    dash: Dash = "solid"
    is_step: bool = False
    symbol: Symbol | None = None  #: at each pair; None for none
    size: float = 5.6  #: of the symbols
    opacity: float = 1.0


@dataclass(frozen=True)
class Band:
    """The area between two lines over the same places."""

    x: Numbers
    low: Numbers
    high: Numbers
    colour: str
    name: str | None = None
    opacity: float = 0.2


@dataclass(frozen=True)
class Bars:
    """A horizontal bar at each place of y, from its start to start + length."""

    places: Numbers
    lengths: Numbers
    colour: str
    name: str | None = None
    texts: Sequence[Sequence[str]] = ()
    labels: Sequence[str] = ()  #: written inside, at the end of a horizontal bar from zero; empty or one each
    starts: Numbers = ()  #: empty for zero
    pale: Sequence[bool] = ()  #: whether a bar is drawn faintly; empty or one each
    thickness: float = 0.75


@dataclass(frozen=True)
class Rule:
    """A straight line across the panel at a value of x, or of y, behind the marks."""

    at: float
    is_vertical: bool
    colour: str
    name: str | None = None
    dash: Dash = "dot"


@dataclass(frozen=True)
class Note:
    """A text at a place of the axes, such as the name of a line."""

    x: float
    y: float
    text: str
    colour: str = INK
    align: Literal["left", "center", "right"] = "center"


Mark = Dots | Line | Band | Bars | Rule | Note


@dataclass(frozen=True)
class Panel:
    """A pair of axes with marks, drawn in their order."""

    title: str
    x: Axis
    y: Axis
    marks: Sequence[Mark]
    note: str = ""  #: how to read it; shown on the page under the title
    width: Width = "half"  #: on the page, as a part of the row
    height_px: int = 400
    is_square: bool = False  #: whether both axes have one scale


@dataclass(frozen=True)
class Chart:
    """A picture: a file of all panels in rows, and a plot on the page for each."""

    name: str  #: of its files without ending, and the stem of its plots' names on the page
    panels: Sequence[Panel]
    columns: int = 1  #: panels in a row of the file
    panel_size_in: tuple[float, float] = (7.4, 4.6)  #: width and height of a panel in the file, in inches
    footnote: str = ""  #: beside the caption of device, model and n


def thinned(count: int, most: int = MOST_DOTS) -> list[int]:
    """Indices of at most `most` of `count` things, evenly spread."""
    return list(range(count)) if count <= most else [round(at * (count - 1) / (most - 1)) for at in range(most)]


def padded(values: Numbers) -> Interval:
    """Limits of an axis that leave 5 % of the values' range free on both sides; absent values are nan."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    room = 0.05 * ((high - low) or 1.0)
    return low - room, high + room


def flop_unit(most_flops: float) -> tuple[float, str]:
    """The divisor of operations in a picture, and their unit: TFLOP from 10^12 on, else GFLOP."""
    return (1e12, "TFLOP") if most_flops >= 1e12 else (1e9, "GFLOP")


def stacked_bars(
    names: Sequence[str],
    parts: Sequence[Sequence[float]],
    colours: Sequence[str],
    texts: Sequence[Sequence[Sequence[str]]],
    *,
    are_percentages: bool = True,
) -> list[Bars]:
    """Bars one after the other, a series for each of `names`; percentages are written inside where there is room.

    Args:
        parts: for each of `names`, its length at each place; places are 0, 1, 2, ...
    """
    starts = [0.0] * len(parts[0]) if parts else []
    found = []
    for name, lengths, colour, own in zip(names, parts, colours, texts, strict=True):
        labels = [f"{length:.0f} %" if length >= SMALLEST_LABELLED else "" for length in lengths]
        labels = labels if are_percentages else []
        found.append(Bars(range(len(lengths)), lengths, colour, name, own, labels, tuple(starts)))
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    return found
