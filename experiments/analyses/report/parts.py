"""The parts of a report as records of plain text and numbers, without markup.

Strings here are as they are in the results: the page escapes them. Plots are the exception, because plotly reads some
markup in texts; they are made by `charts/marks.py`, which escapes what it is given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Width = Literal["third", "half", "full"]


@dataclass(frozen=True)
class Plot:
    """An interactive picture.

    Attributes:
        name: of its element in the page, unique.
        data: traces as plotly's JSON.
        layout: axes and the like as plotly's JSON; colours of text and lines are the page's.
        note: how to read it; None where the title is enough.
    """

    name: str
    title: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    width: Width
    height_px: int
    note: str | None = None


@dataclass(frozen=True)
class Section:
    """A heading with what belongs under it.

    Attributes:
        reasons: why plots that a reader expects are not there.
    """

    name: str
    title: str
    intro: str
    plots: Sequence[Plot]
    reasons: Sequence[str] = ()


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, what it means, and whether it contains numbers."""

    label: str
    meaning: str
    is_number: bool


@dataclass(frozen=True)
class Value:
    """The content of a cell and its sort key; both None where there is nothing."""

    text: str | None
    key: float | str | None


@dataclass(frozen=True)
class ReportTable:
    """A table; its rows have a cell for each column."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]


@dataclass(frozen=True)
class ReportCaveat:
    """A caveat that weakens the numbers.

    Attributes:
        scope: such as `6 of 48 settings`; None where it is of all.
        details: lines for those who want to know which.
    """

    text: str
    scope: str | None = None
    details: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """The content of a page.

    Attributes:
        title: model and device.
        subtitle: what it is based on, in a line.
        facts: (name, value) of how it was measured.
        commands: that measured.
        statements: what the data say, most important first.
    """

    title: str
    subtitle: str
    statements: Sequence[str]
    caveats: Sequence[ReportCaveat]
    settings: ReportTable
    sections: Sequence[Section]
    facts: Sequence[tuple[str, str]]
    commands: Sequence[str]
