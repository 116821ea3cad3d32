"""Rescoring of saved results by another metric, and paired comparisons of their settings.

No model is loaded and torch is not imported: a result file contains each answer beside what it is scored against.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from experiment_core_utils.finishing.setting_content import score_part
from experiment_core_utils.finishing.setting_summary import summarise_accuracy
from experiment_core_utils.knobs.setting import setting_of
from experiment_core_utils.l_results_csv_cleaning import read_results, write_tables
from experiment_core_utils.meters.correct_answers import AnsweredRequest, with_correct_answers
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError, SampleError
from experiment_core_utils.primitives.statistics import fraction_of
from experiment_core_utils.records.requests import ScoredContinuation
from experiment_core_utils.records.sample_result import SampleResult, is_same_question
from experiment_core_utils.records.setting_result import (
    RescoredResult,
    Rescoring,
    SettingResult,
    save_setting_result,
    setting_key,
)
from experiment_core_utils.saved_results.result_caveats import with_caveats
from experiment_core_utils.tasks.answers import scored_text
from experiment_core_utils.tasks.comparison import PairedComparison, ScoredSample, compare_paired
from experiment_core_utils.tasks.interface import Answer, Metric, scored, scores_of
from experiment_core_utils.tasks.registry import get_metric, list_metrics, scored_by

AnyResult = TypeVar("AnyResult", bound=SettingResult)
# Where a result's provenance says under which conditions it was made, beside the knobs.
_CONDITIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model": ("model", "name"),
        "model revision": ("model", "revision"),
        **{
            name: ("experimental_variables", name)
            for name in ("prompt_template", "system_prompt", "no_chat_template", "max_new_tokens", "precision")
        },
    }
)


@dataclass(frozen=True)
class Rescored:
    """The results of a folder before and after, in the same order, and where the new files are."""

    before: tuple[SettingResult, ...]
    after: tuple[RescoredResult, ...]
    output: Path
    csv_paths: tuple[Path, ...]


@dataclass(frozen=True)
class Compared:
    """The settings of one task and split in a folder, each against `baseline`, by setting key."""

    task: str
    baseline: str
    metric: str
    comparisons: Mapping[str, PairedComparison]
    other_conditions: tuple[str, ...]  #: what differs between the results beside the knobs
    results: tuple[SettingResult, ...]  #: those settings and the baseline


def rescore(folder: Path, metric: Metric, output: Path | None) -> Rescored:
    """Score the answers of every result in `folder` again and write the results into `output`.

    Latencies and all else that does not depend on the metric is taken over as it is.

    Args:
        output: None for `rescored_<metric>` inside `folder`.

    Raises:
        ConfigurationError: `output` is a file or contains measured files, or the metric cannot score these answers.
        ResultsError: no results there, or not of this schema.
    """
    if output is not None and output.exists() and not output.is_dir():
        raise ConfigurationError(f"--output {output} is a file; give a folder")
    before = read_results(folder)
    target = folder / f"rescored_{metric.name}" if output is None else output
    _check_holds_nothing_measured(target, before)
    after = {name: rescored_result(result, name, metric) for name, result in before.items()}
    for name, result in after.items():
        save_setting_result(result, target / name)
    csv_paths = [write_tables(results, task, target) for task, results in by_task(after.values()).items()]
    return Rescored(tuple(before.values()), tuple(after.values()), target, tuple(csv_paths))


def rescored_result(result: SettingResult, name: str, metric: Metric) -> RescoredResult:
    """A result with all that depends on the metric made anew, and where it came from."""
    if getattr(metric, "scored", None) not in (None, scored_by(result.metric)):
        raise ConfigurationError(
            f"{metric.name} cannot score {name}, which was measured for {result.metric}: measure it with "
            f"--metric {metric.name}"
        )
    samples = result.per_sample_results
    answers = [stored_answer(sample) for sample in samples]
    origin = Rescoring(file=name, metric_before=result.metric, accuracy_before=result.accuracy)
    try:
        scoring = scored(answers, metric)
    except SampleError as error:
        raise ConfigurationError(f"{metric.name} cannot score {name}: {error}; choose another metric") from error
    accuracy = summarise_accuracy(answers, scoring, metric)
    anew = dict(accuracy) | {
        "energy": with_correct_answers(
            result.energy,
            accuracy,
            [
                AnsweredRequest(sample.energy_j, score.value, answer.image_id)
                for sample, answer, score in zip(samples, answers, scoring.scores, strict=True)
            ],
        ),
        "share_failed": fraction_of(result.num_failed_samples, len(samples) + result.num_failed_samples),
        "per_sample_results": [
            sample.with_keys(**dict(score_part(score))) for sample, score in zip(samples, scoring.scores, strict=True)
        ],
        "rescored": origin,
    }
    return with_caveats(RescoredResult.of(**(result.set_keys() | anew)))


def stored_answer(sample: SampleResult) -> Answer:
    """The answer of a stored sample; options are stored only where the question has them."""
    metadata = sample.metadata
    return Answer(
        prediction=scored_text(sample.pred, sample.answer),
        references=tuple(metadata.answers),
        options=tuple(metadata.options),
        answer_index=metadata.answer_index,
        question_type=sample.question_type,
        image_id=metadata.image_id,
        scores=tuple(ScoredContinuation(**dict(each)) for each in sample.continuations or ()),
    )


def by_task(results: Iterable[AnyResult]) -> dict[str, list[AnyResult]]:
    """Results by the name of their task, in the order in which tasks are met."""
    groups: dict[str, list[AnyResult]] = defaultdict(list)
    for result in results:
        groups[result.provenance.task.name].append(result)
    return dict(groups)


def compare_folder(folder: Path, baseline: str | None) -> list[Compared]:
    """Every setting in `folder` against one, task by task.

    Args:
        baseline: key of a setting; None for the reference, else the one with all knobs at their largest.

    Raises:
        ConfigurationError: no such setting, or none has all knobs at their largest.
        ResultsError: no results there, not of this schema, or samples of one id that are different questions.
    """
    groups: dict[tuple[str, str], list[SettingResult]] = defaultdict(list)
    for result in read_results(folder).values():
        groups[result.provenance.task.name, result.provenance.task.split].append(result)
    return [_compare(task, results, baseline) for (task, _), results in groups.items()]


def _compare(task: str, results: Sequence[SettingResult], baseline: str | None) -> Compared:
    by_key = {setting_key(result): result for result in results}
    key = largest_setting(by_key) if baseline is None else baseline
    if key not in by_key:
        raise ConfigurationError(f"{task} has no setting {key!r}; give one of {', '.join(by_key)}")
    reference = by_key.pop(key)
    metric = reference.metric
    others = {result.metric for result in results} - {metric}
    if others:
        raise ResultsError(f"{task} is scored by {metric} and by {', '.join(sorted(others))}; rescore by one of them")
    comparisons = {name: compare_results(reference, result) for name, result in by_key.items()}
    return Compared(task, key, metric, comparisons, other_conditions(results), tuple(results))


def compare_results(reference: SettingResult, result: SettingResult) -> PairedComparison:
    """One setting against another, over the samples that both ran.

    The stored scores are taken, unless a score depends on which others were scored with it and the two did not run the
    same samples: then the answers that both have are scored again, on both sides with the same others.

    Raises:
        ResultsError: a sample id belongs to different questions.
    """
    sides = [{sample.sample_id: sample for sample in each.per_sample_results} for each in (reference, result)]
    shared = sorted(sides[0].keys() & sides[1].keys())
    for sample_id in shared:
        if not is_same_question(sides[0][sample_id], sides[1][sample_id]):
            raise ResultsError(
                f"sample {sample_id} is another question in {setting_key(result)} than in {setting_key(reference)}: "
                "these results are not of the same data; compare results of one run"
            )
    scores = [
        {key: ScoredSample(sample.metadata.image_id, sample.accuracy) for key, sample in side.items()} for side in sides
    ]
    name = reference.metric
    metric = get_metric(name) if name in list_metrics() else None
    if sides[0].keys() != sides[1].keys() and metric is not None and not metric.scores_each_answer:
        scores = [{**own, **scored_together(side, shared, metric)} for side, own in zip(sides, scores, strict=True)]
    return compare_paired(scores[0], scores[1], reference.metric_best)


def scored_together(samples: Mapping[int, SampleResult], ids: Sequence[int], metric: Metric) -> dict[int, ScoredSample]:
    """The scores of these samples, compared among themselves only."""
    answers = [stored_answer(samples[sample_id]) for sample_id in ids]
    scores = scores_of(answers, metric)
    return {
        sample_id: ScoredSample(answer.image_id, score.value)
        for sample_id, answer, score in zip(ids, answers, scores, strict=True)
    }


def other_conditions(results: Sequence[SettingResult]) -> tuple[str, ...]:
    """What differs between results beside the knobs, so that a difference is not of the knobs alone, as text."""
    found = []
    for name, path in _CONDITIONS.items():
        values = sorted({json.dumps(_at(result.provenance, path)) for result in results})
        if len(values) > 1:
            found.append(f"{name} ({', '.join(values)})")
    return tuple(found)


def _at(content: Any, path: Sequence[str]) -> Any:
    """The value at a path of keys; None where a result has none."""
    for key in path:
        content = getattr(content, key, None)
    return content


def largest_setting(by_key: Mapping[str, SettingResult]) -> str:
    """The reference; without one the setting that has each knob at the largest value that any has.

    A knob that a model does not have is no reason against a setting.

    Raises:
        ConfigurationError: there is neither.
    """
    reference = next((key for key, result in by_key.items() if result.is_reference), None)
    if reference is not None:
        return reference
    values = {key: setting_of(result).order for key, result in by_key.items()}
    largest = tuple(map(max, zip(*values.values(), strict=True)))
    full = [key for key, own in values.items() if own == largest]
    if not full:
        raise ConfigurationError(
            f"no setting has all knobs at their largest; give --baseline, one of {', '.join(by_key)}"
        )
    return full[0]


def _check_holds_nothing_measured(target: Path, names: Mapping[str, SettingResult]) -> None:
    """Raises ConfigurationError where a file to be written would replace one that was measured."""
    if not target.is_dir():
        return
    if any((target / name).exists() for name in names):
        found = {name: each for name, each in read_results(target).items() if name in names}
        measured = [name for name, each in found.items() if "rescored" not in (each.model_extra or {})]
        if measured:
            raise ConfigurationError(f"{target} contains measured results such as {measured[0]}; give another --output")
