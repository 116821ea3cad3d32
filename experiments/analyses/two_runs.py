"""Sides against the first: ratios of times, energies and memory, differences of accuracies, verdicts.

A side is a run, or several of the same settings. What is compared are the samples of the settings that all runs have,
in pairs: absolute times, so that a machine that was slower in one run shows. Whether that is the side or the run is
said by the variance between runs. Intervals of single settings hold together with 95 % (Bonferroni); those of the lines
over all settings, by which one acts, alone.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy import stats

from experiment_core_utils.knobs.variant import reference_meaning
from experiment_core_utils.primitives.contrasts import ScoreContrasts
from experiment_core_utils.primitives.replication import Component, Level
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.sample_result import SampleResult
from experiment_core_utils.saved_results.rescoring import other_conditions
from experiment_core_utils.tasks.registry import score_name
from experiments.analyses.knobs.conclusion import voiding_caveats
from experiments.analyses.knobs.run_variance import other_load, stated_run_deviation
from experiments.analyses.shared_samples import Cells, SharedSamples, with_common_samples
from experiments.analyses.sweeps import Sweep, load_sweep
from experiments.fitting.run_ratios import POWER, chance_of_same, log_ratio, runs_for_same
from experiments.fitting.verdicts import TAIL, fewest_for, first_of_each, tail_interval

Verdict = Literal["FASTER", "SLOWER", "LESS", "MORE", "BETTER", "WORSE", "SAME", "IDENTICAL", "CANNOT TELL"]
Quantity = Literal["latency", "P95 latency", "energy", "memory", "accuracy"]

# What a side does by its change of a quantity.
SAYS: Mapping[Quantity, str] = {
    "latency": "takes {} times as long as A",
    "energy": "uses {} times A's energy",
    "memory": "needs {} times A's memory",
    "accuracy": "changes {score} by {}",
}
# Change of a ratio that is SAME where no other is given; of accuracy it is ACCURACY_MARGIN.
RATIO_MARGIN = 0.02
# What a quantity below and above that of the first run is called.
WORDS: Mapping[Quantity, tuple[Verdict, Verdict]] = {
    "latency": ("FASTER", "SLOWER"),
    "P95 latency": ("FASTER", "SLOWER"),
    "energy": ("LESS", "MORE"),
    "memory": ("LESS", "MORE"),
    "accuracy": ("WORSE", "BETTER"),
}


def _log_latency(sample: SampleResult) -> float | None:
    """Mean over the sample's runs of the log of the total time in ms; None where it was not timed."""
    return float(np.mean([math.log(run.T_total) for run in sample.runs])) if sample.runs else None


# The logs of what is compared as a ratio.
LOGS: Mapping[Quantity, Callable[[SampleResult], float | None]] = {
    "latency": _log_latency,
    "energy": lambda sample: math.log(sample.energy_j) if sample.energy_j else None,
}


@dataclass(frozen=True)
class RunDifference:
    """A setting's quantity in the second side against the first; of several settings also that of all together."""

    task: str  #: empty for all settings together, where they are of several tasks
    setting: str  #: key; `all 12 settings`
    quantity: Quantity
    is_pooled: bool  #: whether it is over all settings; of a single setting it is
    n: int  #: samples that all runs have, once for each setting; settings of memory
    pictures: int  #: settings of memory
    #: one, other: latency in ms and energy in J, geometric means; memory in bytes; accuracy as the metric's mean score,
    #: over all settings as a part of its best one
    one: float
    other: float
    change: float  #: `other` / `one`; of accuracy `other` - `one`
    #: of `change`; of memory its range over runs; None where there are too few pictures, of memory other samples
    interval: tuple[float, float] | None
    #: `SAME` where the interval is within the margin; a direction where it does not hold "no change"; `IDENTICAL` where
    #: every answer is the same text with the same score, which says nothing of other samples
    verdict: Verdict
    #: `interval` as if runs of one side were equally fast; None of P95, memory and accuracy
    interval_of_samples: tuple[float, float] | None = None
    run_deviation: float | None = None  #: standard deviation of the log of a run's speed; None as above
    chance_of_same: float | None = None  #: that so precise a comparison of equal sides says `SAME`; None as above
    #: whether `SAME` can be said with enough samples: what else varies, such as runs, leaves less than the margin; None
    #: as above
    can_be_same: bool | None = None
    num_samples: int | None = None  #: samples, each once for all settings, of `IDENTICAL`; None of other verdicts
    levels: tuple[Level, ...] = ("sample", "picture")  #: that the verdict rests on
    run: str = ""  #: label of the second side where there are several
    score: str = "accuracy"  #: what the metric's scores are called; `score` where those of several differ

    @property
    def change_text(self) -> str:
        """Such as `0.930 [0.901, 0.960]`; with a sign for accuracy, and without the range of memory."""
        form = "+.3f" if self.quantity == "accuracy" else ".3f"
        # Not minus zero.
        change, *ends = (f"{each + 0.0:{form}}" for each in (self.change, *(self.interval or ())))
        return f"{change} [{', '.join(ends)}]" if ends and self.quantity != "memory" else change

    def sentence(self, *, is_void: bool) -> str:
        """What the second side does by it, with the verdict where no side is INVALID."""
        if self.verdict == "IDENTICAL":
            return f"answers are identical on these {counted(self.num_samples or 0, 'sample')}"
        return SAYS[self.quantity].format(self.change_text, score=self.score) + ("" if is_void else f": {self.verdict}")


def title_of(quantity: Quantity, lines: Sequence[RunDifference]) -> str:
    """What a quantity of these lines is called where they are shown together."""
    scores = {line.score for line in lines if line.quantity == quantity == "accuracy"}
    return quantity if not scores else scores.pop() if len(scores) == 1 else "score"


@dataclass(frozen=True)
class RunComparison:
    """Sides compared with the first of them."""

    sides: Sequence[Sequence[Sweep]]  #: the runs of each
    labels: Sequence[str]  #: what sets each side apart
    margin: float  #: fraction by which latency, energy and memory may change and be the same
    accuracy_margin: float  #: the same of accuracy, as a part of the metric's best score
    between_runs: float | None  #: as given: standard deviation of the log of a run's speed
    lines: Sequence[RunDifference]  #: of each setting and quantity that all runs share, and of all settings together
    notes: Sequence[str]  #: what else is to be known of the sides

    @property
    def names(self) -> list[str]:
        """What sides are called in sentences: A and B, or A and the labels of several others."""
        return ["A", "B"] if len(self.sides) == 2 else ["A", *self.labels[1:]]

    @property
    def voided_by(self) -> list[str]:
        """What makes a side INVALID, by the rules of a conclusion, and which side it is."""
        found: dict[str, tuple[str, list[str]]] = {}
        for name, runs in zip(self.names, self.sides, strict=True):
            for run in runs:
                for kind, sentence in voiding_caveats(run.settings).items():
                    found.setdefault(kind, (sentence, []))[1].append(name)
        return [f"INVALID: {sentence} ({', '.join(dict.fromkeys(names))})" for sentence, names in found.values()]

    @property
    def is_slower(self) -> bool:
        """Whether the latency of all settings together got longer, of any side."""
        return any(line.verdict == "SLOWER" for line in self.lines if line.is_pooled and line.quantity == "latency")

    @property
    def headlines(self) -> list[str]:
        """A sentence for each further side: what it changes over all settings, each with its verdict.

        Without verdicts, and said to be INVALID, where a side is.
        """
        found, is_void = [], bool(self.voided_by)
        for run in dict.fromkeys(line.run for line in self.lines):
            pooled = [each for each in self.lines if each.run == run and each.is_pooled]
            if pooled:
                says = [each.sentence(is_void=is_void) for each in pooled]
                void = "INVALID: " if is_void else ""
                found.append(f"{void}{run or 'B'} {'; '.join(says)} ({pooled[0].setting})")
        return found or ["nothing is compared: no sample has a time or a score in all runs"]

    @property
    def shown(self) -> list[RunDifference]:
        """The lines that are printed: of answers that are identical in all settings that of all together alone."""
        whole = {(each.run, each.quantity) for each in self.lines if each.is_pooled and each.verdict == "IDENTICAL"}
        return [each for each in self.lines if each.is_pooled or (each.run, each.quantity) not in whole]

    def content(self) -> dict[str, Any]:
        """The content of `comparison.json`."""
        given = {key: getattr(self, key) for key in ("margin", "accuracy_margin", "between_runs")}
        sides = [{"label": label, "runs": len(runs)} for label, runs in zip(self.labels, self.sides, strict=True)]
        lines = [asdict(line) for line in self.lines]
        found = {"headlines": self.headlines, "voided_by": self.voided_by, "sides": sides, "lines": lines}
        return {"schema_version": 2, **given, **found, "notes": list(self.notes)}

    def sentences(self) -> list[str]:
        """What is printed below the lines: counts of verdicts, names of the sides, what each pooled line rests on."""
        counts = Counter(each.verdict for each in self.shown if not each.is_pooled).most_common()
        by_setting = ", ".join(f"{count} {verdict}" for verdict, count in counts)
        found = [f"by setting: {by_setting}"] if counts else []
        found.append(f"A: {self.labels[0]}" + (f"; B: {self.labels[1]}" if len(self.sides) == 2 else ""))
        pooled = [line for line in self.lines if line.is_pooled and line.run_deviation is not None]
        return [*found, *(self._undecided(each) for each in pooled if each.verdict == "CANNOT TELL"), *self.notes]

    def _undecided(self, line: RunDifference) -> str:
        """Why nothing is shown of a line over all settings, and what would help."""
        found = f"{line.quantity}: {line.run or 'B'} {line.change - 1:+.1%} against A"
        if line.interval is None or line.interval_of_samples is None:
            pictures = counted(line.pictures, "picture")
            return f"{found}, CANNOT TELL: {pictures}, and one run a side needs {fewest_for(None)}"
        widths = [math.log(high / low) for low, high in (line.interval, line.interval_of_samples)]
        deviation = line.run_deviation or 0.0
        if line.interval_of_samples[0] > 1 or line.interval_of_samples[1] < 1:
            found += f" on these samples, which cannot be told from a change between two runs ({deviation:.1%} each)"
        if line.can_be_same is False:
            found += f", CANNOT TELL, and SAME is out of reach: +-{widths[0] / 2:.1%} is more than {self.margin:.1%}"
        else:
            found += f", CANNOT TELL: of two equal sides it would say SAME in {line.chance_of_same or 0.0:.0%} of cases"
        # What adds the more to the variance: runs, or samples.
        if widths[0] ** 2 < 2 * widths[1] ** 2:
            return f"{found}, in more with more samples"
        runs = runs_for_same(deviation, self.margin, TAIL / (len(self.sides) - 1))
        return f"{found}, in {POWER:.0%} with --run and --repeats {max(runs, 5)}" if runs else found


def runs_in(folder: Path) -> tuple[Sweep, ...]:
    """The runs of a side: those in the folder's sub-folders `1`, `2`, ..., or the folder as one run.

    Raises:
        ResultsError: as `load_sweep`.
    """
    inside = folder.iterdir() if folder.is_dir() else ()
    numbered = sorted((each for each in inside if each.is_dir() and each.name.isdecimal()), key=lambda it: int(it.name))
    return tuple(map(load_sweep, numbered or [folder]))


def compare_runs(
    sides: Sequence[Sequence[Sweep]],
    labels: Sequence[str],
    margin: float,
    accuracy_margin: float,
    between_runs: float | None = None,
    *,
    is_paired: bool = False,
) -> RunComparison:
    """Each side against the first; margins as in RunComparison.

    Args:
        between_runs: as in RunComparison; None for 2 %, on a CPU for 7 %, or more beside other load.
        is_paired: whether run r of both sides was measured next to each other.

    Raises:
        ResultsError: the sides share no setting or no question, or a task is scored by two metrics.
    """
    first, *others = sides
    lines: list[RunDifference] = []
    notes: list[str] = []
    for label, other in zip(labels[1:], others, strict=True):
        shared = SharedSamples(first, other)
        usual = stated_run_deviation(shared.results)
        stated = 0.0 if shared.is_identical else usual if between_runs is None else between_runs
        pair = _Pair(shared, margin, accuracy_margin, stated, TAIL / len(others), is_paired)
        # Of two sides alone it is clear which one is meant.
        name = label if len(others) > 1 else ""
        lines += [replace(line, run=name) for line in pair.lines()]
        notes += pair.notes(name or "B")
    results = [setting.result for runs in sides for run in runs for setting in run.settings]
    references = dict.fromkeys(each.key for each in first[0].settings if each.result.is_reference)
    notes += [f"{key} is the reference: {reference_meaning(key)}" for key in references]
    notes += [f"differs: {condition}" for condition in other_conditions(results)]
    return RunComparison(sides, labels, margin, accuracy_margin, between_runs, lines, list(dict.fromkeys(notes)))


@dataclass(frozen=True)
class _Part:
    """A setting, or all settings together, of a quantity."""

    task: str
    setting: str
    is_pooled: bool
    tail: float  #: probability with which each end of its interval may fail
    cells: Cells


@dataclass(frozen=True)
class _Pair:
    """Two sides, by how their lines are judged."""

    shared: SharedSamples
    margin: float
    accuracy_margin: float
    between_runs: float  #: of one run a side
    tail: float  #: probability with which each end of an interval of all settings may fail
    is_paired: bool

    def lines(self) -> list[RunDifference]:
        """Quantity by quantity: each setting, then all."""
        return [*self._ratios("latency"), *self._tails(), *self._ratios("energy"), *self._memory(), *self._accuracies()]

    def notes(self, name: str) -> list[str]:
        """What is to be known of the two; `name` is the second one's."""
        found = []
        if self.shared.in_part:
            first, second, shared = self.shared.num_samples
            found.append(f"samples: A has {first}, {name} {second}, and the {shared} that are in all runs are compared")
            if self._memory():
                found.append("memory is of the longest request of a run: no verdict where samples differ")
        if self.shared.is_identical:
            found.append(f"A and {name} are the same measurement: every sample is equal")
        elif self.shared.is_one_run_a_side:
            found.append(
                f"one run a side: its speed is taken to vary by {self.between_runs:.1%} (--between_runs), with other "
                f"processes on {other_load(self.shared.results):.0%} of the CPUs, so that "
                f"{'SAME can' if self._can_be_same else 'SAME cannot'} be said of times and energies within "
                f"{self.margin:.1%}; knobprof compare --run measures how much"
            )
        if self._has_no_times:
            found.append(
                "latency has no verdict: the requests of a run waited for each other, or it measured one setting after "
                "another; use knobprof compare --run with --repeats 5"
            )
        elif self.shared.cells(LOGS["latency"]) is not None and not self._tails():
            need = fewest_for(95, self.tail / len(self.shared.places) / 2)
            found.append(f"P95 is left out: it needs one run a side, and {need} pictures in every setting")
        return found

    @property
    def _can_be_same(self) -> bool:
        """Whether what is stated of runs leaves less than the margin."""
        half = float(stats.norm.isf(self.tail)) * math.sqrt(2) * self.between_runs
        return half < math.log1p(self.margin)

    @property
    def _has_no_times(self) -> bool:
        """Whether samples of one run a side tell nothing of times: they waited for each other or were not in rounds."""
        shared = self.shared
        is_open = shared.waited_for_each_other or shared.is_blocked
        return shared.is_one_run_a_side and is_open and not shared.is_identical

    def _ratios(self, quantity: Quantity) -> list[RunDifference]:
        cells = self.shared.cells(LOGS[quantity])
        if cells is None:
            return []
        lines = []
        for part in _parts(cells, self.shared.places, self.tail):
            own = part.cells
            more, degrees = self._of_settings(quantity, own.numbers)
            found = log_ratio(
                own.one,
                own.other,
                own.pictures,
                is_paired=self.is_paired,
                between=self.between_runs,
                more=more,
                more_degrees=degrees,
            )
            found = None if quantity == "latency" and self._has_no_times else found
            line = self._line(part, quantity, None if found is None else found.interval(part.tail))
            if found is not None:
                is_of_runs = not self.shared.is_one_run_a_side
                line = replace(
                    line,
                    can_be_same=found.half_width_of_runs(part.tail) < math.log1p(self.margin),
                    levels=("sample", "picture", "run") if is_of_runs else ("sample", "picture"),
                    interval_of_samples=found.interval_within_runs(part.tail),
                    run_deviation=found.run_deviation,
                    chance_of_same=chance_of_same(found, self.margin, part.tail),
                )
            lines.append(line)
        return lines

    def _line(self, part: _Part, quantity: Quantity, ends: tuple[float, float] | None) -> RunDifference:
        """The line of a ratio, whose cells are logs."""
        own = part.cells
        one, other = math.exp(own.one.mean()), math.exp(own.other.mean())
        same = 1 / (1 + self.margin), 1 + self.margin
        return RunDifference(
            part.task, part.setting, quantity, part.is_pooled, own.one.shape[1], own.num_pictures, one, other,
            other / one, ends, verdict_of(ends, same, 1.0, WORDS[quantity]),
        )  # fmt: skip

    def _of_settings(self, quantity: Quantity, numbers: Sequence[int]) -> tuple[float, float]:
        """The variance of the mean log ratio of these settings by what each has alone, and its degrees of freedom.

        It is 0 for several runs, which show it, and for times in rounds. Energies are of windows, whose spread over
        passes is known.
        """
        shared, size = self.shared, len(numbers)
        if shared.is_identical or not shared.is_one_run_a_side:
            return 0.0, math.inf
        if quantity == "energy" and (passes := [shared.passes_of(number) for number in numbers]) and all(passes):
            variances = [Component.of_passes(np.log([own])).deviation ** 2 for sides in passes for own in sides]
            return sum(variances) / size**2, sum(len(own) - 1.0 for own in passes[0]) / 2 * size
        return 0.0, math.inf

    def _tails(self) -> list[RunDifference]:
        """P95 of the first run of each sample: each end from those of both sides, each failing with half the tail."""
        cells = self.shared.cells(lambda sample: math.log(sample.runs[0].T_total) if sample.runs else None)
        if cells is None or not self.shared.is_one_run_a_side or self._has_no_times:
            return []
        lines = []
        for number in cells.numbers:
            tail, own = self.tail / len(cells.numbers), cells.at(number)
            kept = first_of_each(own.pictures)
            ends = [tail_interval(each[0, kept], 95, tail / 2) for each in (own.one, own.other)]
            if ends[0] is None or ends[1] is None:
                return []
            # The ends hold for these two runs; that runs differ widens them.
            wider = math.sqrt(2) * self.between_runs * float(stats.norm.isf(tail))
            found = math.exp(ends[1][0] - ends[0][1] - wider), math.exp(ends[1][1] - ends[0][0] + wider)
            highest = [np.percentile(each, [95], axis=1) for each in (own.one, own.other)]
            part = _Part(*self.shared.places[number], False, tail, replace(own, one=highest[0], other=highest[1]))
            line = self._line(part, "P95 latency", (1.0, 1.0) if self.shared.is_identical else found)
            lines.append(replace(line, n=own.one.shape[1], pictures=len(kept)))
        return lines

    def _memory(self) -> list[RunDifference]:
        """By its range over runs, between which it hardly varies; without a verdict where samples differ."""
        cells, lines = self.shared.memory(), []
        for part in [] if cells is None else _parts(cells, self.shared.places, self.tail):
            one, other = part.cells.one.mean(axis=1), part.cells.other.mean(axis=1)
            ends = math.exp(other.min() - one.max()), math.exp(other.max() - one.min())
            is_of_shared = self.shared.in_part.isdisjoint(part.cells.numbers)
            lines.append(self._line(part, "memory", ends if is_of_shared else None))
        return lines

    def _accuracies(self) -> list[RunDifference]:
        cells = self.shared.cells(lambda sample: sample.accuracy)
        if cells is None:
            return []
        metrics = [(each.metric, each.metric_best) for each in self.shared.runs[0]]
        places, has_one_answer = self.shared.places, self.shared.has_one_answer
        return accuracy_lines(cells, places, metrics, has_one_answer, self.tail, self.accuracy_margin)


def _parts(cells: Cells, places: Sequence[tuple[str, str]], tail: float) -> list[_Part]:
    """The settings, then all together; a single one is all."""
    numbers = cells.numbers
    if len(numbers) == 1:
        return [_Part(*places[numbers[0]], True, tail, cells)]
    tasks = {places[number][0] for number in numbers}
    task = tasks.pop() if len(tasks) == 1 else ""
    settings = [_Part(*places[number], False, tail / len(numbers), cells.at(number)) for number in numbers]
    return [*settings, _Part(task, f"all {len(numbers)} settings", True, tail, cells)]


def accuracy_lines(
    cells: Cells,
    places: Sequence[tuple[str, str]],
    metrics: Sequence[tuple[str, float]],
    has_one_answer: Callable[[int], bool],
    tail: float,
    accuracy_margin: float,
) -> list[RunDifference]:
    """By `ScoreContrasts` of the differences; of all settings together as parts of the metrics' best scores.

    Args:
        cells: scores.
        places: task and key of each setting, which are numbered by it.
        metrics: name and highest score of each setting's metric.
        has_one_answer: whether both sides have the same answers and scores at a setting.
        tail: probability with which each end of an interval of all settings may fail.
        accuracy_margin: as in RunComparison.
    """

    bests = [best for _, best in metrics]

    def line_of(part: _Part, best: float, ends: tuple[float, float] | None) -> RunDifference:
        own, margin = part.cells, accuracy_margin * best
        one, other = float(own.one.mean()), float(own.other.mean())
        line = RunDifference(
            part.task, part.setting, "accuracy", part.is_pooled, own.one.shape[1], own.num_pictures, one, other,
            other - one, ends, verdict_of(ends, (-margin, margin), 0.0, WORDS["accuracy"]),
            score=score_name(*(metrics[number] for number in own.numbers)),
        )  # fmt: skip
        if not all(map(has_one_answer, own.numbers)):
            return line
        samples = {(places[at][0], sample) for at, sample in zip(own.places, own.samples, strict=True)}
        return replace(line, verdict="IDENTICAL", num_samples=len(samples))

    lines: list[RunDifference] = []
    *parts, together = _parts(cells, places, tail)
    for task in dict.fromkeys(places[number][0] for number in cells.numbers):
        of_task = [number for number in cells.numbers if places[number][0] == task]
        # Settings are judged together, on the samples that all of them have.
        own = with_common_samples([cells.at(number) for number in of_task])
        best, tail_of_task = bests[of_task[0]], tail * len(own) / len(cells.numbers)
        found = _score_intervals(np.stack([each.change for each in own]), own[0].pictures, best, tail_of_task)
        for number, each, ends in zip(of_task, own, found, strict=True):
            lines.append(line_of(_Part(*places[number], not parts, tail_of_task, each), best, ends))
    if parts:
        scale = np.array(bests)[cells.places]
        scaled = replace(cells, one=cells.one / scale, other=cells.other / scale)
        # All settings of a sample are one value.
        names = [f"{places[at][0]} {sample}" for at, sample in zip(cells.places, cells.samples, strict=True)]
        _, first, samples = np.unique(names, return_index=True, return_inverse=True)
        changes = np.bincount(samples, weights=scaled.change) / np.bincount(samples)
        (ends,) = _score_intervals(changes[None], cells.pictures[first], 1.0, tail)
        lines.append(line_of(replace(together, cells=scaled), 1.0, ends))
    return lines


def _score_intervals(
    changes: np.ndarray, pictures: np.ndarray, best: float, tail: float
) -> list[tuple[float, float] | None]:
    """The interval of the mean of each of [S, N] changes of scores, together; None for fewer than 6 pictures."""
    found = ScoreContrasts.of(np.vstack([np.zeros((1, changes.shape[1])), changes]), pictures, best=best, reference=0)
    return [found.interval(row, 0, 1 - 2 * tail) for row in range(1, len(changes) + 1)]


def verdict_of(
    ends: tuple[float, float] | None, same: tuple[float, float], none: float, words: tuple[Verdict, Verdict]
) -> Verdict:
    """`SAME` where an interval is inside `same`, else the word for its side of `none`, else `CANNOT TELL`.

    That an interval is inside is what two one-sided tests against both margins say.
    """
    if ends is None:
        return "CANNOT TELL"
    if same[0] <= ends[0] and ends[1] <= same[1]:
        return "SAME"
    return words[0] if ends[1] < none else words[1] if ends[0] > none else "CANNOT TELL"
