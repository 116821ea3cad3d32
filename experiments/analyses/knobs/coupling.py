"""How much of the front is lost with a knob fixed, and which knobs' best values depend on other knobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import Literal

import numpy as np
from scipy import stats

from experiment_core_utils.knobs.interface import Level
from experiment_core_utils.primitives.statistics import on_front
from experiments.analyses.knobs.fronts import area, areas, reference_cost_of
from experiments.analyses.knobs.grid import knob_names, levels_of
from experiments.analyses.knobs.objectives import Objectives
from experiments.analyses.limits import MOST_VALUES
from experiments.fitting.intervals import interval
from experiments.fitting.verdicts import TAIL

Value = Level
Dependence = Literal["established", "within_noise", "none"]


@dataclass(frozen=True)
class Loss:
    """The hypervolume that the joint front has more than that of some of the settings."""

    hypervolume: float  #: of the part
    share: float | None  #: fraction lost of the joint front's; never negative. None where the joint front has none.
    share_ci95: tuple[float, float] | None  #: percentile interval over draws
    #: mean over draws of the same where budgets' settings are chosen by the draw and counted on the samples that it
    #: left out: what is lost but for luck; may be negative. None where a draw leaves out none.
    unseen_share: float | None
    unseen_ci95: tuple[float, float] | None  #: percentile interval over draws
    #: whether that interval is above 0; False where requests waited for each other
    beyond_noise: bool


@dataclass(frozen=True)
class FixedValue:
    """A knob held at a value while the others move."""

    knob: str
    value: Value
    num_settings: int
    front: tuple[str, ...]  #: keys of the front of these settings, cheapest first
    num_on_joint_front: int  #: settings of the joint front with this value
    loss: Loss  #: against the joint front


@dataclass(frozen=True)
class SingleKnob:
    """A knob that varies alone, with the others at their largest values."""

    knob: str
    others: dict[str, Value]  #: the other knobs and their values
    num_settings: int  #: of that line in the grid; 0 where the grid does not have it, with no `loss`
    loss: Loss | None  #: against the joint front


@dataclass(frozen=True)
class BestValue:
    """The value of a knob with the largest hypervolume while another knob has a value, and how often it is that."""

    given: Value
    best: Value
    probability: float  #: fraction of draws in which it is the best; of equal ones the smallest value counts
    hypervolumes: dict[Value, float]


@dataclass(frozen=True)
class Coupling:
    """Whether the best value of `knob` depends on `given`."""

    knob: str
    given: str
    best_values: tuple[BestValue, ...]  #: one for each value of `given` at which every value of `knob` was measured
    #: `none`: one value is best throughout; `established`: of two values each is confidently better than the other at
    #: some value of `given`; `within_noise`: best values differ, not so surely
    dependence: Dependence
    #: for `established`, the two values of `knob` and the two of `given`
    witness: tuple[Value, Value, Value, Value] | None
    #: hypervolume lost by the one value of `knob` that is best over all of `given`, against the best at each, as a
    #: fraction of the latter; None where these settings have no right answer
    regret_share: float | None
    #: that no two values do so, for all pairs of values and all values of `given` together (Bonferroni); 1 where there
    #: are too few pictures for a verdict
    p_value: float
    #: the same for all couplings of the task and cost (false discovery rate, Benjamini and Hochberg); `established` is
    #: at 2.5 %
    family_p_value: float


def fixed_values(found: Objectives) -> list[FixedValue]:
    """The front with a knob fixed, for each knob that varies and each of its values."""
    everything = np.arange(len(found.points))
    joint = on_front(found.cost, found.accuracy)
    whole = areas(found, everything)
    rows = []
    for knob in moving_knobs(found):
        places = _places(found, (knob,))
        values = levels_of(found.points, knob)
        for value in values:
            members = places[(value,)]
            own = on_front(found.cost[members], found.accuracy[members])
            ordered = sorted(members[own], key=lambda at: float(found.cost[at]))
            rows.append(
                FixedValue(
                    knob=knob,
                    value=value,
                    num_settings=len(members),
                    front=tuple(found.points[at].key for at in ordered),
                    num_on_joint_front=int(joint[members].sum()),
                    loss=_loss(whole, areas(found, members), have_waited=found.have_waited),
                )
            )
    return rows


def single_knobs(found: Objectives) -> list[SingleKnob]:
    """The result of varying each knob alone."""
    whole = areas(found, np.arange(len(found.points)))
    rows = []
    for knob in moving_knobs(found):
        others = {
            other: values[-1]
            for other in knob_names()
            if other != knob and len(values := levels_of(found.points, other)) > 1
        }
        none = np.zeros(0, dtype=np.int64)
        members = _places(found, tuple(others)).get(tuple(others.values()), none)
        part = areas(found, members) if len(members) else None
        loss = None if part is None else _loss(whole, part, have_waited=found.have_waited)
        rows.append(SingleKnob(knob, others, len(members), loss))
    return rows


def couplings(found: Objectives) -> list[Coupling]:
    """The coupling of each ordered pair of varying knobs; a pair without two values of `given` to compare is left out.

    None where no setting has a right answer: no value is better than another then.
    """
    if not found.accuracy.any():
        return []
    moving = moving_knobs(found)
    cells = {pair: _cells(found, pair) for pair in combinations(moving, 2)}
    each_alone = [
        each
        for knob, given in permutations(moving, 2)
        for pair in [(knob, given) if (knob, given) in cells else (given, knob)]
        for own in [{(cell[pair.index(given)], cell[pair.index(knob)]): at for cell, at in cells[pair].items()}]
        for each in _coupling(found, knob, given, own)
    ]
    if not each_alone:
        return []
    family = stats.false_discovery_control([each.p_value for each in each_alone]).tolist()
    return [_as_one_of_family(each, p_value) for each, p_value in zip(each_alone, family, strict=True)]


def _as_one_of_family(coupling: Coupling, p_value: float) -> Coupling:
    """The coupling by its p-value among all; one whose best values do not differ depends on nothing either way."""
    if p_value <= TAIL:
        return replace(coupling, family_p_value=p_value, dependence="established")
    one_for_all = len({value.best for value in coupling.best_values}) == 1
    return replace(coupling, family_p_value=p_value, dependence="none" if one_for_all else "within_noise", witness=None)


def moving_knobs(found: Objectives) -> tuple[str, ...]:
    """The knobs with two values or more, but no more than MOST_VALUES."""
    return tuple(knob for knob in knob_names() if 1 < len(levels_of(found.points, knob)) <= MOST_VALUES)


Areas = tuple[float, np.ndarray, np.ndarray]
Cell = tuple[float, np.ndarray]


def _loss(whole: Areas, part: Areas, *, have_waited: bool) -> Loss:
    """What a part of the settings loses of the whole."""
    if whole[0] <= 0:
        return Loss(part[0], None, None, None, None, beyond_noise=False)
    draws = (whole[1] - part[1]) / whole[0]
    unseen = (whole[2] - part[2]) / whole[0]
    held_out = interval(unseen) if np.isfinite(unseen).any() else None
    return Loss(
        hypervolume=part[0],
        share=max(whole[0] - part[0], 0.0) / whole[0],
        share_ci95=interval(draws),
        unseen_share=float(np.nanmean(unseen)) if held_out is not None else None,
        unseen_ci95=held_out,
        beyond_noise=not have_waited and held_out is not None and held_out[0] > 0,
    )


def _coupling(found: Objectives, knob: str, given: str, cells: Mapping[tuple[Value, Value], Cell]) -> list[Coupling]:
    """The coupling, from the areas of the settings at each pair of values, that of `given` first."""
    values = levels_of(found.points, knob)
    # Values of `given` at which every value of `knob` was measured.
    complete = [at for at in levels_of(found.points, given) if all((at, value) in cells for value in values)]
    if len(complete) < 2:
        return []
    all_areas = [[cells[at, value] for value in values] for at in complete]
    volumes = np.array([[each[0] for each in row] for row in all_areas])  # [given, knob]
    draws = np.array([[each[1] for each in row] for row in all_areas])  # [given, knob, B]
    best_values = tuple(_best_value(at, values, volumes[row], draws[row]) for row, at in enumerate(complete))
    p_value, witness = _witness(found, values, complete, draws)
    top = float(volumes.max(axis=1).sum())
    return [
        Coupling(
            knob=knob,
            given=given,
            best_values=best_values,
            dependence="within_noise",
            witness=witness,
            regret_share=(top - float(volumes.sum(axis=0).max())) / top if top > 0 else None,
            p_value=p_value,
            family_p_value=p_value,
        )
    ]


def _cells(found: Objectives, pair: tuple[str, str]) -> dict[tuple[Value, ...], Cell]:
    """The areas of the settings at each pair of values: on all samples, and [B] over draws."""
    limit = reference_cost_of(found)
    by_size: dict[int, dict[tuple[Value, ...], np.ndarray]] = {}
    for values, members in _places(found, pair).items():
        by_size.setdefault(len(members), {})[values] = members
    cells: dict[tuple[Value, ...], Cell] = {}
    for own in by_size.values():
        members = np.stack(list(own.values()))
        costs, gains = found.cost_draws[:, members], found.accuracy_draws[:, members]
        draws = area(costs, gains, limit).T
        volumes = area(found.cost[members], found.accuracy[members], limit).tolist()
        cells |= dict(zip(own, zip(volumes, draws, strict=True), strict=True))
    return cells


def _places(found: Objectives, knobs: Sequence[str]) -> dict[tuple[Value, ...], np.ndarray]:
    """The settings at each combination of values of these knobs."""
    places: dict[tuple[Value, ...], list[int]] = {}
    for at, point in enumerate(found.points):
        places.setdefault(tuple(point.value(knob) for knob in knobs), []).append(at)
    return {values: np.array(own, dtype=np.int64) for values, own in places.items()}


def _best_value(given: Value, values: Sequence[Value], volumes: np.ndarray, draws: np.ndarray) -> BestValue:
    best = int(volumes.argmax())
    return BestValue(
        given=given,
        best=values[best],
        probability=float((draws.argmax(axis=0) == best).mean()),
        hypervolumes={value: float(each) for value, each in zip(values, volumes, strict=True)},
    )


def _witness(
    found: Objectives, values: Sequence[Value], given: Sequence[Value], draws: np.ndarray
) -> tuple[float, tuple[Value, Value, Value, Value] | None]:
    """The two values of the knob whose order most surely changes between two values of the other, with the p-value.

    Differences of hypervolumes over their standard deviation over draws are taken as Student's t over pictures.
    """
    pairs = list(combinations(range(len(values)), 2))
    pictures = min(found.num_cost_pictures, found.num_pictures)
    if found.no_verdict is not None or pictures < 2:
        return 1.0, None
    lowest: tuple[float, tuple[Value, Value, Value, Value] | None] = (1.0, None)
    for one, other in pairs:
        ahead = _p_of_gain(draws[:, one] - draws[:, other], pictures)
        behind = _p_of_gain(draws[:, other] - draws[:, one], pictures)
        p_value = min(float(max(ahead.min(), behind.min())) * len(given) * len(pairs), 1.0)
        if p_value < lowest[0]:
            lowest = p_value, (values[one], values[other], given[int(ahead.argmin())], given[int(behind.argmin())])
    return lowest


def _p_of_gain(gains: np.ndarray, pictures: int) -> np.ndarray:
    """[G], the p-value that gains [G, B] over draws are not above 0."""
    means, errors = gains.mean(axis=1), gains.std(axis=1, ddof=1)
    same = errors <= 1e-12 * np.abs(means)
    ratios = np.divide(means, errors, out=np.where(means > 0, np.inf, -np.inf), where=~same)
    return np.asarray(stats.t.sf(ratios, pictures - 1))
