"""What E2 concludes of a task: the setting to take, what each knob changes, and what voids the run.

The setting to take is the cheapest by mean latency of those that are surely faster than the model as it is (where that
was not measured, than the most accurate setting) and surely not worse by ACCURACY_MARGIN.

A run is INVALID by the caveats of which the kind says so (`CaveatKind.voids`): other load, throttling, too many
disturbed or failed samples, settings without a result, and settings that were executed in different ways.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiment_core_utils.config.parts import QuestionConfig
from experiment_core_utils.primitives.contrasts import (
    ACCURACY_MARGIN,
    PairedContrasts,
    ScoreContrasts,
    Word,
    word_of,
)
from experiment_core_utils.primitives.statistics import CONFIDENCE
from experiment_core_utils.records.conclusion import Comparison, Conclusion, KnobChange, TypeChange
from experiment_core_utils.records.ledger import Ledger, plan_path, read_plan
from experiment_core_utils.records.price_list import PriceList
from experiment_core_utils.records.setting_result import SettingResult
from experiment_core_utils.saved_results.terminal import worst_of_each_kind
from experiments.analyses.caveats import AnalysisCaveat
from experiments.analyses.knobs.effects import Effects, LevelMean
from experiments.analyses.knobs.fronts import compared_with, replacing_p_values
from experiments.analyses.knobs.grid import TaskGrid, knob_title
from experiments.analyses.knobs.objectives import LATENCY_MEAN, NoObjectives, Objectives
from experiments.analyses.knobs.prices import price_list
from experiments.analyses.knobs.records import FrontAnalysis, TaskAnalysis, present
from experiments.analyses.sweeps import StoredSetting, mixed_executions

NOTHING_RIGHT = (
    "no answer was right at any setting; compare pred with answers in the CSV of samples (--metric changes the "
    "scoring, of own data --prompt_template the prompt)"
)
ONE_SETTING = "one setting was measured; a choice needs two or more"
RANDOM_WEIGHTS = "the weights are random, so that accuracy says nothing"
# Above this fraction of answers that are empty or could not be read, accuracy says nothing of the settings.
_MOST_UNREADABLE = 0.5
# Of a difference that is there, with so many samples as are named; and more than so many are not.
_POWER_QUANTILE, _MOST_SAMPLES = 0.8416, 1_000_000


def conclude(analysis: TaskAnalysis, settings: Sequence[StoredSetting] = ()) -> Conclusion:
    """The conclusion of a task.

    Args:
        settings: the stored settings of the grid, and perhaps others; none for a table, which nothing voids.
    """
    grid, own = analysis.grid, _of_task(analysis.grid, settings)
    voided, why = _objections(grid, own)
    each = _by_mean_latency(analysis)
    if why is None and len(grid.points) < 2:
        why = ONE_SETTING
    if why is None and each is None:
        why = next(found.reason for found in analysis.fronts if isinstance(found, NoObjectives))
    changes = () if each is None or voided else _changes(analysis, has_accuracy=why is None)
    if each is None or why is not None:
        found = Conclusion(grid.task, why, tuple(voided), changes, metric_best=grid.best)
    else:
        found = _concluded(each.found, changes, _num_rounds(each.found, [one.result for one in own]))
        found = replace(found, prices=price_list(grid))
    return replace(found, controls=grid.controls, score=grid.score_name)


def _of_task(grid: TaskGrid, settings: Sequence[StoredSetting]) -> list[StoredSetting]:
    return [setting for setting in settings if setting.task == grid.task]


def _objections(grid: TaskGrid, own: Sequence[StoredSetting]) -> tuple[dict[str, str], str | None]:
    """Kind -> sentence of what voids the run, and why no setting may be named; None where that is open."""
    voided = voiding_caveats(own)
    is_random = any(each.result.provenance.experimental_variables.random_weights for each in own)
    no_accuracy = RANDOM_WEIGHTS if is_random else accuracy_says_nothing(grid)
    return voided, "; ".join([*voided.values(), *([] if no_accuracy is None else [no_accuracy])]) or None


def lines_of(conclusions: Sequence[Conclusion]) -> list[str]:
    """The lines of each task's conclusion, behind its name where there are several."""
    several = len(conclusions) > 1
    return [f"{each.task}: {line}" if several else line for each in conclusions for line in each.lines]


def why_invalid(conclusions: Sequence[Conclusion]) -> dict[str, str]:
    """Task -> why its run is INVALID, of the tasks of which it is."""
    return {conclusion.task: conclusion.sentence for conclusion in conclusions if conclusion.voided_by}


def invalid_tasks(grids: Iterable[TaskGrid], settings: Sequence[StoredSetting]) -> dict[str, str]:
    """The same as `why_invalid` of the tasks' conclusions, without analysing any cost."""
    checked = [(grid.task, *_objections(grid, _of_task(grid, settings))) for grid in grids]
    return why_invalid([Conclusion(task, why, tuple(voided)) for task, voided, why in checked])


def answered(grid: TaskGrid, question: QuestionConfig, invalid: str | None) -> PriceList:
    """The prices of a task that answer a question.

    Args:
        invalid: why the run is INVALID; None where it is not.
    """
    return price_list(grid, question, why=invalid or accuracy_says_nothing(grid))


def _concluded(found: Objectives, changes: tuple[KnobChange, ...], num_rounds: int | None) -> Conclusion:
    against = compared_with(found)
    times, scores = found.cost_contrasts(against), found.score_contrasts(against)
    reason = found.no_verdict or times.no_verdict or scores.no_verdict
    if reason is not None:
        return Conclusion(found.task, reason)
    p_values = np.maximum(*replacing_p_values(found, against))
    sure = np.flatnonzero(p_values <= 1 - CONFIDENCE).tolist()
    leads = _leads(found, times, scores, against)
    # The cheapest of the sure ones, else what lacks least to a yes.
    others = [at for at in range(len(leads)) if at != against]
    # One that costs no less is never a yes, however alike it is.
    others = [at for at in others if found.cost[at] < found.cost[against]] or others
    nearest = min(sure, key=lambda at: found.cost[at]) if sure else max(others, key=lambda at: leads[at])
    compared = _comparison(found, times, scores, nearest, against)
    taken = nearest if sure else against
    slower = found.cost_contrasts(taken).better(taken)
    as_good = scores.not_worse(against)
    as_fast = [at for at in range(len(slower)) if at not in (taken, against) and as_good[at] and not slower[at]]
    return Conclusion(
        found.task,
        changes=changes,
        setting=found.points[taken].key,
        against=found.points[against].key,
        is_reference=found.reference is not None,
        against_time_ms=float(found.cost[against]),
        against_accuracy=float(found.accuracy[against]),
        word=compared.word,
        nearest=compared,
        as_fast=tuple(found.points[at].key for at in as_fast),
        metric_best=found.best,
        accuracy_margin=ACCURACY_MARGIN * found.best,
        num_samples=found.num_score_samples,
        num_pictures=found.num_pictures,
        num_rounds=num_rounds,
        samples_needed=_samples_needed(compared, times, scores, nearest, against),
    )


def _leads(found: Objectives, times: PairedContrasts, scores: ScoreContrasts, against: int) -> np.ndarray:
    """[S], how far each setting is from being surely faster, or from being surely not worse, whichever is farther:
    its lead in standard errors less the critical value of the family.
    """
    # By the mean of ratios and by the mean that is paid, whichever is less.
    faster = np.minimum(times.means[against] - times.means, np.log(found.cost[against] / found.cost))
    not_worse = scores.means - scores.means[against] + ACCURACY_MARGIN * found.best
    leads = [
        np.divide(ahead, errors, out=np.full(len(ahead), -np.inf), where=errors > 0) - contrasts.critical()
        for ahead, errors, contrasts in (
            (faster, times.errors(against), times),
            (not_worse, scores.errors(against), scores),
        )
    ]
    return np.asarray(np.minimum(*leads))


def _comparison(found: Objectives, times: PairedContrasts, scores: ScoreContrasts, at: int, against: int) -> Comparison:
    faster = times.word(at, against)
    if faster in ("yes", "likely") and found.cost[at] >= found.cost[against]:
        # By the mean of ratios, and not by the mean that is paid.
        faster = "can't tell"
    return Comparison(
        setting=found.points[at].key,
        time_ms=float(found.cost[at]),
        accuracy=float(found.accuracy[at]),
        faster=faster,
        time_ratio=times.ratio(at, against),
        time_ratio_ci95=times.interval(at, against),
        not_worse=scores.word_not_worse(at, against),
        accuracy_difference=scores.difference(at, against),
        accuracy_difference_ci95=scores.interval(at, against),
    )


def _samples_needed(
    found: Comparison, times: PairedContrasts, scores: ScoreContrasts, at: int, against: int
) -> int | None:
    """Samples that would decide what is not decided, were the means as they are, in POWER of all cases.

    None where nothing is open, and where no number of samples, or too large a one, would.
    """
    most = 0.0
    if found.word in ("likely", "can't tell") and found.faster != "yes":
        most = _samples_for(times, abs(math.log(found.time_ratio)), at, against)
    if found.word in ("likely", "can't tell") and found.not_worse != "yes":
        gap = abs(found.accuracy_difference + ACCURACY_MARGIN * scores.best)
        most = max(most, _samples_for(scores, gap, at, against))
    if not 0 < most <= _MOST_SAMPLES:
        return None
    digits = max(10 ** (len(str(math.ceil(most))) - 2), 1)
    return math.ceil(most / digits) * digits


def _samples_for(contrasts: PairedContrasts | ScoreContrasts, gap: float, at: int, against: int) -> float:
    """Samples n at which the error of a contrast, (V / n + A / n^2 + R)^(1/2), is small enough."""
    added = float(np.broadcast_to(contrasts.replication.variances(at), len(contrasts.means))[against])
    variance = ((contrasts.residuals[at] - contrasts.residuals[against]) ** 2).sum() / contrasts.num_samples
    room = (gap / (contrasts.critical() + _POWER_QUANTILE)) ** 2 - added
    if room <= 0:
        return math.inf
    return (variance + math.sqrt(variance**2 + 4 * contrasts.added_squares * room)) / (2 * room)


def _num_rounds(found: Objectives, results: Sequence[SettingResult]) -> int | None:
    """Runs of samples that all settings have, one a sample in a table; None where settings were not in rounds."""
    if "round" not in found.replication.levels:
        return None
    if not results:
        return found.num_cost_samples
    runs = [{sample.sample_id: len(sample.runs) for sample in result.per_sample_results} for result in results]
    return sum(min(own.get(sample_id, 0) for own in runs) for sample_id in runs[0])


def _changes(analysis: TaskAnalysis, *, has_accuracy: bool) -> tuple[KnobChange, ...]:
    """What each knob's way from its smallest value to its largest changes; none where there is no verdict."""
    each = _by_mean_latency(analysis)
    if each is None or each.found.no_verdict is not None:
        return ()
    latency, accuracy = analysis.effects[LATENCY_MEAN.name], analysis.effects["accuracy"]
    knobs = tuple(dict.fromkeys(mean.knob for mean in latency.level_means))
    by_type = _changes_by_type(analysis.grid, accuracy, knobs) if has_accuracy else {}
    changes = []
    for knob in knobs:
        first, last = ends(latency, knob)
        changes.append(
            KnobChange(
                knob=knob_title(knob),
                first=str(first.value),
                last=str(last.value),
                time_ms=last.change,
                time_word=_word(latency, knob),
                accuracy=ends(accuracy, knob)[1].change if has_accuracy else None,
                accuracy_word=_word(accuracy, knob) if has_accuracy else None,
                by_type=by_type.get(knob, ()),
            )
        )
    return tuple(changes)


def _changes_by_type(grid: TaskGrid, found: Effects, knobs: Sequence[str]) -> dict[str, tuple[TypeChange, ...]]:
    """Of each knob the changes by type of question, which together are one family (Bonferroni).

    Empty where there is one type, and of an incomplete grid, where settings with a value of a knob differ in others.
    """
    inside = [at for at, point in enumerate(grid.points) if point.in_grid]
    scores = grid.scores[inside]
    known = np.isfinite(scores).all(axis=0)
    types, pictures = np.array(grid.question_types), np.array(grid.pictures)
    names = sorted(set(types[known])) if len(types) else []
    family = len(names) * len(knobs)
    if len(names) < 2 or not found.is_full_grid:
        return {}

    def change(knob: str, name: str) -> TypeChange:
        columns = known & (types == name)
        # Settings with the first value of the knob, and in the same order those with its last and the same others.
        others = [other for other in knobs if other != knob]
        order = sorted(range(len(inside)), key=lambda at: [str(grid.points[inside[at]].value(each)) for each in others])
        values = [grid.points[inside[at]].value(knob) for at in order]
        first, last = (
            scores[[at for at, value in zip(order, values, strict=True) if value == end.value]][:, columns]
            for end in ends(found, knob)
        )
        contrasts = ScoreContrasts.of(
            np.stack([first.mean(axis=0), last.mean(axis=0)]),
            pictures[columns],
            best=grid.best,
            change=_changing_together(last - first),
        )
        chance = min(contrasts.p_value(0, 1), contrasts.p_value(1, 0))
        return TypeChange(
            question_type=str(name),
            num_samples=int(columns.sum()),
            accuracy=contrasts.difference(1, 0),
            accuracy_ci95=contrasts.interval(1, 0, 1 - (1 - CONFIDENCE) / family),
            accuracy_word=word_of(min(chance * family, 1.0), 1.0),
        )

    return {knob: tuple(change(knob, name) for name in names) for knob in knobs}


def _changing_together(changes: np.ndarray) -> float:
    """In which fraction of K pairs of settings the score of a sample changes at a time, from its [K, n] changes.

    It is the variance over samples of the mean over pairs, over the mean of the pairs' variances: 1 / K where each pair
    changes by itself, and 1 where all change together, or no sample changes otherwise than the others.
    """
    own = changes - changes.mean(axis=1, keepdims=True)
    apart = float((own**2).sum())
    together = float((own.sum(axis=0) ** 2).sum())
    return 1.0 if apart < 1e-12 else min(max(together / apart, 1.0) / len(changes), 1.0)


def ends(found: Effects, knob: str) -> tuple[LevelMean, LevelMean]:
    """The figure at the first and at the last value of a knob."""
    own = [mean for mean in found.level_means if mean.knob == knob]
    return own[0], own[-1]


def _word(found: Effects, knob: str) -> Word:
    """How sure it is that a knob changes the figure; nothing is sure where the interval between its ends contains 0."""
    low, high = ends(found, knob)[1].change_ci95
    chances = [term.family_p_value for term in found.terms if term.knobs == (knob,) and term.family_p_value is not None]
    return word_of(chances[0], 1.0) if chances and not low <= 0 <= high else "can't tell"


def voiding_caveats(settings: Sequence[StoredSetting]) -> dict[str, str]:
    """Kind -> sentence of each caveat that makes a run INVALID; empty for a VALID one."""
    found = [
        (setting.name, caveat)
        for setting in settings
        for caveat in (*setting.result.provenance.caveat_records, *_failed_samples(setting.result))
        if caveat.voids
    ]
    sentences = worst_of_each_kind(found, len(settings))
    whole = [
        _unfinished(folder, [each.result for each in settings if each.path.parent == folder])
        for folder in dict.fromkeys(each.path.parent for each in settings)
    ]
    reason = mixed_executions([each.result for each in settings])
    if reason is not None:
        whole.append(AnalysisCaveat.of("mixed_executions", reason=reason))
    return sentences | {each.kind: each.sentence for each in whole if each is not None}


def invalid_lines(sentences: Iterable[str]) -> list[str]:
    """What is printed before anything that is concluded from an INVALID run; nothing for a VALID one."""
    return [f"INVALID: {each}" for each in sentences]


def _failed_samples(result: SettingResult) -> list[AnalysisCaveat]:
    failed, number = result.num_failed_samples, result.num_failed_samples + result.num_samples
    is_served = result.provenance.experimental_variables.endpoint is not None
    kind = "requests_failed" if is_served else "samples_failed"
    return [AnalysisCaveat.of(kind, num_failed=failed, num_samples=number)] if failed else []


def _unfinished(folder: Path, results: Sequence[SettingResult]) -> AnalysisCaveat | None:
    """The caveat of a folder whose last run has settings without a whole result that did not fail."""
    stopped = sum(result.precision is not None and result.precision.stopped_by == "stopped" for result in results)
    left, number = stopped, len(results)
    if plan_path(folder).is_file():
        plan = read_plan(folder)
        ledger, number = Ledger(folder, plan.fingerprint), len(plan.keys)
        left = max(sum(not ledger.has_result_file(key) and ledger.failure(key) is None for key in plan.keys), stopped)
    figures = {"num_left": left, "num_settings": number, "folder": str(folder)}
    return AnalysisCaveat.of("unfinished", **figures) if left else None


def front_words(analysis: TaskAnalysis) -> Mapping[str, Word]:
    """For each setting how sure it is that it is on the front of accuracy and mean latency; empty without a front."""
    each = mean_latency_front(analysis)
    return {} if each is None else {point.key: point.word for point in each.front.points}


def mean_latency_front(analysis: TaskAnalysis) -> FrontAnalysis | None:
    """The front that a column of tables is of; None without mean latencies, and where accuracy says nothing."""
    return None if accuracy_says_nothing(analysis.grid) is not None else _by_mean_latency(analysis)


def _by_mean_latency(analysis: TaskAnalysis) -> FrontAnalysis | None:
    return next((each for each in present(analysis) if each.found.of == LATENCY_MEAN), None)


def accuracy_says_nothing(grid: TaskGrid) -> str | None:
    """Why nothing can be concluded from a task's accuracy, of one setting or of several; None where something can."""
    nothing_right = np.isfinite(grid.scores).any() and not np.nansum(grid.scores)
    return _unreadable_answers(grid) or (NOTHING_RIGHT if nothing_right else None)


def _unreadable_answers(grid: TaskGrid) -> str | None:
    """Why accuracy says nothing where most answers, of all settings or of the most accurate one, could not be read."""
    fractions = np.array(grid.unreadable)
    if not fractions.size:
        return None
    totals = np.nansum(grid.scores, axis=1)
    if max(fractions.mean(), fractions[totals.argmax()]) <= _MOST_UNREADABLE:
        return None
    low, high = (f"{100 * each:.0f}" for each in (fractions.min(), fractions.max()))
    return (
        f"{low if low == high else f'{low} to {high}'} % of the answers could not be read as an answer, or were cut; "
        "read pred in the CSV of samples and the final prompt in --dry_run, then change the prompt, --max_new_tokens "
        "or --stop, or the scoring by `tasks rescore`"
    )
