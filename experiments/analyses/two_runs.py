"""Runs against the first, setting by setting: ratios of times and energies, differences of accuracies, verdicts.

Where both runs have the same samples they are compared in pairs, else as two independent ones. The intervals of one
quantity hold together with 95 % for all its settings (Bonferroni); those of latencies are wider by the drift that the
control settings of the runs showed.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy import stats

from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.statistics import bounded_mean_interval
from experiment_core_utils.records.sample_result import SampleResult, is_same_question
from experiment_core_utils.records.setting_result import SettingResult
from experiment_core_utils.saved_results.rescoring import other_conditions
from experiments.analyses.knobs.grid import picture_of
from experiments.analyses.sweeps import Sweep, drift_ratios
from experiments.fitting.verdicts import FEWEST_PICTURES, TAIL, first_of_each, tail_interval

Verdict = Literal["FASTER", "SLOWER", "LESS", "MORE", "BETTER", "WORSE", "SAME", "CANNOT TELL"]
Quantity = Literal["mean latency", "P95 latency", "mean energy", "accuracy"]

# What a quantity below and above that of the first run is called.
WORDS: Mapping[Quantity, tuple[Verdict, Verdict]] = {
    "mean latency": ("FASTER", "SLOWER"),
    "P95 latency": ("FASTER", "SLOWER"),
    "mean energy": ("LESS", "MORE"),
    "accuracy": ("WORSE", "BETTER"),
}

READ: Mapping[Quantity, Callable[[SampleResult], float | None]] = {
    "mean latency": lambda sample: sample.T_total,
    "P95 latency": lambda sample: sample.T_total,
    "mean energy": lambda sample: sample.energy_j,
    "accuracy": lambda sample: sample.accuracy,
}


@dataclass(frozen=True)
class RunDifference:
    """A setting's quantity in the second run against the first."""

    task: str
    setting: str
    quantity: Quantity
    is_paired: bool  #: whether it is over the samples that both have; else each run's own
    n: tuple[int, int]  #: samples of the first and of the second run
    #: one, other: latency in ms, energy in J, accuracy as the metric's mean score
    one: float
    other: float
    change: float  #: `other` / `one`; of accuracy `other` - `one`
    interval: tuple[float, float] | None  #: of `change`; None where there are too few pictures
    verdict: Verdict  #: `SAME` where the interval is within the margin; a direction where it does not hold "no change"
    run: str = ""  #: label of the second run where there are several


@dataclass(frozen=True)
class _Side:
    """One run's values [n] of a setting, and the number [n] of each one's picture."""

    values: np.ndarray
    pictures: np.ndarray


@dataclass(frozen=True)
class RunComparison:
    """Runs compared with the first of them."""

    runs: Sequence[Sweep]
    labels: Sequence[str]  #: what sets each apart
    margin: float  #: fraction by which latency and energy may change and be the same
    accuracy_margin: float  #: the same of accuracy, as a part of the metric's best score
    lines: Sequence[RunDifference]  #: of each setting and quantity that the first run shares with another one

    def content(self) -> dict[str, Any]:
        """The content of `comparison.json`."""
        margins = {"margin": self.margin, "accuracy_margin": self.accuracy_margin}
        return {"schema_version": 1, **margins, "runs": list(self.labels), "lines": [asdict(e) for e in self.lines]}

    def sentences(self) -> list[str]:
        """What is printed below the lines: counts of verdicts, names of the runs, drift, and other conditions."""
        counts = Counter(each.verdict for each in self.lines).most_common()
        found = [", ".join(f"{count} {verdict}" for verdict, count in counts)]
        found.append(f"A: {self.labels[0]}" + (f"; B: {self.labels[1]}" if len(self.runs) == 2 else ""))
        if (drift := max(_drift_of(self.runs[0], run) for run in self.runs[1:])) > 0:
            found.append(
                f"latency intervals are widened by the drift allowance, {drift:.0%}: the longer over the shorter time "
                "of a control setting, minus 1"
            )
        for key in dict.fromkeys(each.key for each in self.runs[0].settings if each.result.is_reference):
            if any(line.setting == key for line in self.lines):
                found.append(f"{key} is the reference: the model as it is")
        conditions = other_conditions([each.result for run in self.runs for each in run.settings])
        return [*found, *(f"differs: {condition}" for condition in conditions)]


def compare_runs(runs: Sequence[Sweep], labels: Sequence[str], margin: float, accuracy_margin: float) -> RunComparison:
    """Each run against the first; margins as in RunComparison, intervals hold for all runs together.

    Raises:
        ResultsError: a run shares no setting with the first, or a task is scored by two metrics.
    """
    first, *others = runs
    lines = [
        # Of two runs alone it is clear which one is meant.
        replace(line, run=label if len(others) > 1 else "")
        for label, run in zip(labels[1:], others, strict=True)
        for line in _compare(first, run, margin, accuracy_margin, TAIL / len(others))
    ]
    return RunComparison(runs, labels, margin, accuracy_margin, lines)


def _compare(one: Sweep, other: Sweep, margin: float, accuracy_margin: float, tail: float) -> list[RunDifference]:
    """A line for each setting that both runs have, and each quantity that both measured."""
    sides = [{(each.task, each.key): each.result for each in run.settings} for run in (one, other)]
    shared = [place for place in sides[0] if place in sides[1]]
    if not shared:
        raise ResultsError("the two runs have no setting of one task in common; give runs of the same task and knobs")
    for task, key in shared:
        metrics = {side[task, key].metric for side in sides}
        if len(metrics) > 1:
            raise ResultsError(f"{task} is scored by {' and by '.join(sorted(metrics))}; rescore one run")
    drift = _drift_of(one, other)
    lines = []
    for quantity, read in READ.items():
        found = [(*place, _sides(sides[0][place], sides[1][place], read)) for place in shared]
        present = [(task, key, each) for task, key, each in found if each is not None]
        for task, key, (first, second, is_paired) in present:
            best = sides[0][task, key].metric_best
            lines.append(
                _line(
                    task, key, quantity, first, second, is_paired=is_paired, best=best, tail=tail / len(present),
                    drift=drift if "latency" in quantity else 0.0,
                    margin=accuracy_margin * best if quantity == "accuracy" else margin,
                )
            )  # fmt: skip
    return lines


def _drift_of(one: Sweep, other: Sweep) -> float:
    """The larger drift of two runs, as a fraction; 0 where neither read any."""
    return max(_largest_drift(run) for run in (one, other))


def _sides(
    one: SettingResult, other: SettingResult, read: Callable[[SampleResult], float | None]
) -> tuple[_Side, _Side, bool] | None:
    """The values of both, of the same samples in the same order where both have the same questions; None where one of
    them has none.
    """
    known = [
        {sample.sample_id: (sample, value) for sample in each.per_sample_results if (value := read(sample)) is not None}
        for each in (one, other)
    ]
    if not known[0] or not known[1]:
        return None
    shared = sorted(known[0].keys() & known[1].keys())
    is_paired = bool(shared) and all(is_same_question(known[0][at][0], known[1][at][0]) for at in shared)
    sides = []
    for own in known:
        kept = [own[at] for at in (shared if is_paired else sorted(own))]
        pictures = [picture_of(sample) for sample, _ in kept]
        sides.append(_Side(np.array([value for _, value in kept]), np.unique(pictures, return_inverse=True)[1]))
    return sides[0], sides[1], is_paired


def _line(
    task: str, setting: str, quantity: Quantity, one: _Side, other: _Side,
    *, is_paired: bool, best: float, tail: float, drift: float, margin: float,
) -> RunDifference:  # fmt: skip
    ends: tuple[float, float] | None
    if quantity == "accuracy":
        first, second = float(one.values.mean()), float(other.values.mean())
        change, ends = second - first, _accuracy_interval(one, other, is_paired, best, tail)
        limits, none = (-margin, margin), 0.0
    else:
        is_tail = quantity == "P95 latency"
        first, second = (float(np.percentile(s.values, 95) if is_tail else s.values.mean()) for s in (one, other))
        change = second / first
        if is_tail:
            ends = _tail_ratio(one, other, tail)
        else:
            sides = one.values, one.pictures, other.values, other.pictures
            ends = mean_ratio(*sides, tail, is_paired=is_paired)
        ends = None if ends is None else (ends[0] / (1 + drift), ends[1] * (1 + drift))
        limits, none = (1 / (1 + margin), 1 + margin), 1.0
    return RunDifference(
        task, setting, quantity, is_paired, (len(one.values), len(other.values)), first, second, change, ends,
        verdict_of(ends, limits, none, WORDS[quantity]),
    )  # fmt: skip


def verdict_of(
    ends: tuple[float, float] | None, same: tuple[float, float], none: float, words: tuple[Verdict, Verdict]
) -> Verdict:
    """`SAME` where an interval is inside `same`, else the word for its side of `none`, else `CANNOT TELL`."""
    if ends is None:
        return "CANNOT TELL"
    if same[0] <= ends[0] and ends[1] <= same[1]:
        return "SAME"
    return words[0] if ends[1] < none else words[1] if ends[0] > none else "CANNOT TELL"


def _accuracy_interval(one: _Side, other: _Side, is_paired: bool, best: float, tail: float) -> tuple[float, float]:
    """Paired: of the mean difference; else from each one's own interval, distances added in squares (MOVER)."""
    if is_paired:
        differences = (other.values - one.values).tolist()
        return bounded_mean_interval(differences, one.pictures.tolist(), best, -best, tail=tail) or (-best, best)
    (low, high), (other_low, other_high) = (
        bounded_mean_interval(side.values.tolist(), side.pictures.tolist(), best, tail=tail) or (0.0, best)
        for side in (one, other)
    )
    first, second = one.values.mean(), other.values.mean()
    change = float(second - first)
    return (
        change - math.hypot(second - other_low, high - first),
        change + math.hypot(other_high - second, first - low),
    )


def mean_ratio(
    one: np.ndarray,
    pictures: np.ndarray,
    other: np.ndarray,
    other_pictures: np.ndarray,
    tail: float,
    *,
    is_paired: bool,
) -> tuple[float, float] | None:
    """Interval of mean(other) / mean(one), both above 0, by Fieller's theorem over pictures.

    It holds the ratios r for which the mean of other - r * one is within Student's t of 0; unpaired, the covariance is
    0 and the degrees of freedom those of the smaller side. The lower end is 0 where the samples set none. None for
    fewer than 6 pictures, or where it has no upper end.
    """
    groups = min(len(np.unique(pictures)), len(np.unique(other_pictures)))
    if groups < FEWEST_PICTURES:
        return None
    means, residuals = (one.mean(), other.mean()), []
    for values, numbers, mean in zip((one, other), (pictures, other_pictures), means, strict=True):
        own = np.bincount(numbers, weights=values - mean) / len(values)
        residuals.append(own * math.sqrt(len(own) / (len(own) - 1)))
    t2 = float(stats.t.isf(tail, groups - 1)) ** 2
    first = float(means[0] ** 2 - t2 * (residuals[0] @ residuals[0]))
    mixed = float(means[0] * means[1] - (t2 * (residuals[0] @ residuals[1]) if is_paired else 0.0))
    last = float(means[1] ** 2 - t2 * (residuals[1] @ residuals[1]))
    if first <= 0:
        return None
    root = math.sqrt(max(mixed**2 - first * last, 0.0))
    # A ratio of times or energies is above 0 whatever the residuals: below that the interval has no lower end.
    return max((mixed - root) / first, 0.0), (mixed + root) / first


def _tail_ratio(one: _Side, other: _Side, tail: float) -> tuple[float, float] | None:
    """Interval of the ratio of two P95: from those of each, whose ends fail with half of `tail` each."""
    ends = [tail_interval(side.values[first_of_each(side.pictures)], 95, tail / 2) for side in (one, other)]
    if ends[0] is None or ends[1] is None:
        return None
    return ends[1][0] / ends[0][1], ends[1][1] / ends[0][0]


def _largest_drift(run: Sweep) -> float:
    """The control setting's longer time over its shorter one, minus 1; 0 where none was read."""
    ratios = drift_ratios(each.result for each in run.settings)
    return max((max(ratio, 1 / ratio) - 1 for ratio in ratios), default=0.0)
