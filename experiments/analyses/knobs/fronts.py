"""The front of accuracy against cost, how sure each setting's place on it is, and its hypervolume.

A setting is on the front where no other is at least as good in both cost and accuracy and better in one of them; so
settings that agree in both are on it together.

The hypervolume is the area under the front's steps up to the reference point (accuracy 0, a largest cost): in units of
accuracy times cost. Divided by the largest cost it is the accuracy that the best setting within a budget has, averaged
over all budgets from 0 to the largest, 0 where no setting keeps to a budget (E. Zitzler and L. Thiele, "Multiobjective
optimization using evolutionary algorithms", PPSN V (1998), for the measure).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from experiment_core_utils.primitives.contrasts import ACCURACY_MARGIN, Word, groups_of_ties, word_of
from experiment_core_utils.primitives.statistics import CONFIDENCE, on_front
from experiments.analyses.knobs.objectives import Objectives
from experiments.analyses.limits import MOST_SETTINGS
from experiments.fitting.intervals import interval

# The largest budget, over the cost of the most expensive setting.
REFERENCE_FACTOR = 1.1
Status = Literal["established", "within_noise", "possible", "dominated"]
Difference = Literal["established", "within_noise"]
_STATUS: Mapping[Word, Status] = {"yes": "established", "no": "dominated"}


@dataclass(frozen=True)
class FrontPoint:
    """A setting's place relative to the front."""

    key: str
    accuracy: float
    accuracy_ci95: tuple[float, float]  #: as every accuracy's interval
    cost: float
    #: of a mean by Student's t, of a percentile by order statistics; None for too few pictures
    cost_ci95: tuple[float, float] | None
    on_front: bool  #: by the figures of all samples
    #: how sure it is that the setting is on the front: `yes` and `likely` by `p_value`, `no` by `off_p_value`
    word: Word
    #: that it is not better, in accuracy or in cost, than each other setting: the highest over them of twice the
    #: smaller of the two p-values, which are adjusted for all pairs of settings; 1 off the front
    p_value: float
    #: that no other setting both costs less and is not worse by ACCURACY_MARGIN: the lowest over those on the front of
    #: twice the larger of the two p-values; of the setting that a conclusion compares with, that of the conclusion
    off_p_value: float
    #: the word and the place by the figures in one: `established` for yes, `dominated` for no, else `within_noise` on
    #: the front and `possible` off it
    status: Status
    #: settings that it is better than, if at all, only within noise; of the front's points only
    not_better_than: tuple[str, ...]
    dominated_by: str | None  #: the cheapest of the most accurate that dominate it by the figures; None on the front
    surely_dominated_by: str | None  #: of a `no`, the setting that surely costs less and is surely not worse


@dataclass(frozen=True)
class Hypervolume:
    """The hypervolume of a set of settings."""

    value: float  #: accuracy times cost, up to the reference point
    ci95: tuple[float, float]  #: percentile interval over draws
    mean_accuracy: float  #: `value` / reference cost
    #: mean over draws of the hypervolume where each budget's setting is chosen by the draw and its accuracy is that on
    #: the samples that the draw left out; free of the luck of the chosen. None where a draw leaves out no sample.
    unseen: float | None
    unseen_ci95: tuple[float, float] | None  #: percentile interval over draws


@dataclass(frozen=True)
class Front:
    """The front of all settings, cheapest first, and the hypervolume up to (`reference_cost`, accuracy 0)."""

    points: tuple[FrontPoint, ...]
    reference_cost: float
    hypervolume: Hypervolume
    #: keys of settings that cannot be told apart by their cost: the longest runs, cheapest first, of which the first
    #: and the last are not confidently different; a setting may be in several. None above MOST_SETTINGS.
    ties: tuple[tuple[str, ...], ...] | None


@dataclass(frozen=True)
class TaskDifference:
    """A setting that is on the front for one task and not on it for another."""

    key: str
    statuses: Mapping[str, Status]  #: task -> status
    words: Mapping[str, Word]  #: task -> its `FrontPoint.word`
    difference: Difference  #: `established`: established on one front and dominated for another task


def area(cost: np.ndarray, accuracy: np.ndarray, reference_cost: float) -> np.ndarray:
    """The hypervolume [...] of [..., S] settings up to (`reference_cost`, 0); settings that cost more add nothing."""
    order = np.argsort(cost, axis=-1, kind="stable")
    widths = _widths(np.take_along_axis(cost, order, axis=-1), reference_cost)
    heights = np.maximum.accumulate(np.take_along_axis(accuracy, order, axis=-1), axis=-1)
    return np.asarray((widths * heights).sum(axis=-1))


def scored_area(
    costs: np.ndarray, gains: np.ndarray, scored: np.ndarray, reference_cost: float
) -> tuple[np.ndarray, np.ndarray]:
    """The hypervolumes [...] and [...] of [..., S] settings, cheapest first, and as counted on other samples.

    Args:
        gains: accuracy, which chooses the setting of each budget; of equally accurate ones the cheapest.
        scored: the accuracy that it is counted with in the second.
    """
    widths = _widths(costs, reference_cost)
    heights = np.maximum.accumulate(gains, axis=-1)
    is_new = gains[..., 1:] > heights[..., :-1]
    chosen = np.zeros(gains.shape, dtype=np.int64)
    np.maximum.accumulate(np.where(is_new, np.arange(1, gains.shape[-1]), 0), axis=-1, out=chosen[..., 1:])
    counted = np.take_along_axis(scored, chosen, axis=-1)
    return np.asarray((widths * heights).sum(axis=-1)), np.asarray((widths * counted).sum(axis=-1))


def _widths(costs: np.ndarray, reference_cost: float) -> np.ndarray:
    """The budgets [..., S] from each of the costs, smallest first, to the next or to the last one."""
    ends = np.full((*costs.shape[:-1], 1), reference_cost)
    return np.diff(np.minimum(costs, reference_cost), axis=-1, append=ends)


def reference_cost_of(found: Objectives) -> float:
    """The cost of the reference point: REFERENCE_FACTOR times that of the most expensive setting."""
    return REFERENCE_FACTOR * float(found.cost.max())


def areas(found: Objectives, members: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """The hypervolume of some settings: on all samples, [B] over draws, and [B] on the samples that a draw left out."""
    limit = reference_cost_of(found)
    value = float(area(found.cost[members], found.accuracy[members], limit))
    order = cheapest_first(found, members)
    cost, accuracy, unseen = (
        np.take_along_axis(each, order, axis=1)
        for each in (found.cost_draws, found.accuracy_draws, found.unseen_accuracy)
    )
    return value, *scored_area(cost, accuracy, unseen, limit)


def cheapest_first(found: Objectives, members: np.ndarray) -> np.ndarray:
    """The indices `members` [B, M] in each draw's order of cost; of equal costs the first of them first."""
    if 8 * len(members) < len(found.points):
        return np.asarray(members[np.argsort(found.cost_draws[:, members], axis=1, kind="stable")])
    is_member = np.zeros(len(found.points), dtype=bool)
    is_member[members] = True
    return found.cost_order[is_member[found.cost_order]].reshape(len(found.cost_draws), len(members))


def hypervolume(found: Objectives, members: np.ndarray) -> Hypervolume:
    """The hypervolume of the settings at `members`, [M] indices."""
    value, draws, unseen = areas(found, members)
    has_unseen = bool(np.isfinite(unseen).any())
    return Hypervolume(
        value=value,
        ci95=interval(draws),
        mean_accuracy=value / reference_cost_of(found),
        unseen=float(np.nanmean(unseen)) if has_unseen else None,
        unseen_ci95=interval(unseen) if has_unseen else None,
    )


def front(found: Objectives) -> Front:
    """Every setting's place, and the front's hypervolume."""
    is_on = on_front(found.cost, found.accuracy)
    dominators = _dominators(found.cost, found.accuracy)
    keys = [point.key for point in found.points]
    intervals = zip(_places(found), found.accuracy_intervals(), found.cost_intervals(), strict=True)
    points = [
        FrontPoint(
            key=keys[at],
            accuracy=float(found.accuracy[at]),
            accuracy_ci95=accuracy_ends,
            cost=float(found.cost[at]),
            cost_ci95=cost_ends,
            on_front=bool(is_on[at]),
            word=place.word,
            p_value=place.p_value,
            off_p_value=place.off_p_value,
            status=_STATUS.get(place.word, "within_noise" if is_on[at] else "possible"),
            not_better_than=tuple(keys[other] for other in place.not_better_than),
            dominated_by=None if is_on[at] else keys[dominators[at]],
            surely_dominated_by=keys[place.rival] if place.word == "no" else None,
        )
        for at, (place, accuracy_ends, cost_ends) in enumerate(intervals)
    ]
    ties = None
    if len(points) <= MOST_SETTINGS:
        groups = groups_of_ties(np.argsort(found.cost, kind="stable"), found.told_apart())
        ties = tuple(tuple(keys[at] for at in group) for group in groups)
    return Front(
        points=tuple(sorted(points, key=lambda each: (each.cost, -each.accuracy))),
        reference_cost=reference_cost_of(found),
        hypervolume=hypervolume(found, np.arange(len(found.points))),
        ties=ties,
    )


def front_words(found: Objectives) -> list[Word]:
    """For each of the S settings, in their order, how sure it is that it is on the front."""
    return [place.word for place in _places(found)]


@dataclass(frozen=True)
class _Place:
    """What is sure of a setting's place; other settings by index."""

    p_value: float
    off_p_value: float
    not_better_than: tuple[int, ...]
    rival: int  #: of `off_p_value`

    @property
    def word(self) -> Word:
        return word_of(self.p_value, self.off_p_value)


def _places(found: Objectives) -> list[_Place]:
    """The places of the S settings. Together, yes and no are right of all of them with CONFIDENCE."""
    is_on = np.flatnonzero(on_front(found.cost, found.accuracy)).tolist()
    beaten = {at: _pair_p_values(found, at) for at in is_on}
    # [F, S], of each setting on the front against each.
    replaced = np.stack([_replacing_p_values(found, at) for at in is_on])
    rivals, off = np.array(is_on)[replaced.argmin(axis=0)], replaced.min(axis=0)
    against = compared_with(found)
    by_conclusion = np.maximum(*replacing_p_values(found, against))
    rivals[against], off[against] = by_conclusion.argmin(), by_conclusion.min()
    return [
        _Place(
            p_value=float(beaten[at].max()) if at in beaten else 1.0,
            off_p_value=float(off[at]),
            not_better_than=tuple(np.flatnonzero(beaten[at] > 1 - CONFIDENCE).tolist()) if at in beaten else (),
            rival=int(rivals[at]),
        )
        for at in range(len(found.points))
    ]


def compared_with(found: Objectives) -> int:
    """The setting that a conclusion compares others with: the reference, else the fastest of the most accurate."""
    return int(np.lexsort((found.cost, -found.accuracy))[0]) if found.reference is None else found.reference


def replacing_p_values(found: Objectives, against: int) -> tuple[np.ndarray, np.ndarray]:
    """[S] and [S], the p-values that each setting does not cost less than this one, and that it is worse by
    ACCURACY_MARGIN or more, each adjusted for the comparisons with this one; 1 without a verdict, and of itself. Of a
    percentile, those on the front alone are tested.
    """
    everything = np.arange(len(found.points))
    if found.no_verdict is not None:
        return np.ones(len(everything)), np.ones(len(everything))
    if found.of.statistic == "mean":
        less = found.cost_contrasts(against).pair_p_values(everything, against)
        # By the mean of ratios, and not by the mean that is paid.
        less[found.cost >= found.cost[against]] = 1.0
    else:
        less = np.ones(len(everything))
        for at in np.flatnonzero(on_front(found.cost, found.accuracy)).tolist():
            less[at] = found.cost_p_values(at)[against]
    scores = found.score_contrasts(against)
    not_worse = scores.pair_p_values(everything, against, ACCURACY_MARGIN * found.best)
    not_worse[against] = 1.0
    return less, not_worse


def _replacing_p_values(found: Objectives, at: int) -> np.ndarray:
    """[S], the p-value that this setting does not cost less than each or is worse by ACCURACY_MARGIN or more."""
    less = 2 * found.cost_p_values(at)
    others = np.flatnonzero(less < 1)
    both = np.ones(len(less))
    both[others] = np.maximum(less[others], 2 * found.not_worse_p_values(at, others))
    return np.minimum(both, 1.0)


def _pair_p_values(found: Objectives, at: int) -> np.ndarray:
    """[S], the p-value that this setting is better than each in neither accuracy nor cost; 0 for itself."""
    both = np.minimum(2 * np.minimum(found.accuracy_p_values(at), found.cost_p_values(at)), 1.0)
    both[at] = 0.0
    return np.asarray(both)


def _dominators(cost: np.ndarray, accuracy: np.ndarray) -> np.ndarray:
    """The index [S] of the most accurate setting that costs no more than each; of equal ones the cheapest first."""
    # The last key is the first to sort by; equal ones stay in their order.
    order = np.lexsort((-accuracy, cost))
    gains = accuracy[order]
    is_new = gains > np.concatenate([[-np.inf], np.maximum.accumulate(gains)[:-1]])
    best = np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))
    return np.asarray(order[best[np.searchsorted(cost[order], cost, side="right") - 1]])


def compare_tasks(fronts: Mapping[str, Front]) -> list[TaskDifference]:
    """The settings that two or more tasks have and that are on the front for one and not for another, by key."""
    places: dict[str, dict[str, FrontPoint]] = {}
    for task, each in fronts.items():
        for point in each.points:
            places.setdefault(point.key, {})[task] = point
    return [
        TaskDifference(
            key,
            {task: point.status for task, point in own.items()},
            {task: point.word for task, point in own.items()},
            "established" if {"established", "dominated"} <= {each.status for each in own.values()} else "within_noise",
        )
        for key, own in sorted(places.items())
        if len({point.on_front for point in own.values()}) == 2
    ]
