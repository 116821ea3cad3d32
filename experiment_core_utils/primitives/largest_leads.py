"""The largest lead that a family of contrasts has by chance, from random signs or multipliers of whole pictures.

`contrasts.py` says what a family is, and of which two kinds of flips the larger counts.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy import stats

from experiment_core_utils.primitives.replication import Replication
from experiment_core_utils.primitives.statistics import SEED

FLIPS = 2000
# Flips of so many pictures are all made.
MOST_ENUMERATED = 11
ROUNDING = 1e-16


def scale_of(num_pictures: int, num_samples: int) -> float:
    """What a sum of squares over pictures is times, for the variance of a mean over samples."""
    return num_pictures / (num_pictures - 1) / num_samples**2


def largest_of_flips(
    sums: np.ndarray,
    residuals: np.ndarray,
    counts: np.ndarray,
    reference: int | None,
    replication: Replication,
) -> np.ndarray:
    """[F] ascending, the largest |t| of a family in each flip, of whichever kind of flips has more at that quantile."""
    generator, size = np.random.default_rng(SEED), len(counts)
    if size <= MOST_ENUMERATED and not replication.components:
        # Of a flip and its opposite, which have the same |t|, one.
        signs = 1.0 - 2.0 * ((np.arange(2 ** (size - 1))[:, None] >> np.arange(size)) & 1)
    else:
        signs = generator.choice([-1.0, 1.0], size=(FLIPS, size))
        signs[0] = 1.0  # as measured (B. Phipson and G. Smyth, "Permutation p-values should never be zero", 2010)
    drawn = replication.draw(generator, len(signs), len(sums))
    # By what factor each component's variance might be estimated off in each flip.
    factors = [_estimated(generator, each.degrees, len(signs)) for each in replication.components]

    def added(one: int, others: np.ndarray) -> np.ndarray:
        each = zip(replication.components, factors, strict=True)
        return sum((own.variances(one, others) * factor[:, None] for own, factor in each), np.zeros((len(signs), 1)))

    kinds = [_flipped(each, counts, signs, reference, drawn, added) for each in (sums, residuals)]
    alone = stats.t.ppf((1 + _places(len(signs))) / 2, size - 1)
    return np.asarray(np.maximum(np.maximum(np.sort(kinds[0]), np.sort(kinds[1])), alone))


def _estimated(generator: np.random.Generator, degrees: float, size: int) -> np.ndarray:
    """Estimates of a variance of 1 with so many degrees of freedom."""
    return np.ones(size) if math.isinf(degrees) else generator.chisquare(degrees, size) / degrees


def _places(number: int) -> np.ndarray:
    return np.minimum(np.arange(1, number + 1), number - 0.5) / number


def largest_of_multipliers(residuals: np.ndarray, reference: int | None, added_squares: float) -> np.ndarray:
    """[F] ascending, the largest size of normal variables that are correlated as a family's contrasts are.

    Never below that of one.
    """
    generator = np.random.default_rng(SEED)
    # Whatever the pictures' order is, each has the same multipliers.
    ordered = residuals[:, np.lexsort(np.round(residuals, 9))]
    drawn = generator.normal(size=(FLIPS, residuals.shape[1])) @ ordered.T
    largest = np.zeros(FLIPS)
    for one in range(len(residuals)) if reference is None else (reference,):
        others = _others(len(residuals), one, reference)
        squares = ((residuals[one] - residuals[others]) ** 2).sum(axis=1) + added_squares
        added = generator.normal(0.0, math.sqrt(added_squares), (FLIPS, len(others)))
        leads = np.abs(drawn[:, [one]] - drawn[:, others] + added) / np.sqrt(squares)
        np.maximum(largest, leads.max(axis=1, initial=0.0), out=largest)
    return np.asarray(np.maximum(np.sort(largest), stats.norm.ppf((1 + _places(FLIPS)) / 2)))


def _others(size: int, one: int, reference: int | None) -> np.ndarray:
    """The settings that a family compares this one with, each pair once."""
    return np.arange(one + 1, size) if reference is None else np.delete(np.arange(size), one)


def _flipped(
    sums: np.ndarray,
    counts: np.ndarray,
    signs: np.ndarray,
    reference: int | None,
    drawn: np.ndarray,
    added: Callable[[int, np.ndarray], np.ndarray],
) -> np.ndarray:
    """[F], the largest |t| over the family when pictures' sums [S, G] take these signs [F, G].

    Settings also get [F, S] `drawn`, and contrasts of one with others the variances [F, others] of `added`. Flips leave
    the sum of squares of a difference as it is, so that t follows from the flipped sums alone.
    """
    num_samples, scale = counts.sum(), scale_of(len(counts), int(counts.sum()))
    means, weighted = signs @ sums.T / num_samples, signs @ (sums * counts).T
    largest = np.zeros(len(signs))
    for one in range(len(sums)) if reference is None else (reference,):
        others = _others(len(sums), one, reference)
        if not len(others):
            continue
        squares = ((sums[one] - sums[others]) ** 2).sum(axis=1)
        gaps = means[:, [one]] - means[:, others]
        spread = squares - gaps * (2 * (weighted[:, [one]] - weighted[:, others]) - gaps * (counts @ counts))
        spread *= scale
        if drawn.any():
            gaps += drawn[:, [one]] - drawn[:, others]
            spread += added(one, others)
        gaps *= gaps
        np.maximum(spread, ROUNDING * gaps + np.finfo(float).tiny, out=spread)
        np.maximum(largest, (gaps / spread).max(axis=1), out=largest)
    return np.asarray(np.sqrt(largest))
