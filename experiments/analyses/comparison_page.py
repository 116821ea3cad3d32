"""The HTML page of a comparison: the sentence, the picture of one quantity, and one table of all of them.

Style, script and policy are those of a report; texts are escaped as there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiment_core_utils.primitives.errors import package_of_extra
from experiments.analyses.charts.chart import Band, Chart, Panel
from experiments.analyses.charts.run_charts import runs_chart
from experiments.analyses.charts.style import QUIET, joined_caption, setup_of
from experiments.analyses.report.content import without_folders
from experiments.analyses.report.page import rendered
from experiments.analyses.two_runs import Quantity, RunComparison, RunDifference, title_of

HERE = Path(__file__).parent
# Of a quantity's figures in records; of accuracy there is none.
RECORD_UNITS: Mapping[Quantity, str] = {
    "latency": "ms", "P95 latency": "ms", "energy": "J", "memory": "bytes", "accuracy": "",
}  # fmt: skip
# What its figures are shown in: the unit, and how many of the record's it is.
SHOWN_UNITS: Mapping[Quantity, tuple[str, float]] = {
    each: ("MB", 1e6) if unit == "bytes" else (unit, 1.0) for each, unit in RECORD_UNITS.items()
}
# In the order of the table's columns.
COLUMNS: tuple[Quantity, ...] = ("accuracy", "latency", "P95 latency", "energy", "memory")
GOOD, BAD = {"FASTER", "LESS", "BETTER"}, {"SLOWER", "MORE", "WORSE"}
LEGEND = (
    'FASTER, LESS or BETTER, and SLOWER, MORE or WORSE: the interval excludes "no change"',
    "SAME: the whole interval is within the margin, the band in the picture; not to be had where runs vary by more",
    "IDENTICAL: every answer is the same text with the same score on these samples, which says nothing of others",
    "CANNOT TELL: neither, since runs or samples vary too much",
)
ROW_PX, LEAST_PX = 28, 240


@dataclass(frozen=True)
class _Cell:
    """A quantity of a row; `key` is what it is sorted by."""

    verdict: str
    change: str
    figures: str  #: interval, and both sides' figures
    key: float

    @property
    def kind(self) -> str:
        """How the verdict is coloured."""
        return "good" if self.verdict in GOOD else "bad" if self.verdict in BAD else "neither"


@dataclass(frozen=True)
class _Row:
    """All quantities of a setting, or of all together, of one further side."""

    name: str
    is_pooled: bool
    cells: Sequence[_Cell | None]


def comparison_page(found: RunComparison) -> str:
    """The text of the page; raises ConfigurationError where plotly, which draws the picture, is not installed."""
    with package_of_extra("plotly", "report"):
        from experiments.analyses.charts.plotly_charts import plotly_of
    found = _without_folders(found)
    panel = picture_of(found)
    columns = [each for each in COLUMNS if any(line.quantity == each for line in found.lines)]
    return rendered(
        "comparison_page.html",
        {} if panel is None else {"comparison": plotly_of(panel).to_plotly_json()},
        HERE,
        found=found,
        setups=setups_of(found),
        columns=[_heading(column, found.lines) for column in columns],
        rows=rows_of(found.lines, columns),
        panel=panel,
        legend=LEGEND,
        voided_by=found.voided_by,
        basis=found.sentences(),
        caveats=list(dict.fromkeys(each for side in found.sides for run in side for each in run.provenance.caveats)),
    )


def _heading(quantity: Quantity, lines: Sequence[RunDifference]) -> str:
    unit, _ = SHOWN_UNITS[quantity]
    return f"{title_of(quantity, lines)} ({unit})" if unit else title_of(quantity, lines)


def _without_folders(found: RunComparison) -> RunComparison:
    """The comparison whose labels have no folders; those that become equal are numbered."""
    short = list(map(without_folders, found.labels))
    labels = [each if short.count(each) == 1 else f"{each} ({at + 1})" for at, each in enumerate(short)]
    names = dict(zip(found.labels, labels, strict=True))
    return replace(found, labels=labels, lines=[replace(line, run=names.get(line.run, "")) for line in found.lines])


def require_plotly() -> None:
    """Raises ConfigurationError where plotly is not installed, before anything is measured."""
    with package_of_extra("plotly", "report"):
        import plotly.offline  # noqa: F401


def chart_of(found: RunComparison, lines: Sequence[RunDifference]) -> Chart:
    """A panel for each quantity of these lines, with the band in which a change is SAME."""
    chart = runs_chart([replace(line, run=line.run or found.labels[1]) for line in lines], found.labels[0])
    quantities = dict.fromkeys(each.quantity for each in lines)
    panels = [_with_band(panel, each, found) for panel, each in zip(chart.panels, quantities, strict=True)]
    return replace(chart, panels=panels)


def _with_band(panel: Panel, quantity: Quantity, found: RunComparison) -> Panel:
    """A panel with its band; as it is where settings' scores have other scales than 0 to 1."""
    ends = 1 / (1 + found.margin), 1 + found.margin
    own = [each for each in found.lines if each.quantity == quantity]
    if all(each.can_be_same is False for each in own):
        return panel
    if quantity == "accuracy":
        if any(setting.result.metric_best != 1 for side in found.sides for run in side for setting in run.settings):
            return panel
        ends = -found.accuracy_margin, found.accuracy_margin
    low, high = panel.y.limits or (0.0, 1.0)
    return replace(panel, marks=[Band(ends, (low, low), (high, high), QUIET, "SAME"), *panel.marks])


def picture_of(found: RunComparison) -> Panel | None:
    """The change of latency in each setting, where it was timed; all settings together first."""
    pooled_first = sorted(found.lines, key=lambda each: not each.is_pooled)
    timed = [each for each in pooled_first if each.quantity == "latency"]
    lines = timed or [each for each in pooled_first if each.quantity == "accuracy"]
    if not lines:
        return None
    (panel,) = chart_of(found, lines).panels
    better = "left of 1 is faster" if timed else "right of 0 is better"
    note = f"{better}; bars are 95 % intervals of all settings together"
    note += "; the band is what counts as SAME" * any(isinstance(mark, Band) for mark in panel.marks)
    height_px = max(LEAST_PX, 110 + ROW_PX * len(panel.y.ticks or ()))
    return replace(panel, note=note, width="full", height_px=height_px)


def rows_of(lines: Sequence[RunDifference], columns: Sequence[Quantity]) -> list[_Row]:
    """A row for each further side and setting, all settings together first."""
    has_tasks = len({each.task for each in lines if not each.is_pooled}) > 1
    keyed: dict[tuple[str, str, str], dict[Quantity, RunDifference]] = {}
    for each in sorted(lines, key=lambda line: not line.is_pooled):
        keyed.setdefault((each.run, each.task if has_tasks else "", each.setting), {})[each.quantity] = each
    return [
        _Row(
            " · ".join(part for part in names if part),
            any(each.is_pooled for each in own.values()),
            [_cell(own[column]) if column in own else None for column in columns],
        )
        for names, own in keyed.items()
    ]


def _cell(line: RunDifference) -> _Cell:
    _, scale = SHOWN_UNITS[line.quantity]
    change, _, interval = line.change_text.partition(" ")
    figures = [interval, f"{line.one / scale:.4g} → {line.other / scale:.4g}"]
    times = "" if line.quantity == "accuracy" else "× "
    return _Cell(line.verdict, f"{times}{change}", " · ".join(figure for figure in figures if figure), line.change)


def setups_of(found: RunComparison) -> list[tuple[str, str]]:
    """Of each side its letter or label, and what it ran on."""
    setups = []
    for name, label, runs in zip(found.names, found.labels, found.sides, strict=True):
        count = f"{len(runs)} run{'s' * (len(runs) > 1)}"
        # What was read from a harness has no run.
        setup = [*setup_of(runs[0].provenance), count] if runs else []
        setups.append((name, joined_caption([label, *setup])))
    return setups
