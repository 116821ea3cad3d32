"""The parts of a report as records of plain text and numbers, without markup.

Strings here are as they are in the results: the page and its plots escape them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.analyses.charts.chart import Chart, Panel


@dataclass(frozen=True)
class Section:
    """A heading with what belongs under it."""

    name: str
    title: str
    intro: str
    charts: Sequence[Chart]
    reasons: Sequence[str] = ()  #: why charts that a reader expects are missing
    findings: Sequence[str] = ()  #: what the data say, in sentences
    is_folded: bool = False  #: whether a reader opens it first


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, what it means, and whether it contains numbers."""

    label: str
    meaning: str
    is_number: bool
    is_first: bool = False  #: whether it is in the table of the first screen


@dataclass(frozen=True)
class Value:
    """The content of a cell and its sort key; both None where there is nothing."""

    text: str | None
    key: float | str | None
    more: str = ""  #: such as an interval


@dataclass(frozen=True)
class ReportTable:
    """A table; its rows have a cell for each column."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]

    @property
    def first(self) -> "ReportTable":
        """The columns of the first screen."""
        kept = [at for at, column in enumerate(self.columns) if column.is_first]
        return ReportTable([self.columns[at] for at in kept], [[row[at] for at in kept] for row in self.rows])


@dataclass(frozen=True)
class Headline:
    """The sentence that a reader takes away, with its verdict."""

    about: str  #: task, or what is compared; empty where there is one
    #: of the four of `records.conclusion.WORDS`, `INVALID`, `no setting`, or of a sweep such as `slower`
    word: str
    sentence: str
    more: Sequence[str] = ()  #: sentences below it, such as what each knob changes
    word_about: str = ""  #: what the word is an answer to; empty where it speaks for itself


@dataclass(frozen=True)
class FrontPicture:
    """The front of a task by one cost, or why there is none."""

    name: str  #: of its plot
    task: str
    cost: str  #: as a button says it, such as `mean ms`
    panel: Panel | None  #: None with a reason
    reason: str = ""


@dataclass(frozen=True)
class ReportCaveat:
    """A caveat that weakens the numbers."""

    about: str  #: what it weakens: one of `caveats.GROUPS`
    text: str
    scope: str | None = None  #: such as `6 of 48 settings`; None where it is of all
    details: Sequence[str] = ()  #: lines for those who want to know which
    voids: bool = False  #: whether the run is INVALID by it


@dataclass(frozen=True)
class CaveatGroup:
    """The caveats that weaken one thing, the worst first."""

    about: str
    caveats: Sequence[ReportCaveat]


@dataclass(frozen=True)
class SampleAnswer:
    """An answer to a sample, with the settings that gave it."""

    text: str
    is_right: bool | None  #: None without a score, or of a metric whose best score is not 1
    score: str  #: such as `0.300 of 1`
    settings: str  #: their names; of many the first ones
    numbers: Sequence[int]  #: of all of them, in the list of the section


@dataclass(frozen=True)
class ShownSample:
    """A sample with its answers at all settings."""

    title: str  #: task and number
    verdict: str  #: such as `right at 6 of 9 settings`
    question: str
    prompt: str | None  #: None where it is the question
    expected: str  #: right answers
    picture: str | None  #: a data URI; None with a reason
    no_picture_reason: str | None
    answers: Sequence[SampleAnswer]  #: the most frequent first

    @property
    def wrong(self) -> list[int]:
        """Numbers of the settings whose answer is wrong."""
        return [number for answer in self.answers if answer.is_right is False for number in answer.numbers]

    @property
    def differs(self) -> bool:
        """Whether it is right at some settings and wrong at others."""
        return len({answer.is_right for answer in self.answers} - {None}) > 1


@dataclass(frozen=True)
class SampleSection:
    """The samples of all tasks, and what the model was given of each run's first one."""

    intro: str
    settings: Sequence[str]  #: names, by which a reader chooses those that are wrong there
    samples: Sequence[ShownSample]
    prompts: Sequence[tuple[str, str]]  #: (task, final text with its ids)


@dataclass(frozen=True)
class Report:
    """The content of a page."""

    title: str  #: model and device
    subtitle: str  #: what it is based on, in a line
    headlines: Sequence[Headline]
    fronts: Sequence[FrontPicture]
    caveats: Sequence[CaveatGroup]  #: three at most
    settings: ReportTable
    sections: Sequence[Section]
    samples: SampleSection
    facts: Sequence[tuple[str, str]]  #: (name, value) of how it was measured
    commands: Sequence[str]  #: that measured
    #: plot and panel of the first screen where there is no front; None with fronts, or without times
    instead: tuple[str, Panel] | None = None
    legend: str = ""  #: what the words of verdicts say
    prices: ReportTable | None = None  #: of every task with prices; None where there are none
    score: str = "accuracy"  #: what scores are called

    @property
    def first_front(self) -> str:
        """The plot that is drawn first; empty without fronts."""
        return next((front.name for front in self.fronts if front.panel is not None), "")

    @property
    def choices(self) -> dict[str, list[str]]:
        """What a reader chooses the front by: each task, and each cost that any task has a front or a reason of."""
        return {
            "task": list(dict.fromkeys(front.task for front in self.fronts)),
            "cost": list(dict.fromkeys(each.cost for each in self.fronts)),
        }
