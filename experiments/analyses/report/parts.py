"""The parts of a report as records of plain text and numbers, without markup.

Strings here are as they are in the results: the page and its plots escape them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.analyses.charts.chart import Chart


@dataclass(frozen=True)
class Section:
    """A heading with what belongs under it."""

    name: str
    title: str
    intro: str
    charts: Sequence[Chart]
    reasons: Sequence[str] = ()  #: why charts that a reader expects are missing


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
    """A caveat that weakens the numbers."""

    text: str
    scope: str | None = None  #: such as `6 of 48 settings`; None where it is of all
    details: Sequence[str] = ()  #: lines for those who want to know which


@dataclass(frozen=True)
class ShownSample:
    """A sample at one setting, as texts."""

    title: str  #: task, sample and setting
    verdict: str  #: such as `right: em 1.000 of 1`
    is_right: bool
    picture: str | None  #: a data URI; None with a reason
    no_picture_reason: str | None
    facts: Sequence[tuple[str, str]]  #: (name, text), in reading order


@dataclass(frozen=True)
class SampleSection:
    """The samples of all tasks, and what the model was given of each run's first one."""

    intro: str
    samples: Sequence[ShownSample]
    prompts: Sequence[tuple[str, str]]  #: (task, final text with its ids)


@dataclass(frozen=True)
class Report:
    """The content of a page."""

    title: str  #: model and device
    subtitle: str  #: what it is based on, in a line
    statements: Sequence[str]  #: what the data say, most important first
    caveats: Sequence[ReportCaveat]
    settings: ReportTable
    sections: Sequence[Section]
    samples: SampleSection
    facts: Sequence[tuple[str, str]]  #: (name, value) of how it was measured
    commands: Sequence[str]  #: that measured
