"""Results against others: what `knobprof compare` finds, as data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd
from matplotlib.figure import Figure

from experiment_core_utils.primitives.notebook_html import block, listed, paragraph, table
from experiment_core_utils.primitives.texts import ABSENT
from experiments.analyses.charts.style import caption_of
from experiments.analyses.comparison_page import RECORD_UNITS, SHOWN_UNITS, chart_of
from experiments.analyses.two_runs import RunComparison, RunDifference, Verdict
from knob_profiler.pictures import figure_for_notebooks


@dataclass(frozen=True, repr=False)
class ComparedResults:
    """Results against the first: ratios of times, energy and memory, differences of accuracy, with verdicts."""

    comparison: RunComparison  #: the record that `knobprof compare` prints

    @property
    def sentence(self) -> str:
        """What all settings together come to, each quantity with its verdict, as `knobprof compare` begins."""
        return "; ".join(self.comparison.headlines)

    @property
    def sentences(self) -> list[str]:
        """All that `knobprof compare` prints below its table."""
        return self.comparison.sentences()

    @property
    def verdict(self) -> Verdict | None:
        """Of the latency of all settings together: `FASTER`, `SLOWER`, `SAME`, `CANNOT TELL`.

        None without times, and where a side is INVALID.

        Of several results against the first it is that of the second; `frame()` has all.
        """
        pooled = [each.verdict for each in self._lines if each.is_pooled and each.quantity == "latency"]
        return pooled[0] if pooled and not self.comparison.voided_by else None

    def frame(self) -> pd.DataFrame:
        """One row a setting and quantity, then one for all settings together (`is_pooled`).

        Columns: `run` (label of the second of the two), `task`, `setting`, `quantity`, `unit`, `is_pooled`, `A` and
        `B` (latency and energy as geometric means), `change` (B / A; of accuracy B - A), its 95 % interval `low`
        and `high` (NaN where there are too few pictures), `samples`, `pictures`, `verdict`.
        """
        return pd.DataFrame([self._row(each) for each in self._lines])

    def plot(self) -> Figure:
        """A panel for each quantity: the change of each setting with its interval, and the band of `SAME`."""
        sides = [run for side in self.comparison.sides for run in side]
        caption = caption_of(
            [run.provenance for run in sides],
            sum(len(run.settings) for run in sides),
            sum(run.num_samples for run in sides),
        )
        return figure_for_notebooks(chart_of(self.comparison, self.comparison.lines), caption)

    @property
    def _lines(self) -> Sequence[RunDifference]:
        """The lines, each with the label of its second side."""
        return [replace(each, run=each.run or self.comparison.labels[1]) for each in self.comparison.lines]

    @staticmethod
    def _row(line: RunDifference) -> dict[str, object]:
        low, high = line.interval or (None, None)
        return {
            "run": line.run,
            "task": line.task,
            "setting": line.setting,
            "quantity": line.quantity,
            "unit": RECORD_UNITS[line.quantity],
            "is_pooled": line.is_pooled,
            "A": line.one,
            "B": line.other,
            "change": line.change,
            "low": low,
            "high": high,
            "samples": line.n,
            "pictures": line.pictures,
            "verdict": line.verdict,
        }

    def __repr__(self) -> str:
        first, *others = self.comparison.labels
        return f"ComparedResults({', '.join(others)} against {first}: {self.sentence})"

    def _repr_html_(self) -> str:
        """As a notebook shows it: the sentence, the lines of all settings together, then each setting's."""
        shown = set(map(id, self.comparison.shown))
        kept = [line for line, own in zip(self._lines, self.comparison.lines, strict=True) if id(own) in shown]
        lines = sorted(kept, key=lambda each: not each.is_pooled)
        has_tasks, has_runs = (len({getattr(each, name) for each in lines}) > 1 for name in ("task", "run"))
        names = {"run": has_runs, "task": has_tasks, "setting": True, "quantity": True}
        texts = [name for name, is_shown in names.items() if is_shown]
        columns = dict.fromkeys(texts, True) | dict.fromkeys(("A", "B", "B against A", "95 % interval"), False)
        rows = [[*(str(getattr(each, name)) for name in texts), *_cells(each), each.verdict] for each in lines]
        return block(
            *map(paragraph, self.comparison.voided_by),
            paragraph(self.sentence),
            table(columns | {"verdict": True}, rows, [each.is_pooled for each in lines]),
            listed(self.sentences),
        )


def _cells(line: RunDifference) -> list[str]:
    """The two figures, the change and its interval, with units."""
    unit, scale = SHOWN_UNITS[line.quantity]
    figures = [f"{each / scale:.4g} {unit}".strip() for each in (line.one, line.other)]
    change, ends = (f"{line.change:+.3f}", "+.3f") if line.quantity == "accuracy" else (f"× {line.change:.3f}", ".3f")
    between = ABSENT if line.interval is None else f"{line.interval[0]:{ends}} to {line.interval[1]:{ends}}"
    return [*figures, change, between]
