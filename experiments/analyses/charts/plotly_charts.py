"""Panels of charts as plotly's figures, for the page of a report; every text is escaped."""

from collections.abc import Iterable, Sequence
from html import escape
from math import log10
from typing import Any

import plotly.graph_objects as go

from experiments.analyses.charts.chart import Axis, Band, Bars, Dots, Interval, Line, Note, Numbers, Panel, Rule
from experiments.analyses.charts.style import ink_on

SYMBOLS = {"circle": "circle", "ring": "circle-open", "square": "square", "open square": "square-open",
           "triangle": "triangle-up", "open triangle": "triangle-up-open", "open diamond": "diamond-open",
           "tick": "line-ns-open"}  # fmt: skip


def plotly_of(panel: Panel) -> go.Figure:
    """The plot of a panel; colours of text, grid and background are the page's."""
    figure = go.Figure()
    for mark in panel.marks:
        if isinstance(mark, Dots | Line | Band):
            figure.add_trace(_SCATTERS[type(mark)](mark))  # type: ignore[operator]
            if isinstance(mark, Dots) and mark.labels:
                figure.data[-1].textposition = _sides_of_labels(mark, panel)
        elif isinstance(mark, Bars):
            figure.add_trace(_bars(mark))
        elif isinstance(mark, Rule):
            add = figure.add_vline if mark.is_vertical else figure.add_hline
            line = {"color": mark.colour, "width": 1, "dash": mark.dash}
            add(mark.at, layer="below", line=line)
            if mark.name:
                # A name beside the line would be cut at the panel's edge.
                figure.add_trace(go.Scatter(x=[None], y=[None], mode="lines", line=line, hoverinfo="skip",
                                            **_named(mark.name)))  # fmt: skip
        else:
            figure.add_annotation(_note(mark, panel))
    figure.update_layout(
        xaxis=_axis(panel.x),
        yaxis=_axis(panel.y) | ({"scaleanchor": "x"} if panel.is_square else {}),
        barmode="overlay",
        margin={"l": 10, "r": 14, "t": 34, "b": 10},
        hovermode="closest",
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom", "traceorder": "normal"},
        template=None,
    )
    return figure


def plain(text: str) -> str:
    """A text that plotly shows letter by letter; it would read tags and entities in it otherwise."""
    return escape(text, quote=False)


def numbers(values: Iterable[float]) -> list[float]:
    """Numbers with 6 digits, which is more than any screen shows."""
    return [float(f"{float(value):.6g}") for value in values]


def _axis(axis: Axis) -> dict[str, Any]:
    found: dict[str, Any] = {"automargin": True, "title": {"text": plain(axis.title)}}
    if axis.is_log:
        found |= {"type": "log", "dtick": 1}
    if axis.ticks is not None:
        texts = [plain(text) for text in axis.ticks.values()]
        found |= {"tickvals": list(axis.ticks), "ticktext": texts, "showgrid": False, "zeroline": False}
    if axis.limits is not None:
        ends = axis.limits if not axis.is_log else tuple(log10(end) for end in axis.limits)
        found["range"] = list(ends)[:: -1 if axis.is_reversed else 1]
    elif axis.is_reversed:
        found["autorange"] = "reversed"
    elif axis.from_zero:
        found["rangemode"] = "tozero"
    return found


def _hover(texts: Sequence[Sequence[str]]) -> dict[str, Any]:
    if not texts:
        return {"hoverinfo": "skip"}
    shown = ["<br>".join([f"<b>{plain(heading)}</b>", *map(plain, lines)]) for heading, *lines in texts]
    return {"hovertext": shown, "hoverinfo": "text"}


def _named(name: str | None) -> dict[str, Any]:
    return {"showlegend": False} if name is None else {"name": plain(name), "legendgroup": plain(name)}


def _whiskers(values: Numbers, ends: Sequence[Interval], colour: str) -> dict[str, Any] | None:
    """Error bars from intervals that may not contain their value."""
    if not ends:
        return None
    above = numbers(max(high - value, 0.0) for value, (_, high) in zip(values, ends, strict=True))
    below = numbers(max(value - low, 0.0) for value, (low, _) in zip(values, ends, strict=True))
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1, "width": 0,
            "color": colour}  # fmt: skip


def _dots(mark: Dots) -> go.Scatter:
    labels = {"text": [plain(label) for label in mark.labels], "textposition": "top left", "textfont": {"size": 10},
              "cliponaxis": False}  # fmt: skip
    return go.Scatter(
        x=numbers(mark.x),
        y=numbers(mark.y),
        mode="markers+text" if mark.labels else "markers",
        marker={"color": mark.colour, "size": mark.size, "symbol": SYMBOLS[mark.symbol], "opacity": mark.opacity,
                "line": {"width": 3 if mark.symbol == "tick" else 1, "color": mark.colour}},
        error_x=_whiskers(mark.x, mark.x_intervals, mark.colour),
        error_y=_whiskers(mark.y, mark.y_intervals, mark.colour),
        **(labels if mark.labels else {}), **_hover(mark.texts), **_named(mark.name),
    )  # fmt: skip


def _sides_of_labels(mark: Dots, panel: Panel) -> list[str]:
    """Where a label has room: to the right of marks in the left half of the panel, to the left of others; under the
    marks around others, whose labels are above.
    """
    if mark.symbol == "open diamond":
        return ["bottom left"] * len(mark.x)
    low, high = panel.x.limits or (min(mark.x), max(mark.x))
    return ["top right" if at < (low + high) / 2 else "top left" for at in mark.x]


def _line(mark: Line) -> go.Scatter:
    line = {"color": mark.colour, "width": mark.width, "dash": mark.dash, "shape": "hv" if mark.is_step else "linear"}
    return go.Scatter(
        x=numbers(mark.x), y=numbers(mark.y), mode="lines+markers" if mark.symbol else "lines", line=line,
        marker={"symbol": SYMBOLS[mark.symbol], "size": mark.size} if mark.symbol else None, opacity=mark.opacity,
        **_hover(mark.texts), **_named(mark.name),
    )  # fmt: skip


def _band(mark: Band) -> go.Scatter:
    red, green, blue = (int(mark.colour[at : at + 2], 16) for at in (1, 3, 5))
    return go.Scatter(
        x=numbers([*mark.x, *reversed(mark.x)]), y=numbers([*mark.low, *reversed(mark.high)]), mode="lines",
        fill="toself", fillcolor=f"rgba({red},{green},{blue},{mark.opacity})", line={"width": 0}, hoverinfo="skip",
        **_named(mark.name),
    )  # fmt: skip


_SCATTERS = {Dots: _dots, Line: _line, Band: _band}


def _bars(mark: Bars) -> go.Bar:
    labels: dict[str, Any] = {"text": [plain(label) for label in mark.labels], "textangle": 0}
    if len(mark.starts):
        labels |= {"textposition": "inside", "insidetextanchor": "middle",
                   "insidetextfont": {"color": ink_on(mark.colour), "size": 11}}  # fmt: skip
    else:
        # Inside a short bar it would be cut.
        labels |= {"textposition": "outside", "outsidetextfont": {"size": 11}, "cliponaxis": False,
                   "constraintext": "none"}  # fmt: skip
    return go.Bar(
        x=numbers(mark.lengths),
        y=numbers(mark.places),
        orientation="h",
        base=numbers(mark.starts) if len(mark.starts) else None,
        width=mark.thickness,
        marker={"color": mark.colour, "line": {"width": 0},
                "opacity": [0.4 if pale else 1.0 for pale in mark.pale] or 1.0},
        **(labels if mark.labels else {}), **_hover(mark.texts), **_named(mark.name),
    )  # fmt: skip


def _note(mark: Note, panel: Panel) -> dict[str, Any]:
    x, y = (log10(at) if axis.is_log else at for at, axis in ((mark.x, panel.x), (mark.y, panel.y)))
    return {"x": x, "y": y, "text": plain(mark.text), "showarrow": False, "font": {"size": 11, "color": mark.colour},
            "xanchor": mark.align}  # fmt: skip
