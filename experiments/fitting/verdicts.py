"""How sure it is that one setting's P95 or P99 is below another's on the same samples, and intervals that hold level.

The test is exact and assumes nothing of the times' distribution; below `fewest_for` pictures it can never say that two
differ, so there is no verdict then. Means are compared by `experiment_core_utils/primitives/contrasts.py`.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats
from scipy.special import bdtr, bdtrc

from experiment_core_utils.primitives.contrasts import FEWEST_PICTURES
from experiment_core_utils.primitives.statistics import CONFIDENCE

# One side of a 95 % interval: a difference is confident where it fails with this probability at most.
TAIL = (1 - CONFIDENCE) / 2
# What each of the three tests of a percentile may fail with, as fractions of the level: the percentile itself may be
# higher or lower than thought, or the pairs mislead.
_HIGHER, _LOWER, _PAIRS = 0.5, 0.1, 0.4


def fewest_for(percent: float | None, level: float = TAIL) -> int:
    """The fewest pictures of which a percentile, or a mean (None), is said to be confidently lower."""
    if percent is None:
        return FEWEST_PICTURES
    return math.ceil(math.log(_HIGHER * level) / math.log(percent / 100))


def first_of_each(clusters: Sequence[str] | np.ndarray) -> np.ndarray:
    """Indices of the first sample of each cluster (picture), in the order of the samples."""
    return np.sort(np.unique(np.asarray(clusters), return_index=True)[1])


def means_and_errors(values: np.ndarray, clusters: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Mean [R] of each row of [R, n], its standard error [R] over G clusters, and G - 1 degrees of freedom.

    The variance of the mean is G / (G - 1) * sum over clusters of (sum - mean * count)^2 / n^2 (W. Cochran, "Sampling
    Techniques", 3rd ed. 1977, 9A); infinite for one cluster.
    """
    means, residuals = _residuals(values, clusters)
    groups = residuals.shape[1]
    if groups < 2:
        return means, np.full(len(values), np.inf), 0
    return means, np.sqrt((residuals**2).sum(axis=1) * groups / (groups - 1)) / values.shape[1], groups - 1


def cluster_sums(values: np.ndarray, clusters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums [R, G] of each row of [R, n] over each of G clusters, and the number of values [G] in each."""
    counts = np.bincount(clusters).astype(np.float64)
    sums = np.zeros((len(values), len(counts)))
    # In the order of the samples, as np.bincount adds.
    for sample, cluster in enumerate(clusters):
        sums[:, cluster] += values[:, sample]
    return sums, counts


def _residuals(values: np.ndarray, clusters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean [R] of each row of [R, n], and for each of G clusters [R, G] its sum less its number of values' means."""
    sums, counts = cluster_sums(values, clusters)
    means = values.mean(axis=1)
    return means, sums - counts * means[:, None]


def tail_p_values(one: np.ndarray, others: np.ndarray, percent: float) -> np.ndarray:
    """[R], the p-value that the percentile of `one` [n] is not below that of each row of `others` [R, n].

    Pairs are independent of one another, the two of a pair need not be. Were the percentile of `one` at t, then the
    number of its times above t would be binomial, and of the pairs that t parts (exactly one time above it) no more
    than half would have the other's above it: the sign test of the two fractions (McNemar's). Both are tested at every
    t, with the fractions of the level above (Bonferroni), and the p-value is the highest over t, so that it holds
    whatever the percentile is (R. Berger and D. Boos, JASA 89 (1994), for the idea). No distribution is assumed.
    """
    n, above = len(one), 1 - percent / 100
    ordered = np.sort(one)
    # t just below the k-th smallest time, and above all: between two of them the p-value is highest at the upper end.
    numbers = n - np.arange(n + 1)
    own = np.minimum(bdtr(numbers, n, above) / _HIGHER, bdtrc(numbers - 1, n, above) / _LOWER)
    highest = np.full(len(others), min(float(own[-1]), 1.0))
    for k in np.flatnonzero(own[:-1] > 1e-9).tolist():
        is_above, others_above = one >= ordered[k], others >= ordered[k]
        worse = (others_above & ~is_above).sum(axis=1)
        parted = worse + (is_above & ~others_above).sum(axis=1)
        pairs = bdtrc(worse - 1, parted, 0.5) / _PAIRS
        np.maximum(highest, np.minimum(pairs, own[k]), out=highest)
    return np.minimum(highest, 1.0)


def tail_interval(values: np.ndarray, percent: float, level: float = TAIL) -> tuple[float, float] | None:
    """Interval of a percentile of which each end fails with probability `level`: two order statistics.

    None where there are too few values for an upper end (H. David and H. Nagaraja, "Order Statistics", 3rd ed. 2003,
    7.1).
    """
    n, ordered = len(values), np.sort(values)
    if (percent / 100) ** n > level:
        return None
    # With so many below the percentile or fewer in `level` of all cases, and with so many or more.
    low = int(stats.binom.ppf(level, n, percent / 100))
    high = int(stats.binom.isf(level, n, percent / 100))
    return float(ordered[max(low - 1, 0)]), float(ordered[min(high, n - 1)])
