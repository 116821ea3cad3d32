"""A run's settings against results of lm-eval or lmms-eval, or two of these, on the questions that both answered.

Only answers are compared: the harnesses measure no times, energy, operations or memory of a request, and of an exported
run their layout has a mean of each sample's runs, by which no two runs are told apart.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.primitives.statistics import mean_of
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.sample_result import SampleResult
from experiment_core_utils.saved_results.harness_layout import metric_key
from experiment_core_utils.tasks.answers import scored_text
from experiments.analyses.harness_results import HarnessResults, HarnessRow, HarnessTask
from experiments.analyses.knobs.grid import picture_of
from experiments.analyses.shared_samples import Cells
from experiments.analyses.sweeps import StoredSetting, Sweep
from experiments.analyses.two_runs import RunComparison, RunDifference, accuracy_lines
from experiments.fitting.verdicts import TAIL

# Samples' mean and the figure of the results file are sums in another order.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class HarnessComparison(RunComparison):
    """Two sides of which one at least is of a harness, which has no runs here."""

    voided: tuple[str, ...] = ()  #: why a side that was exported is INVALID

    @property
    def shown(self) -> list[RunDifference]:
        """All lines."""
        return list(self.lines)

    @property
    def voided_by(self) -> list[str]:
        """As of `RunComparison`, and of results that were exported."""
        return [*super().voided_by, *(f"INVALID: {sentence}" for sentence in self.voided)]


@dataclass(frozen=True)
class _Answer:
    """What one side answered to a question that both have."""

    text: str
    score: float


@dataclass(frozen=True)
class _Shared:
    """A setting's shared questions, or all those of two harnesses: by id, picture and both answers."""

    task: str
    setting: str
    best: float
    pairs: Mapping[int, tuple[str, _Answer, _Answer]]
    is_reference: bool = False  #: whether it is the run's model as it is

    @property
    def has_one_answer(self) -> bool:
        """Whether both sides have the same texts and scores."""
        return all(one == other for _, one, other in self.pairs.values())


def compare_with_harness(
    sides: Sequence[Sweep | HarnessResults], labels: Sequence[str], accuracy_margin: float, metric: str | None = None
) -> HarnessComparison:
    """The second side against the first; questions are the same where place, text and answer are.

    Args:
        accuracy_margin: as in RunComparison.
        metric: of the harness, such as `exact_match` or `exact_match,none`; None for the one that is called like the
            run's own, else for the only one.

    Raises:
        ResultsError: no question is in both sides.
        ConfigurationError: it is not clear which metric is meant, or it has no such scores.
    """
    first, second = sides
    notes: list[str] = []
    if isinstance(first, Sweep) and isinstance(second, HarnessResults):
        parts = _of_run(first, second, metric, notes)
    elif isinstance(second, Sweep) and isinstance(first, HarnessResults):
        parts = [_turned(part) for part in _of_run(second, first, metric, notes)]
    else:
        assert isinstance(first, HarnessResults) and isinstance(second, HarnessResults)
        parts = _of_two(first, second, metric)
    parts = [part for part in parts if part.pairs]
    if not parts:
        raise ResultsError(f"{labels[0]} and {labels[1]} share no question; give results of the same task and split")
    lines = accuracy_lines(
        _cells(parts),
        [(part.task, part.setting) for part in parts],
        [("score", part.best) for part in parts],
        lambda number: parts[number].has_one_answer,
        TAIL,
        accuracy_margin,
    )
    references = [part for part in parts if part.is_reference]
    tasks = [task for side in sides if isinstance(side, HarnessResults) for task in side.tasks]
    if len(references) == 1 < len(parts) and all(task.setting is None for task in tasks):
        # Theirs is mostly the model as it is: that setting is what the first sentence is about.
        lines = [replace(line, is_pooled=line.setting == references[0].setting) for line in lines[: len(parts)]]
    voided: list[str] = []
    for name, side in zip("AB", sides, strict=True):
        if isinstance(side, HarnessResults):
            notes.append(
                f"{name} is an exported run, of which answers alone are compared; give the run's own folder to compare "
                "times, joules and memory"
                if side.is_exported
                else f"{name} has no times, joules, FLOPs or memory of a request: {side.layout} measures none"
            )
            notes += [f"{name}: {sentence}" for sentence in _figures_apart(side)]
            voided += [f"{sentence} ({name})" for sentence in side.voided_by]
    runs = [(side,) if isinstance(side, Sweep) else () for side in sides]
    return HarnessComparison(runs, labels, 0.0, accuracy_margin, None, lines, notes, tuple(voided))


def _turned(part: _Shared) -> _Shared:
    pairs = {key: (picture, other, one) for key, (picture, one, other) in part.pairs.items()}
    return replace(part, pairs=pairs)


def _cells(parts: Sequence[_Shared]) -> Cells:
    cells = [(at, key, pair) for at, part in enumerate(parts) for key, pair in part.pairs.items()]
    pictures = np.unique([f"{parts[at].task} {pair[0]}" for at, _, pair in cells], return_inverse=True)[1]
    first_scores = np.array([[first.score for _, _, (_, first, _) in cells]])
    second_scores = np.array([[second.score for _, _, (_, _, second) in cells]])
    return Cells(
        first_scores,
        second_scores,
        np.array([at for at, _, _ in cells]),
        np.array([key for _, key, _ in cells]),
        pictures,
    )


def _answer_of(row: HarnessRow, key: str) -> _Answer:
    return _Answer(row.response, row.scores[key])


# --- a run and a harness ----------------------------------------------------------------------------------------------


def _of_run(run: Sweep, theirs: HarnessResults, metric: str | None, notes: list[str]) -> list[_Shared]:
    """The parts of each setting; of several that were exported each is beside the one of its key."""
    parts, found = [], list[str]()
    for key in dict.fromkeys(task.setting for task in theirs.tasks):
        own = replace(theirs, tasks=tuple(task for task in theirs.tasks if task.setting == key))
        settings = [setting for setting in run.settings if key in (None, setting.key)]
        parts += _of_settings(settings, own, metric, found)
    notes += dict.fromkeys(found)
    return parts


def _of_settings(
    run: Sequence[StoredSetting], theirs: HarnessResults, metric: str | None, notes: list[str]
) -> list[_Shared]:
    parts = []
    for task in dict.fromkeys(setting.task for setting in run):
        settings = [setting for setting in run if setting.task == task]
        samples = {sample.sample_id: sample for setting in settings for sample in setting.result.per_sample_results}
        by_name = {their.name: shared_questions(samples, their.rows) for their in theirs.tasks}
        # Their name of the task may be another one.
        sizes = {name: len(rows) for name, rows in by_name.items()}
        most = max(theirs.tasks, key=lambda their: (their.name == task and sizes[task] > 0, sizes[their.name]))
        if not sizes[most.name]:
            continue
        ours = settings[0].result
        key = _metric_of(most, metric, ",".join(metric_key(ours.metric, theirs.layout)))
        _check_scores(most, key, ours.metric_best)
        scored = shared_questions(samples, most.rows, key)
        parts += [_of_setting(setting, scored, key) for setting in settings]
        prompts = [(samples[at].metadata.prompt, row.prompt) for at, row in scored.items()]
        num_other = sum(ours_is is not None and ours_is.strip() != theirs_is.strip() for ours_is, theirs_is in prompts)
        notes.append(
            f"{task}: {counted(len(samples), 'question')} of the run, {len({row.doc_id for row in most.rows})} of "
            f"{theirs.layout}'s {most.name}, and the {len(scored)} that are in both are compared; the run is scored by "
            f"{ours.metric}, theirs by {key}" + (f"; prompts differ in {num_other}" if num_other else "")
        )
    return parts


def _of_setting(setting: StoredSetting, rows: Mapping[int, HarnessRow], key: str) -> _Shared:
    pairs = {
        sample.sample_id: (
            picture_of(sample),
            _Answer(scored_text(sample.pred, sample.answer), sample.accuracy),
            _answer_of(rows[sample.sample_id], key),
        )
        for sample in setting.result.per_sample_results
        if sample.sample_id in rows and sample.accuracy is not None
    }
    result = setting.result
    return _Shared(setting.task, setting.key, result.metric_best, pairs, is_reference=result.is_reference)


def shared_questions(
    samples: Mapping[int, SampleResult], rows: Sequence[HarnessRow], key: str | None = None
) -> dict[int, HarnessRow]:
    """The row of each sample's question: of those with its text and its answer the one at its place in the split, else
    the only one.

    Args:
        key: metric that a row must have a score of; None for any row.
    """
    by_text: dict[str, list[HarnessRow]] = {}
    for row in rows:
        if key is None or key in row.scores:
            for text in set(map(_folded, row.texts)):
                by_text.setdefault(text, []).append(row)
    paired = {}
    for sample_id, sample in samples.items():
        question = _folded(sample.metadata.question)
        # Prompts of lmms-eval have the question and an instruction.
        same = by_text.get(question) or [
            row
            for text, rows_of_text in by_text.items()
            if question and question in text
            for row in rows_of_text
            if row.texts == (row.prompt,)
        ]
        same = [row for row in same if _has_answer(sample, row)]
        at_place = [row for row in same if row.doc_id == sample_id]
        by_id = {row.doc_id: row for row in at_place or same}
        if len(by_id) == 1:
            (paired[sample_id],) = by_id.values()
    return paired


def _has_answer(sample: SampleResult, row: HarnessRow) -> bool:
    """Whether a row's target has an answer of the sample in whole words; that of a choice may be a letter or a number,
    which says nothing.
    """
    metadata, target = sample.metadata, _folded(row.target)
    patterns = (rf"(?<!\w){re.escape(_folded(answer))}(?!\w)" for answer in metadata.answers)
    return bool(metadata.options) or any(re.search(pattern, target) for pattern in patterns)


def _folded(text: str) -> str:
    return " ".join(text.lower().split())


# --- two harnesses ----------------------------------------------------------------------------------------------------


def _of_two(first: HarnessResults, second: HarnessResults, metric: str | None) -> list[_Shared]:
    parts = []
    for one, other in product(first.tasks, second.tasks):
        settings = {each for each in (one.setting, other.setting) if each is not None}
        if one.name != other.name or len(settings) > 1:
            continue
        key = _metric_of(one, metric, None, other.figures)
        rows = [{(row.doc_id, row.question): row for row in task.rows if key in row.scores} for task in (one, other)]
        for task in (one, other):
            _check_scores(task, key, 1.0)
        pairs = {
            row.doc_id: (row.question, _answer_of(row, key), _answer_of(rows[1][at], key))
            for at, row in rows[0].items()
            if at in rows[1]
        }
        parts.append(_Shared(one.name, settings.pop() if settings else key, 1.0, pairs))
    return parts


# --- their figures ----------------------------------------------------------------------------------------------------


def _metric_of(task: HarnessTask, asked: str | None, own: str | None, also_in: Mapping[str, Any] | None = None) -> str:
    """Name and filter of the metric to compare; raises ConfigurationError where that is not clear."""
    scored = dict.fromkeys(key for row in task.rows for key in row.scores)
    known = [key for key in scored if also_in is None or key in also_in]
    wanted = [key for key in known if asked in (key, key.partition(",")[0])] if asked is not None else known
    if asked is None and own in known:
        return str(own)
    if len(wanted) == 1:
        return wanted[0]
    names = ", ".join(known) or "none that is a number for each sample"
    raise ConfigurationError(f"{task.name} of the harness has the metrics {names}; name one of them by --metric")


def _check_scores(task: HarnessTask, key: str, best: float) -> None:
    """Raises ConfigurationError where scores are not like the run's."""
    values = [row.scores[key] for row in task.rows if key in row.scores]
    if key.partition(",")[0] in task.lower_is_better or not all(0 <= value <= best for value in values):
        raise ConfigurationError(f"{key} of {task.name} is no score from 0 to {best:g}; name another one by --metric")


def _figures_apart(theirs: HarnessResults) -> list[str]:
    """Figures of a results file that are not the mean of its samples, a sentence each."""
    sentences = []
    for task in theirs.tasks:
        for key, figure in task.figures.items():
            values = [row.scores[key] for row in task.rows if key in row.scores]
            mean = mean_of(values)
            if mean is not None and abs(mean - figure) > _ROUNDING:
                file = f"{key} of {task.name} is {figure:.4f} in the results file"
                sentences.append(f"{file}, and its samples' mean is {mean:.4f}")
    return sentences
