"""A run's own controls: what a knob cannot touch, what the setting before leaves behind, and a placebo.

They are estimated from the rounds of a run, whose balanced orders (Williams rows) make the carry-over estimable: the
logarithm of each run's total time is setting + round + carry-over, by least squares, and the error of the carry-over is
the jackknife over pictures.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
from scipy import stats

from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.primitives.contrasts import FEWEST_PICTURES, PairedContrasts
from experiment_core_utils.primitives.statistics import CONFIDENCE
from experiment_core_utils.records.controls import Control, ControlKind
from experiment_core_utils.records.sample_result import RunTimes, SampleResult
from experiments.analyses.recorded_table import named_picture
from experiments.analyses.sweeps import StoredSetting

STAGES = {"T_vision_total": "vision time"}


def controls_of(settings: Sequence[StoredSetting]) -> tuple[Control, ...]:
    """The controls of the settings of one task that took turns; none of others."""
    placebos = [each for each in settings if each.result.is_placebo]
    own = [each for each in settings if not each.result.is_placebo]
    references = [each for each in own if each.result.is_reference]
    found = [control for stage in STAGES if (control := untouched(stage, own)) is not None]
    traces = [trace for each in settings for trace in each.result.rounds or ()]
    if all(trace.samples_per_round == 1 for trace in traces):
        # In a group of samples most runs follow one of the same setting.
        found += carry_over(settings)
    if placebos and references:
        found += _placebo(placebos[0], references[0])
    return tuple(found)


def _samples(setting: StoredSetting) -> Mapping[int, SampleResult]:
    return {sample.sample_id: sample for sample in setting.result.per_sample_results if sample.runs}


def _mean_logs(settings: Sequence[StoredSetting], time: str) -> tuple[np.ndarray, list[str]]:
    """[S, N], of samples that all settings have the mean logarithm of a time over runs, and the picture of each sample.

    A sample of which a run has no such time is left out.
    """
    rows = [_samples(each) for each in settings]
    ids = sorted(set.intersection(*(set(row) for row in rows)))
    times = [[[getattr(run, time) for run in row[at].runs] for at in ids] for row in rows]
    kept = [at for at in range(len(ids)) if all(all(row[at]) for row in times)]
    logs = np.array([[np.log(row[at]).mean() for at in kept] for row in times])
    return logs, [named_picture(ids[at], rows[0][ids[at]].metadata.image_id) for at in kept]


def untouched(stage: str, settings: Sequence[StoredSetting]) -> Control | None:
    """The two settings whose times of a stage are most surely apart, of those that differ in knobs that cannot touch
    it; None where there are none. The interval holds for all such pairs together.
    """
    idle = {knob.name for knob in all_knobs() if stage in knob.untouched_stages}

    def touching(setting: StoredSetting) -> str:
        return str({name: value for name, value in setting.setting.levels.items() if name not in idle})

    groups = [list(group) for _, group in groupby(sorted(settings, key=touching), key=touching)]
    groups = [group for group in groups if len(group) > 1]
    most, control = -1.0, None
    for group in groups:
        logs, pictures = _mean_logs(group, stage)
        if not logs.size:
            continue
        times = PairedContrasts.of(logs, pictures)
        errors = np.stack([times.errors(at) for at in range(len(group))])
        apart = np.divide(times.log_ratio, errors, out=np.zeros_like(errors), where=errors > 0)
        slow, fast = np.unravel_index(apart.argmax(), apart.shape)
        if apart[slow, fast] > most:
            most = float(apart[slow, fast])
            names = " and ".join(knob.title for knob in all_knobs() if knob.name in _turned(group))
            what = f"{STAGES[stage]}, which {names} cannot touch, at {group[slow].name} over {group[fast].name}"
            interval = times.interval(int(slow), int(fast), 1 - (1 - CONFIDENCE) / len(groups))
            control = Control("untouched", what, times.ratio(int(slow), int(fast)), interval, len(pictures))
    return control


def _turned(settings: Sequence[StoredSetting]) -> set[str]:
    """The knobs in which settings differ."""
    names = {name for each in settings for name in each.setting.levels}
    return {name for name in names if len({str(each.setting.level(name)) for each in settings}) > 1}


def _placebo(placebo: StoredSetting, reference: StoredSetting) -> Iterator[Control]:
    """The reference that was measured a second time in each round over the reference."""
    logs, pictures = _mean_logs([placebo, reference], "T_total")
    if logs.size:
        times = PairedContrasts.of(logs, pictures)
        what = "placebo over the reference, which it is"
        yield Control("placebo", what, times.ratio(0, 1), times.interval(0, 1), len(pictures))


def carry_over(settings: Sequence[StoredSetting]) -> list[Control]:
    """What the setting before leaves behind: a run behind one of the slower half of the settings over one behind one of
    the faster half, and the first run of a round over the others; none where a setting was measured outside rounds.
    """
    rows = [_samples(each) for each in settings]
    ids = sorted(set.intersection(*(set(row) for row in rows)) if rows else ())
    rounds: list[tuple[str, list[RunTimes]]] = []
    for at in ids:
        picture = named_picture(at, rows[0][at].metadata.image_id)
        rounds += [(picture, list(runs)) for runs in zip(*(row[at].runs for row in rows), strict=False)]
    places = [[run.place_in_round for run in runs] for _, runs in rounds]
    whole = [at for at, found in enumerate(places) if set(found) == {*range(len(settings))}]
    if not whole:
        return []
    logs = np.log([[run.T_total for run in rounds[at][1]] for at in whole]).T
    return carry_over_of(logs, np.array([places[at] for at in whole]).T, [rounds[at][0] for at in whole])


def carry_over_of(logs: np.ndarray, places: np.ndarray, pictures: Sequence[str]) -> list[Control]:
    """The same from the times of whole rounds.

    Args:
        logs: [S, R], logarithm of the time of each setting in each round.
        places: [S, R], place of each setting in each round, from 0.
        pictures: [R], the picture of each round.
    """
    size, number = logs.shape
    if size < 2:
        return []
    is_slow = np.zeros(size, dtype=bool)
    is_slow[np.argsort(logs.mean(axis=1))[size - size // 2 :]] = True
    by_place = np.argsort(places, axis=0)
    first = places == 0
    # Half to either side, and 0 for the first: both effects are estimated side by side.
    behind = np.where(first, 0.0, np.where(is_slow[np.take_along_axis(by_place, places - 1, axis=0)], 0.5, -0.5))
    # Of two settings each is always behind the other one.
    columns = [first.astype(float)] if size == 2 else [first.astype(float), behind]
    design, residuals = np.stack([_within(each) for each in columns]), _within(logs)
    numbers = np.unique(np.asarray(pictures), return_inverse=True)[1]
    groups = numbers.max() + 1
    squares, products = np.zeros((groups, len(columns), len(columns))), np.zeros((groups, len(columns)))
    np.add.at(squares, numbers, np.einsum("isr,jsr->rij", design, design))
    np.add.at(products, numbers, np.einsum("isr,sr->ri", design, residuals))
    if np.linalg.matrix_rank(squares.sum(axis=0)) < len(columns):
        return []
    effects = np.linalg.solve(squares.sum(axis=0), products.sum(axis=0))
    halves = [None] * len(columns)
    if groups >= FEWEST_PICTURES:
        left_out = zip(squares.sum(axis=0) - squares, products.sum(axis=0) - products, strict=True)
        without = [np.linalg.lstsq(each, of_it)[0] for each, of_it in left_out]
        # Without the jackknife's (G - 1) / G: a picture's rounds are in the settings' means, too.
        errors = np.sqrt(((np.array(without) - effects) ** 2).sum(axis=0))
        halves = stats.t.isf((1 - CONFIDENCE) / 2, groups - 1) * errors
    found = []
    kinds: tuple[tuple[ControlKind, str], ...] = (
        ("first", "first in a round over later"),
        ("carry_over", "behind a slower setting over a faster one"),
    )
    for (kind, what), effect, half in zip(kinds, effects, halves, strict=False):
        interval = None if half is None else (math.exp(effect - half), math.exp(effect + half))
        found.append(Control(kind, what, math.exp(effect), interval, number))
    return found


def _within(values: np.ndarray) -> np.ndarray:
    """[S, R] without the means of settings and of rounds."""
    return values - values.mean(axis=0) - values.mean(axis=1, keepdims=True) + values.mean()
