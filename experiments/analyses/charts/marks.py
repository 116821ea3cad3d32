"""Traces and axes as plotly's JSON, with every text escaped."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from experiments.analyses.charts.style import LIGHT_GREY, SKY, YELLOW

Trace = dict[str, Any]
# Larger sets of dots are thinned evenly: more cannot be distinguished, and the page would be large and slow.
MOST_DOTS = 2500
# Fills on which white text cannot be read.
LIGHT, DARK_TEXT = {SKY, YELLOW, LIGHT_GREY}, "#1c2126"
# Axes of names: no ticks, and the names a little away from the bars.
NAMES: Trace = {"type": "category", "ticks": "", "showgrid": False, "ticklabelstandoff": 6}
NAMES_IN_GROUPS: Trace = {"type": "multicategory", "ticks": "", "showgrid": False, "showdividers": False}


def plain(text: str) -> str:
    """A text that plotly shows letter by letter; it would read tags and entities in it otherwise."""
    return escape(text, quote=False)


def hover(heading: str, *lines: str) -> str:
    """The hover text of a mark: a bold heading and lines."""
    return "<br>".join([f"<b>{plain(heading)}</b>", *(plain(line) for line in lines)])


def numbers(values: Iterable[float | None]) -> list[float | None]:
    """Numbers with 6 digits, which is more than any screen shows; None stays None, as a gap."""
    return [None if value is None else float(f"{float(value):.6g}") for value in values]


def thinned(count: int, most: int = MOST_DOTS) -> list[int]:
    """Indices of at most `most` of `count` things, evenly spread."""
    return list(range(count)) if count <= most else [round(at * (count - 1) / (most - 1)) for at in range(most)]


def _scatter(
    mode: str, x: Iterable[float | None], y: Iterable[float | None], name: str, texts: Sequence[str] | None
) -> Trace:
    trace: Trace = {"type": "scatter", "mode": mode, "name": plain(name), "x": numbers(x), "y": numbers(y)}
    return trace | ({"hoverinfo": "skip"} if texts is None else {"hovertext": list(texts), "hoverinfo": "text"})


def dots(
    x: Iterable[float | None],
    y: Iterable[float | None],
    texts: Sequence[str],
    name: str,
    colour: str,
    *,
    size: float = 7,
    symbol: str = "circle",
    opacity: float = 1.0,
) -> Trace:
    """A trace with a mark for each pair; `texts` are from `hover`."""
    marker = {"color": colour, "size": size, "symbol": symbol, "opacity": opacity}
    return _scatter("markers", x, y, name, texts) | {"marker": marker}


def line(
    x: Iterable[float | None],
    y: Iterable[float | None],
    name: str,
    colour: str,
    *,
    width: float = 2,
    dash: str = "solid",
    texts: Sequence[str] | None = None,
    shape: str = "linear",
) -> Trace:
    """A trace with a line through the pairs; it has no hover text without `texts`."""
    style = {"color": colour, "width": width, "dash": dash, "shape": shape}
    return _scatter("lines", x, y, name, texts) | {"line": style}


def bars(
    names: Sequence[str],
    values: Iterable[float | None],
    texts: Sequence[str],
    name: str,
    colour: str,
    *,
    is_horizontal: bool,
    labels: Sequence[str] | None = None,
) -> Trace:
    """A trace with a bar for each of `names`; `labels` are written inside them."""
    places, lengths = [plain(each) for each in names], numbers(values)
    trace: Trace = {
        "type": "bar",
        "name": plain(name),
        "orientation": "h" if is_horizontal else "v",
        "x": lengths if is_horizontal else places,
        "y": places if is_horizontal else lengths,
        "hovertext": list(texts),
        "hoverinfo": "text",
        "marker": {"color": colour, "line": {"width": 0}},
    }
    if labels is not None:
        trace |= {
            "text": [plain(each) for each in labels],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "insidetextfont": {"color": DARK_TEXT if colour in LIGHT else "#ffffff", "size": 11},
            "constraintext": "none",
        }
    return trace


def whiskers(values: Sequence[float], ends: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Error bars from intervals that may not contain their value."""
    return {
        "type": "data",
        "symmetric": False,
        "array": numbers(max(high - value, 0.0) for value, (_, high) in zip(values, ends, strict=True)),
        "arrayminus": numbers(max(value - low, 0.0) for value, (low, _) in zip(values, ends, strict=True)),
        "thickness": 1,
        "width": 0,
    }


def axis(title: str | None = None, **more: Any) -> dict[str, Any]:
    """An axis with a title; `more` contains further fields of plotly's."""
    return ({"title": {"text": plain(title)}} if title is not None else {}) | more


def layout(x: Mapping[str, Any], y: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A layout with two axes and a legend above the picture."""
    return {
        "xaxis": {"automargin": True, **x},
        "yaxis": {"automargin": True, **y},
        "margin": {"l": 10, "r": 14, "t": 34, "b": 10},
        "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom",
                   "traceorder": "normal"},
        **more,
    }  # fmt: skip


def note(x: float, y: float | str, text: str, **more: Any) -> dict[str, Any]:
    """A text in the picture, without an arrow, at a number or a category; on the axes unless `more` says otherwise."""
    return {"x": x, "y": y, "text": plain(text), "showarrow": False, "font": {"size": 11}, **more}
