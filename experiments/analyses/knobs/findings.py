"""What E2 finds of a task in sentences: the setting to take, what each knob changes, and what the samples cannot show.

Sentences follow E2's verdicts; a difference that they do not show is called noise, or left to what cannot be shown.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from experiment_core_utils.sweep.statistical_power import accuracy_shown, samples_for_accuracy
from experiments.analyses.charts.chart import change_in_ms, milliseconds, thinned
from experiments.analyses.knobs.effects import Effects, LevelMean, is_beyond_drift, is_beyond_noise
from experiments.analyses.knobs.grid import TaskGrid, knob_title
from experiments.analyses.knobs.objectives import LATENCY_MEAN, Objectives
from experiments.analyses.knobs.records import FrontAnalysis, TaskAnalysis, present

# Accuracy that a faster setting may lose, as a fraction of the metric's best score.
ACCURACY_MARGIN = 0.01
# Difference in accuracy, as such a fraction, of which the number of samples that show it is named.
DETECTED = 0.05
# Settings whose answers are compared in pairs.
_MOST_SETTINGS = 12
NOTHING_RIGHT = (
    "no answer was right at any setting; compare pred with answers in the CSV of samples (--metric changes the "
    "scoring, of own data --prompt_template the prompt)"
)
ONE_SETTING = "one setting; a front needs two or more to choose between"
# Above this fraction of answers that are empty or could not be read, accuracy says nothing of the settings.
_MOST_UNREADABLE = 0.5
FRONT_WORDS = {"established": "established", "within_noise": "within noise", "possible": "possible", "dominated": "-"}


def conclusion(analysis: TaskAnalysis, random_weights: bool) -> list[str]:
    """Three lines at most: the fastest setting near the best accuracy, each knob's changes, what is not shown.

    They are of mean latency; none for a single setting, and the reason alone where there is no mean latency.
    """
    if len(analysis.grid.points) < 2:
        return []
    each = _by_mean_latency(analysis)
    if each is None:
        reasons = [found.reason for found in analysis.fronts if not isinstance(found, FrontAnalysis)]
        return [f"no conclusion: {reasons[0]}"] if reasons else []
    lines = []
    unreadable = None if random_weights else unreadable_answers(analysis.grid)
    no_accuracy = random_weights or unreadable is not None
    if unreadable is not None:
        lines.append(f"no conclusion: {unreadable}")
    elif not random_weights and not each.found.accuracy.any():
        lines.append(f"no conclusion: {NOTHING_RIGHT}")
    elif not random_weights and each.found.no_verdict is None:
        lines.append(f"conclusion: {_fastest_near_best(each.found)}")
    if each.found.no_verdict is None:
        changes = _knob_changes(analysis, each.found.drift_allowance, no_accuracy)
        lines += [f"knobs: {'; '.join(changes)}"] if changes else []
    unknown = [] if unreadable is not None else list(_not_shown(each.found, random_weights))
    return [*lines, f"not shown: {'; '.join(unknown)}"] if unknown else lines


def study_findings(analyses: Sequence[TaskAnalysis], random_weights: bool) -> list[str]:
    """What the command prints: each task's conclusion, then how sure its front is."""
    lines = []
    for analysis in analyses:
        is_alone = len(analysis.grid.points) < 2
        own = [f"no conclusion: {ONE_SETTING}"] if is_alone else conclusion(analysis, random_weights)
        is_void = random_weights or unreadable_answers(analysis.grid) is not None
        own += [] if is_void else [front_counts(each) for each in present(analysis)]
        lines += [f"{analysis.grid.task}: {each}" for each in own] if len(analyses) > 1 else own
    return lines


def front_places(analysis: TaskAnalysis) -> Mapping[str, str]:
    """For each setting its place on the front of accuracy and mean latency, in words; empty where there is none."""
    each = mean_latency_front(analysis)
    return {} if each is None else {point.key: FRONT_WORDS[point.status] for point in each.front.points}


def mean_latency_front(analysis: TaskAnalysis) -> FrontAnalysis | None:
    """The front that a column of tables is of; None without mean latencies, and where accuracy says nothing."""
    each = _by_mean_latency(analysis)
    if each is None or accuracy_says_nothing(analysis.grid) is not None:
        return None
    return each if each.found.accuracy.any() else None


def unreadable_answers(grid: TaskGrid) -> str | None:
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
        "or --stop, or the scoring by `rescore`"
    )


def accuracy_says_nothing(grid: TaskGrid) -> str | None:
    """Why nothing can be concluded from a task's accuracy, of one setting or of several; None where something can."""
    nothing_right = np.isfinite(grid.scores).any() and not np.nansum(grid.scores)
    return unreadable_answers(grid) or (NOTHING_RIGHT if nothing_right else None)


def _by_mean_latency(analysis: TaskAnalysis) -> FrontAnalysis | None:
    return next((each for each in present(analysis) if each.found.of == LATENCY_MEAN), None)


def _best(found: Objectives) -> int:
    """The most accurate setting, of equally accurate ones the fastest."""
    return int(np.lexsort((found.cost, -found.accuracy))[0])


def _fastest_near_best(found: Objectives) -> str:
    """The fastest setting that loses little, against the reference; whether others that lose little are surely slower.

    Where the reference was not measured, against the slowest setting, with a word on that.
    """
    best, margin = _best(found), ACCURACY_MARGIN * found.best
    near = np.flatnonzero(found.accuracy >= found.accuracy[best] - margin)
    fastest = int(near[np.argmin(found.cost[near])])
    time = milliseconds(float(found.cost[fastest]))
    text = (
        f"the fastest within {margin:g} of the best accuracy ({found.accuracy[best]:.3f}) is "
        f"{found.points[fastest].key} with {found.accuracy[fastest]:.3f} and {time} a "
        f"request, {_against(found, fastest)}"
    )
    slower = found.cheaper(fastest, len(found.points))[near]
    unsure = len(near) - 1 - int(slower.sum())
    return f"{text}; {unsure} of {len(near) - 1} others as accurate are not surely slower" if unsure else text


def _against(found: Objectives, at: int) -> str:
    """A setting's mean latency as a fraction of the reference's."""
    if found.reference is None:
        part, whole = 100 * found.cost[at] / found.cost.max(), "the slowest setting's time"
        text = f"{part:.0f} % of {whole}" if part < 100 else "and no setting is slower"
        return f"{text} (the reference, the model as it is, was not measured)"
    if at == found.reference:
        return "the reference, which is the model as it is"
    part, own = 100 * found.cost[at] / found.cost[found.reference], found.points[found.reference].key
    accuracy = f"{found.accuracy[found.reference]:.3f}"
    return f"{part:.0f} % of the time of the reference ({own}, {accuracy})"


def _knob_changes(analysis: TaskAnalysis, drift: float, no_accuracy: bool) -> list[str]:
    """What each knob's way from its smallest value to its largest changes in mean latency and in accuracy."""
    scale, decimals, unit = (100.0, 1, " points") if analysis.grid.best == 1 else (1.0, 3, "")
    latency, accuracy = analysis.effects[LATENCY_MEAN.name], analysis.effects["accuracy"]
    changes = []
    for knob in dict.fromkeys(mean.knob for mean in latency.level_means):
        first, last = ends(latency, knob)
        change_of_time = change_in_ms(last.change) + _noise(latency, knob, drift)
        text = f"{knob_title(knob)} {first.value} → {last.value}: {change_of_time}"
        if not no_accuracy:
            # Not minus zero.
            change = round(scale * ends(accuracy, knob)[1].change, decimals) + 0.0
            text += f", accuracy {change:+.{decimals}f}{unit}{_noise(accuracy, knob)}"
        changes.append(text)
    return changes


def ends(found: Effects, knob: str) -> tuple[LevelMean, LevelMean]:
    """The figure at the first and at the last value of a knob."""
    own = [mean for mean in found.level_means if mean.knob == knob]
    return own[0], own[-1]


def _noise(found: Effects, knob: str, drift: float = 0.0) -> str:
    first, last = ends(found, knob)
    # The ends may be within the drift where a value between them is not.
    is_shown = knob in moving_knobs(found) and (drift == 0 or is_beyond_drift(first.mean, last.mean, drift))
    return "" if is_shown else " (noise)"


def moving_knobs(found: Effects) -> set[str]:
    """The knobs that change a figure by more than noise."""
    return {term.knobs[0] for term in found.terms if len(term.knobs) == 1 and is_beyond_noise(term)}


def _not_shown(found: Objectives, random_weights: bool) -> Iterator[str]:
    """What the samples are too few for."""
    if found.no_verdict is not None:
        yield f"which setting is faster: the {found.no_verdict}"
    if random_weights:
        yield "accuracy: the weights are random"
        return
    best = _best(found)
    level = np.flatnonzero(~found.more_accurate(best, len(found.points)))
    cheapest = int(level[np.argmin(found.cost[level])])
    if found.accuracy[cheapest] < found.accuracy[best] - ACCURACY_MARGIN * found.best:
        yield (
            f"that {found.points[cheapest].key} ({found.accuracy[cheapest]:.3f}, "
            f"{milliseconds(float(found.cost[cheapest]))}) is less accurate than the best"
        )
    scores, n = found.scores[thinned(len(found.scores), _MOST_SETTINGS)], found.num_score_samples
    changed = max(float(np.median([(one != other).mean() for one, other in combinations(scores, 2)])), 0.01)
    least, needed = accuracy_shown(n, changed), samples_for_accuracy(DETECTED, changed)
    if least is None or least > ACCURACY_MARGIN:
        below = (
            f"differences in accuracy of settings that agree on {1 - changed:.0%} of the scores, as the median pair"
            if least is None
            else f"differences below {least * found.best:.2g} in accuracy"
        )
        more = "" if needed is None or needed <= n else f" ({DETECTED * found.best:g} takes about {needed})"
        yield f"{below}, with {n} samples{more}"


def change_sentences(analysis: TaskAnalysis) -> Iterator[str]:
    """Statements about what each knob changes in the latency between its ends, where that is beyond noise."""
    found = [each for each in present(analysis) if each.found.of.unit == "ms"]
    for each in [each for each in found if each.found.no_verdict is None][:1]:
        effects, label = analysis.effects[each.found.of.name], each.found.of.label
        beyond = moving_knobs(effects)
        knobs = [knob for knob in dict.fromkeys(mean.knob for mean in effects.level_means) if knob in beyond]
        between = [ends(effects, knob) for knob in knobs]
        # A change that is no larger than the run's drift may be the drift.
        drift = each.found.drift_allowance
        larger = [(first, last) for first, last in between if is_beyond_drift(first.mean, last.mean, drift)]
        if larger:
            at = each.found.reference
            whole = None if at is None else float(each.found.cost[at])
            beside = "" if whole is None else f" (in % of the reference's {milliseconds(whole)})"
            changes = "; ".join(_between(first, last, whole or first.mean) for first, last in larger)
            yield f"What changes the {label}{beside}: {changes}."
        elif effects.terms and not knobs:
            yield f"No knob changes the {label} beyond noise."


def _between(first: LevelMean, last: LevelMean, whole: float) -> str:
    low, high = last.change_ci95
    share = 100 * last.change / whole
    return (
        f"{knob_title(last.knob)} {first.value} → {last.value}: {change_in_ms(last.change)}, {share:+.0f} % "
        f"[{change_in_ms(low)} to {change_in_ms(high)}]"
    )


def front_sentences(analysis: TaskAnalysis) -> Iterator[str]:
    """Statements about the best setting, a cheaper one, and how sure the front of accuracy and mean latency is.

    Where there are no mean latencies they are of the first cost that there is, which they name.
    """
    found = present(analysis)
    each = _by_mean_latency(analysis) or next(iter(found), None)
    if each is None or len(each.found.points) < 2:
        return
    reason = accuracy_says_nothing(analysis.grid)
    if reason is not None or not each.found.accuracy.any():
        yield f"No setting is the most accurate: {reason or NOTHING_RIGHT}."
        return
    yield _best_and_cheaper(each)
    yield front_counts(each)


def front_counts(each: FrontAnalysis) -> str:
    """How many settings are on a front, and how many of them surely."""
    on = [point for point in each.front.points if point.on_front]
    sure = sum(point.status == "established" for point in on)
    return (
        f"On the front of accuracy and {each.found.of.label} are {len(on)} of {len(each.front.points)} settings, "
        f"{sure} established and {len(on) - sure} only within noise."
    )


def _best_and_cheaper(each: FrontAnalysis) -> str:
    best = max(each.front.points, key=lambda point: (point.accuracy, -point.cost))
    places = {point.key: at for at, point in enumerate(each.found.points)}
    beaten = each.found.more_accurate(places[best.key], len(places))
    # Nothing is surely lost with a setting that the best one is not confidently more accurate than.
    level = [point for point in each.front.points if point.key == best.key or not beaten[places[point.key]]]
    cheapest = min(level, key=lambda point: point.cost)
    text = f"The most accurate setting is {best.key} with {best.accuracy:.3f} on {each.found.num_score_samples} samples"
    if cheapest.key == best.key:
        is_cheapest = all(point.cost >= best.cost for point in each.front.points)
        lower = f"lower {each.found.of.label}"
        return f"{text}; {f'none has a {lower}' if is_cheapest else f'all of {lower} are confidently less accurate'}."
    if not each.found.cheaper(places[cheapest.key], len(places))[places[best.key]]:
        return f"{text}; none of those not confidently less accurate has surely a lower {each.found.of.label}."
    at = each.found.reference
    whole, of = (best.cost, "its") if at is None else (float(each.found.cost[at]), "the reference's")
    return (
        f"{text}; the cheapest that is not confidently less accurate is {cheapest.key} ({cheapest.accuracy:.3f}), at "
        f"{100 * cheapest.cost / whole:.0f} % of {of} {each.found.of.label}."
    )
