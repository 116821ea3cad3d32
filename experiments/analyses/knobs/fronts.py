"""The front of accuracy against cost, how sure each setting's place on it is, and its hypervolume.

A setting is on the front where no other is at least as good in both cost and accuracy and better in one of them; so
settings that agree in both are on it together.

The hypervolume is the area under the front's steps up to the reference point (accuracy 0, a largest cost): in units of
accuracy times cost. Divided by the largest cost it is the accuracy that the best setting within a budget has, averaged
over all budgets from 0 to the largest, 0 where no setting keeps to a budget (E. Zitzler and L. Thiele, "Multiobjective
optimization using evolutionary algorithms", PPSN V (1998), for the measure).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from experiment_core_utils.primitives.statistics import on_front
from experiments.analyses.knobs.objectives import Objectives
from experiments.fitting.intervals import interval, intervals

# The largest budget, over the cost of the most expensive setting.
REFERENCE_FACTOR = 1.1
# A setting that fewer draws put on the front is dominated.
FEWEST_ON_FRONT = 0.05
Status = Literal["established", "within_noise", "possible", "dominated"]
Difference = Literal["established", "within_noise"]


@dataclass(frozen=True)
class FrontPoint:
    """A setting's place relative to the front.

    Attributes:
        accuracy_ci95: percentile interval over draws; as `cost_ci95`.
        on_front: by the figures of all samples.
        probability: fraction of draws that put it on the front.
        drift_probability: the same, had all other latencies been longer by the drift that the run showed.
        status: `established`: on the front, and confidently better in accuracy or in cost than each other setting;
            `within_noise`: on the front, but not so against `not_better_than`; `possible`: off it, but with a
            `drift_probability` of at least 5 %; `dominated`: off it.
        not_better_than: settings that it is better than, if at all, only within noise; of the front's points only.
        dominated_by: the cheapest of the most accurate settings that dominate it; None on the front.
    """

    key: str
    accuracy: float
    accuracy_ci95: tuple[float, float]
    cost: float
    cost_ci95: tuple[float, float]
    on_front: bool
    probability: float
    drift_probability: float
    status: Status
    not_better_than: tuple[str, ...]
    dominated_by: str | None


@dataclass(frozen=True)
class Hypervolume:
    """The hypervolume of a set of settings.

    Attributes:
        value: accuracy times cost, up to the reference point.
        ci95: percentile interval over draws.
        mean_accuracy: `value` / reference cost.
        unseen: mean over draws of the hypervolume where each budget's setting is chosen by the draw and its accuracy
            is that on the samples that the draw left out; free of the luck of the chosen. None where a draw leaves out
            no sample.
        unseen_ci95: percentile interval over draws.
    """

    value: float
    ci95: tuple[float, float]
    mean_accuracy: float
    unseen: float | None
    unseen_ci95: tuple[float, float] | None


@dataclass(frozen=True)
class Front:
    """The front of all settings, cheapest first, and the hypervolume up to (`reference_cost`, accuracy 0)."""

    points: tuple[FrontPoint, ...]
    reference_cost: float
    hypervolume: Hypervolume


@dataclass(frozen=True)
class TaskDifference:
    """A setting that is on the front for one task and not on it for another.

    Attributes:
        statuses: task -> status.
        probabilities: task -> fraction of draws that put it on the front.
        difference: `established`: established on one front and dominated for another task.
    """

    key: str
    statuses: Mapping[str, Status]
    probabilities: Mapping[str, float]
    difference: Difference


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


def areas_beside_slower(found: Objectives, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """For each part [B], the area of all settings on a draw's unseen samples, other parts slower by the drift.

    Args:
        parts: of the settings, which together hold each once.
    """
    # What another setting of the same part dominates is on no front of all.
    steps = [_steps(found, members) for members in parts]
    numbers, costs, gains, unseen = (np.concatenate(each, axis=1) for each in zip(*steps, strict=True))
    owners = np.repeat(np.arange(len(parts)), [each[0].shape[1] for each in steps])
    order = np.argsort(numbers, axis=1)
    costs, gains, unseen = (np.take_along_axis(each, order, axis=1) for each in (costs, gains, unseen))
    owners = owners[order]
    areas = []
    for part in range(len(parts)):
        slower = costs * np.where(owners == part, 1, 1 + found.drift_allowance)
        order = np.argsort(slower, axis=1, kind="stable")
        cost, accuracy, scores = (np.take_along_axis(each, order, axis=1) for each in (slower, gains, unseen))
        areas.append(scored_area(cost, accuracy, scores, reference_cost_of(found))[1])
    return areas


def _steps(found: Objectives, members: np.ndarray) -> tuple[np.ndarray, ...]:
    """Number, cost, accuracy and unseen accuracy of the settings at `members` on each draw's front, [B, F] each.

    Draws of fewer are filled up with what costs infinitely much.
    """
    order = cheapest_first(found, members)
    gains = np.take_along_axis(found.accuracy_draws, order, axis=1)
    is_new = np.ones(gains.shape, dtype=bool)
    is_new[:, 1:] = gains[:, 1:] > np.maximum.accumulate(gains, axis=1)[:, :-1]
    places = np.argsort(~is_new, axis=1, kind="stable")[:, : int(is_new.sum(axis=1).max())]
    order, is_new = np.take_along_axis(order, places, axis=1), np.take_along_axis(is_new, places, axis=1)
    costs, gains, unseen = (
        np.take_along_axis(each, order, axis=1)
        for each in (found.cost_draws, found.accuracy_draws, found.unseen_accuracy)
    )
    return order, np.where(is_new, costs, np.inf), np.where(is_new, gains, -np.inf), unseen


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
    probabilities = on_front(found.cost_draws, found.accuracy_draws).mean(axis=0)
    with_drift = probabilities
    if found.drift_allowance > 0:
        with_drift = on_front(found.cost_draws, found.accuracy_draws, found.drift_allowance).mean(axis=0)
    dominators = _dominators(found.cost, found.accuracy)
    keys = [point.key for point in found.points]
    accuracy_ends, cost_ends = intervals(found.accuracy_draws), intervals(found.cost_draws)
    points = [
        _point(found, keys, at, bool(is_on[at]), float(probabilities[at]), float(with_drift[at]), ends, dominator)
        for at, (*ends, dominator) in enumerate(zip(accuracy_ends, cost_ends, dominators.tolist(), strict=True))
    ]
    return Front(
        points=tuple(sorted(points, key=lambda each: (each.cost, -each.accuracy))),
        reference_cost=reference_cost_of(found),
        hypervolume=hypervolume(found, np.arange(len(found.points))),
    )


def _point(
    found: Objectives,
    keys: Sequence[str],
    at: int,
    is_on: bool,
    probability: float,
    drift_probability: float,
    ends: Sequence[tuple[float, float]],
    dominator: int,
) -> FrontPoint:
    noise: tuple[str, ...] = ()
    if is_on:
        better = found.more_accurate(at) | found.cheaper(at)
        noise = tuple(keys[other] for other in np.flatnonzero(~better).tolist() if other != at)
    status: Status = "dominated" if drift_probability < FEWEST_ON_FRONT else "possible"
    if is_on:
        status = "within_noise" if noise else "established"
    return FrontPoint(
        key=keys[at],
        accuracy=float(found.accuracy[at]),
        accuracy_ci95=ends[0],
        cost=float(found.cost[at]),
        cost_ci95=ends[1],
        on_front=is_on,
        probability=probability,
        drift_probability=drift_probability,
        status=status,
        not_better_than=noise,
        dominated_by=None if is_on else keys[dominator],
    )


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
            {task: point.probability for task, point in own.items()},
            "established" if {"established", "dominated"} <= {each.status for each in own.values()} else "within_noise",
        )
        for key, own in sorted(places.items())
        if len({point.on_front for point in own.values()}) == 2
    ]
