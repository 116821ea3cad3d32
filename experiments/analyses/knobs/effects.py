"""How much of the spread of a figure over settings each knob and each interaction explains.

The spread of S figures over the grid is split by least squares into main effects and interactions of all orders. A
term's sum of squares is what it adds to the model of all terms that do not contain it (type II; R. Langsrud, "ANOVA for
unbalanced data", Statistics and Computing 13 (2003)); on a full grid these are the classical ones and add up to the
whole. On an incomplete grid they do not, since terms overlap there; `rest_share` says by how much.

Of a mean over samples on a full grid, a main effect is tested over pictures: the means at the knob's values, each over
the settings with that value on the same samples, are compared by sign flips (`PairedContrasts`). Every other term,
the highest interaction too, is tested against the draws, in which also is what the machine may have added to each
setting where settings were measured one after another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from scipy import stats

from experiment_core_utils.knobs.interface import Level
from experiment_core_utils.primitives.contrasts import PairedContrasts
from experiment_core_utils.primitives.replication import COUNTED, Replication
from experiment_core_utils.primitives.statistics import CONFIDENCE
from experiments.analyses.limits import MOST_SETTINGS, MOST_VALUES
from experiments.fitting.intervals import interval

Value = Level
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Term:
    """A main effect or an interaction."""

    knobs: tuple[str, ...]  #: one or more
    degrees: int  #: of freedom; 0 where the grid does not contain what would show it
    share: float | None  #: fraction of the sum of squares over settings; None for `degrees` 0
    #: percentile interval over draws; noise adds to every fraction, so that it may be above `share`
    share_ci95: tuple[float, float] | None
    noise_share: float | None  #: what the draws' noise alone would add on average
    #: probability that noise alone gives so much: by sign flips of pictures for a main effect on a mean in a full grid,
    #: else of the draws, centred on the figures; None where requests waited for each other
    p_value: float | None
    #: the same, corrected for the number of terms of the figure (false discovery rate, Benjamini and Hochberg); None
    #: where the figure allows no verdict
    family_p_value: float | None = None


@dataclass(frozen=True)
class LevelMean:
    """The figure at one value of a knob, the others averaged over all their values (by the additive model)."""

    knob: str
    value: Value
    mean: float
    ci95: tuple[float, float]
    change: float  #: less that at the knob's smallest value
    change_ci95: tuple[float, float]


@dataclass(frozen=True)
class Effects:
    """Effects of the knobs on one figure over one task's grid."""

    is_full_grid: bool  #: whether every combination of values is there, once
    std: float | None  #: of the figures over settings
    terms: tuple[Term, ...]  #: main effects first; none where `reason` is given
    rest_share: float | None  #: 1 minus all fractions: 0 on a full grid; on others also below 0
    level_means: tuple[LevelMean, ...]  #: none where the grid does not connect its values
    reason: str | None  #: why nothing is split
    is_too_large: bool = False  #: whether that is because of too many values of a knob, or too many settings


def effects(
    levels: Mapping[str, Sequence[Value]],
    figures: np.ndarray,
    draws: np.ndarray,
    *,
    allows_verdict: bool = True,
    have_waited: bool = False,
    paired: Mapping[str, float] | None = None,
) -> Effects:
    """Split the spread of [S] figures, with [B, S] draws.

    Args:
        levels: knob -> its value at each of the S settings.
        allows_verdict: whether there are enough pictures for draws of the figure to be trusted.
        have_waited: whether requests waited for each other, which draws do not show.
        paired: knob -> p-value of its main effect by `main_effect_p_values`; used on a full grid.
    """
    moving = {knob: values for knob, values in levels.items() if len(set(values)) > 1}
    combinations_there = set(zip(*moving.values(), strict=True))
    is_full = len(combinations_there) == len(figures) == int(np.prod([len(set(each)) for each in moving.values()]))
    if not moving:
        return Effects(
            is_full, None, (), None, (), "one setting has no spread" if len(figures) < 2 else "no knob moves"
        )
    if any(len(set(values)) > MOST_VALUES for values in moving.values()):
        reason = f"not split: more than {MOST_VALUES} values of a knob"
        return Effects(is_full, float(figures.std(ddof=1)), (), None, (), reason, is_too_large=True)
    # Indicators [S, L] of the values in the order in which they first occur.
    codes = {
        knob: np.array([[float(value == each) for each in dict.fromkeys(values)] for value in values])
        for knob, values in moving.items()
    }
    means = _level_means(moving, codes, figures, draws)
    total = float(((figures - figures.mean()) ** 2).sum())
    std = float(figures.std(ddof=1))
    if total <= _TOLERANCE * max(float((figures**2).sum()), 1e-300):
        return Effects(is_full, std, (), None, means, "all settings are equal")
    if len(figures) > MOST_SETTINGS:
        reason = f"not split: more than {MOST_SETTINGS} settings"
        return Effects(is_full, std, (), None, means, reason, is_too_large=True)
    terms = tuple(_term(knobs, codes, figures, draws, total) for knobs in _subsets(tuple(codes)))
    if paired is not None and is_full:
        terms = tuple(
            replace(term, p_value=paired[term.knobs[0]]) if len(term.knobs) == 1 and term.degrees else term
            for term in terms
        )
    if allows_verdict:
        terms = _corrected(terms)
    elif have_waited:
        terms = tuple(replace(term, p_value=None) for term in terms)
    return Effects(is_full, std, terms, 1 - sum(each.share or 0.0 for each in terms), means, None)


def _subsets(knobs: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [each for size in range(1, len(knobs) + 1) for each in combinations(knobs, size)]


def _projection(subsets: Sequence[tuple[str, ...]], codes: Mapping[str, np.ndarray]) -> np.ndarray:
    """The projection [S, S] onto the space that the mean and these terms span."""
    size = len(next(iter(codes.values())))
    columns = [np.ones((size, 1))]
    for knobs in subsets:
        block = np.ones((size, 1))
        for knob in knobs:
            block = (block[:, :, None] * codes[knob][:, None, :]).reshape(size, -1)
        columns.append(block)
    left, values, _ = np.linalg.svd(np.concatenate(columns, axis=1), full_matrices=False)
    basis = left[:, values > 1e-10 * values[0]]
    return np.asarray(basis @ basis.T)


def _term(
    knobs: tuple[str, ...], codes: Mapping[str, np.ndarray], figures: np.ndarray, draws: np.ndarray, total: float
) -> Term:
    without = [each for each in _subsets(tuple(codes)) if not set(knobs) <= set(each)]
    added = _projection([*without, knobs], codes) - _projection(without, codes)
    degrees = round(float(np.trace(added)))
    if degrees == 0:
        return Term(knobs, 0, None, None, None, None)
    squares = float(figures @ added @ figures)
    # What rounding leaves of no effect would be beyond the noise of settings that always agree.
    squares = squares if squares > _TOLERANCE * total else 0.0
    noise = (((draws - figures) @ added) ** 2).sum(axis=1)
    spread = ((draws - draws.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    fractions = ((draws @ added) ** 2).sum(axis=1)[spread > 0] / spread[spread > 0]
    return Term(
        knobs=knobs,
        degrees=degrees,
        share=squares / total,
        share_ci95=interval(fractions) if len(fractions) else None,
        noise_share=float(noise.mean()) / total,
        p_value=(1 + int((noise >= squares).sum())) / (1 + len(noise)),
    )


def _corrected(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """The terms with their `family_p_value`; one that the grid does not show has none."""
    shown = {at: each.p_value for at, each in enumerate(terms) if each.p_value is not None}
    if not shown:
        return terms
    family = dict(zip(shown, stats.false_discovery_control(list(shown.values())).tolist(), strict=True))
    return tuple(replace(each, family_p_value=family.get(at)) for at, each in enumerate(terms))


def main_effect_p_values(
    levels: Mapping[str, Sequence[Value]],
    values: np.ndarray,
    pictures: np.ndarray,
    replication: Replication = COUNTED,
) -> dict[str, float]:
    """For each knob that moves the p-value that its values make no difference, by the pair that differs most surely.

    Args:
        levels: knob -> its value at each of the S settings of a full grid.
        values: [S, n], scores or logarithms of costs.
        pictures: [n].
        replication: the levels that the settings' values rest on.
    """
    found = {}
    for knob, own in levels.items():
        known = list(dict.fromkeys(own))
        if not 1 < len(known) <= MOST_VALUES:
            continue
        members = np.array([[each == value for each in own] for value in known], dtype=float)
        weights = members / members.sum(axis=1, keepdims=True)
        contrasts = PairedContrasts.of(weights @ values, pictures, replication=replication.averaged(weights))
        found[knob] = min(float(contrasts.p_values(at).min()) for at in range(len(known)))
    return found


def _level_means(
    moving: Mapping[str, Sequence[Value]], codes: Mapping[str, np.ndarray], figures: np.ndarray, draws: np.ndarray
) -> tuple[LevelMean, ...]:
    size = len(figures)
    design = np.concatenate([np.ones((size, 1)), *(each[:, 1:] for each in codes.values())], axis=1)
    if np.linalg.matrix_rank(design) < design.shape[1]:
        return ()
    fit = np.linalg.pinv(design)  # [parameters, S]
    means, start = [], 1
    centre = np.concatenate([[1.0], *(np.full(each.shape[1] - 1, 1 / each.shape[1]) for each in codes.values())])
    for knob, values in moving.items():
        known = list(dict.fromkeys(values))
        rows = []
        for number in range(len(known)):
            row = centre.copy()
            row[start : start + len(known) - 1] = 0.0
            if number:
                row[start + number - 1] = 1.0
            rows.append(row @ fit)
        start += len(known) - 1
        means += _knob_means(knob, known, np.array(rows), figures, draws)
    return tuple(means)


def _knob_means(
    knob: str, known: Sequence[Value], weights: np.ndarray, figures: np.ndarray, draws: np.ndarray
) -> list[LevelMean]:
    """Means in the order of the values: numbers by size, tiers as they first occur."""
    order = list(range(len(known)))
    if all(isinstance(value, int) for value in known):
        order.sort(key=lambda at: float(known[at]))
    values, over_draws = weights @ figures, draws @ weights.T
    first = order[0]
    return [
        LevelMean(
            knob=knob,
            value=known[at],
            mean=float(values[at]),
            ci95=interval(over_draws[:, at]),
            change=float(values[at] - values[first]),
            change_ci95=interval(over_draws[:, at] - over_draws[:, first]),
        )
        for at in order
    ]


def is_beyond_noise(term: Term) -> bool:
    """Whether noise alone would not give so large a term, with a false discovery rate of 5 %."""
    return term.family_p_value is not None and term.family_p_value <= 1 - CONFIDENCE
