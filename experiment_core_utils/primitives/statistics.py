"""Distributions of numbers: percentiles by linear interpolation, intervals of means and of scores; Pareto fronts."""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import betaincinv, stdtrit

CONFIDENCE = 0.95
RESAMPLES = 2000
SEED = 0
DRAWS_AT_ONCE = 4_000_000
# A quantile beyond which fewer draws lie is found by integration, with this step.
FEWEST_DRAWS_BEYOND = 20
INTEGRATION_STEP = 0.1
# A mean of which more is open is not known at all; of values of which none is below 0 it is at most 18.
MOST_LOG_HALF_WIDTH = 20.0
# Stands for the logarithm of 0 where a finite number is needed.
LOG_OF_NEVER = -700.0


@dataclass(frozen=True)
class Distribution:
    """Spread of n numbers in their own unit; `ci_low` and `ci_high` bound the mean with 95 % confidence, above 0 where
    no number is below it.

    `std` is None for a single number, and the interval for a single cluster: one value says nothing about spread.
    """

    n: int
    mean: float
    std: float | None
    p50: float
    p95: float
    p99: float
    min: float
    max: float
    ci_low: float | None
    ci_high: float | None


def mean_of(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def highest_of(values: Sequence[float | None]) -> float | None:
    """Highest of the values that are known; None where none is."""
    return max((value for value in values if value is not None), default=None)


def describe(
    values: Sequence[float], clusters: Sequence[Hashable] | None = None, weights: Sequence[float] | None = None
) -> Distribution | None:
    """Spread of `values`; None where there are none.

    The standard deviation is the sample's (n - 1), whatever the clusters. The interval is Student's t for the mean
    over clusters, as in `relative_half_width`; of values of which none is below 0 for the logarithm of that mean, as in
    `positive_interval`.

    Args:
        clusters: the cluster of each value; None where each value is one of its own.
        weights: how much each value counts; None where all count the same. Minimum and maximum are of all values.

    Raises:
        ValueError: a value is not finite.
    """
    if not values:
        return None
    numbers = np.asarray(values, dtype=np.float64)
    if not np.isfinite(numbers).all():
        raise ValueError("cannot describe values that are not finite")
    shares = np.ones(len(numbers)) if weights is None else np.asarray(weights, dtype=np.float64)
    mean = float(np.average(numbers, weights=shares))
    p50, p95, p99 = percentiles(numbers, (50, 95, 99), shares)
    variance = float(np.average((numbers - mean) ** 2, weights=shares))
    std = math.sqrt(variance * len(numbers) / (len(numbers) - 1)) if len(numbers) > 1 else None
    half = _half_width(*cluster_totals(numbers, clusters, shares), mean)
    least, most = float(numbers.min()), float(numbers.max())
    ends: tuple[float | None, float | None] = (None, None)
    if half is not None:
        ends = positive_interval(mean, half) if least >= 0 else (mean - half, mean + half)
    return Distribution(len(numbers), mean, std, p50, p95, p99, least, most, *ends)


def positive_interval(mean: float, half: float) -> tuple[float, float]:
    """The interval mean * exp(-/+ half / mean) of a quantity that is not below 0; 0 alone where the mean is 0.

    It is that of the logarithm of the mean, whose standard error is the mean's over the mean (delta method). In 20,000
    draws each of 2 to 52 values it contains the mean in 95 % of normal ones with a deviation of a tenth (as mean -/+
    half does), in 93 to 95 % of exponential ones (88 to 94 %) and in 92 to 95 % of lognormal ones with a deviation of
    0.7 (88 to 93 %): means of skewed values are missed above. Of 2 values, most of them 0, it does in 83 % (88 %).

    Args:
        half: of the symmetric interval of the mean.
    """
    if mean == 0:
        return 0.0, 0.0
    times = math.exp(min(half / mean, MOST_LOG_HALF_WIDTH))
    return mean / times, mean * times


def half_of_interval(mean: float, low: float, high: float) -> float:
    """`half` of a `positive_interval`; 0 where the mean is 0."""
    return mean * math.log(high / low) / 2 if mean else 0.0


def percentiles(values: np.ndarray, percents: Sequence[float], weights: np.ndarray) -> list[float]:
    """Percentiles of values [n], at least one, of which each counts by its weight [n], above 0.

    Between two neighbouring values the percentile is interpolated; a value is at the middle of its weight, the smallest
    at 0 % and the largest at 100 %. With equal weights these are numpy's.
    """
    order = np.argsort(values, kind="stable")
    ordered, shares = values[order], weights[order]
    # Steps between neighbours are the means of their weights.
    places = np.concatenate([[0.0], np.cumsum(shares[:-1] + shares[1:])])
    return [float(np.interp(percent / 100 * places[-1], places, ordered)) for percent in percents]


def percentiles_over_runs(runs: np.ndarray, percents: Sequence[float]) -> list[float]:
    """`percentiles` of the known values of [R, N], at least one; the runs of a column together count as one value."""
    known = np.isfinite(runs)
    weights = known / np.maximum(known.sum(axis=0), 1)
    return percentiles(runs[known], percents, weights[known])


def fraction_above(runs: np.ndarray, limit: float | np.ndarray) -> np.ndarray:
    """The fraction [...] of the known values of [R, ...] that are above a limit; nan where none is known."""
    number = np.isfinite(runs).sum(axis=0)
    return np.asarray(np.where(number > 0, (runs > limit).sum(axis=0) / np.maximum(number, 1), np.nan))


def bounded_mean_interval(
    values: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    best: float = 1.0,
    worst: float = 0.0,
    tail: float = (1 - CONFIDENCE) / 2,
) -> tuple[float, float] | None:
    """95 % interval for the mean of scores in [`worst`, `best`], inside these bounds; None for no scores.

    The one interval of an accuracy, and of a difference of accuracies (`worst` = -`best`). Each end is the 97.5 % bound
    of N. Gaffke ("Three test statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative
    variable", Mathematical Methods of Statistics 14 (2005); E. Learned-Miller and P. Thomas, arXiv:1905.06208): the
    weighted mean of the scores and of one more score at that end, under weights that are uniform over all that add up
    to 1. For scores of 0 or 1 it is Clopper's and Pearson's exact interval, which holds for any number of samples.
    Where the weighted mean has no closed form, its quantile is that of `RESAMPLES` draws with a fixed seed; where fewer
    than `FEWEST_DRAWS_BEYOND` of them would lie beyond it, it is found by numerical integration.

    Scores of one cluster (questions about one picture) are not independent, so that weights are of clusters.

    Args:
        clusters: the cluster of each score; None where each score is one of its own.
        tail: probability with which each end may fail.
    """
    if not values:
        return None
    sums, counts = cluster_totals(values, clusters)
    ((low, high),) = bounded_mean_intervals(sums[None], counts, best, worst, tail)
    return low, high


def bounded_mean_intervals(
    sums: np.ndarray,
    counts: np.ndarray,
    best: float = 1.0,
    worst: float = 0.0,
    tail: float = (1 - CONFIDENCE) / 2,
) -> list[tuple[float, float]]:
    """`bounded_mean_interval` of each row of [K, G] sums of scores of clusters that contain [G] scores."""
    ends = [_mean_bounds(sums, counts, end, tail) for end in (worst, best)]
    # Rounding apart, each end is on its side of the mean.
    return [(max(low, worst), min(high, best)) for low, high in zip(*ends, strict=True)]


def _mean_bounds(sums: np.ndarray, counts: np.ndarray, end: float, tail: float) -> list[float]:
    """Gaffke's bound of each of K rows, on the side of the range's `end`."""
    clusters, means = len(counts), sums / counts
    bounds, drawn = [math.nan] * len(sums), []
    for row, own in enumerate(means):
        apart = own[np.abs(own - end) > 1e-12]
        if not len(apart):
            bounds[row] = end
        elif np.ptp(apart) < 1e-12 and np.ptp(counts) == 0:
            # The weight of those at the end, with the one more, is Beta distributed.
            weight = float(betaincinv(clusters - len(apart) + 1, len(apart), 1 - tail))
            bounds[row] = float(apart[0] + weight * (end - apart[0]))
        else:
            drawn.append(row)
    if drawn and tail * RESAMPLES < FEWEST_DRAWS_BEYOND:
        for row in drawn:
            bounds[row] = _integrated_bound(sums[row], counts, end, tail)
    elif drawn:
        share = 1 - tail if end > means[drawn[0]].min() else tail
        found = [_drawn_means(sums[drawn], counts, end, weights) for weights in _weights(clusters)]
        for row, bound in zip(drawn, np.quantile(np.concatenate(found), share, axis=0), strict=True):
            bounds[row] = float(bound)
    return bounds


def _integrated_bound(sums: np.ndarray, counts: np.ndarray, end: float, tail: float) -> float:
    """The bound b such that the weighted mean of [G] clusters and one more is between b and `end` with chance `tail`.

    Weights are exponential variables divided by their sum, so that the weighted mean is above b where the sum over
    clusters of (sum - b * count) times such a variable is above 0.
    """
    mean, more = float(sums.sum() / counts.sum()), float(counts.mean())
    towards_end = 1.0 if end > mean else -1.0

    def excess(bound: float) -> float:
        beyond = log_chance_above(towards_end * sums, counts, towards_end * bound, towards_end * more * end, more)
        return beyond - math.log(tail)

    # Nothing is beyond the end, and a third or more beyond the mean.
    return float(brentq(excess, end, mean, xtol=1e-6 * abs(end - mean)))


def log_chance_above(sums: np.ndarray, counts: np.ndarray, limit: float, more_sum: float, more_count: float) -> float:
    """Logarithm of the chance that Gaffke's weighted mean of [G] clusters and one more is above `limit`.

    With the one more at the range's upper end it is the p-value of the hypothesis that the mean is not below `limit`:
    for values of 0 and 1 that of the binomial test, for -1, 0 and 1 at a limit of 0 that of the exact sign test. With
    a one more that counts nothing it is, in both, the chance of less than what was seen.
    """
    excess = np.append(sums - limit * counts, more_sum - limit * more_count)
    scales, numbers = np.unique(excess[excess != 0], return_counts=True)
    return _log_chance_above_zero(scales, numbers)


def _log_chance_above_zero(scales: np.ndarray, numbers: np.ndarray) -> float:
    """Logarithm of the chance that a sum of exponential variables times scales is above 0.

    It is the integral of M(z) / (2 pi i z) over a line z = c + iy, where M(z), the product of 1 / (1 - scale * z), is
    the moment generating function. Imhof's inversion of the characteristic function (Biometrika 48 (1961) 419) is that
    for c = 0. With c at the saddle point nothing cancels, so that small chances are precise, too (S. Rice,
    "Distribution of quadratic forms in normal random variables: evaluation by numerical integration", SIAM Journal on
    Scientific and Statistical Computing 1 (1980) 438). With y proportional to sinh(u) the trapezoidal rule has an error
    of at most about 1e-4 of the chance.

    Args:
        scales: [J], different ones.
        numbers: [J] how many variables have each scale.
    """
    highest, total = float(scales.max(initial=0.0)), int(numbers.sum())
    if highest <= 0:
        return LOG_OF_NEVER
    scales = scales / highest

    def slope(c: float) -> float:
        """Derivative of log(M(c) / c), which grows from below 0 to above it between these ends."""
        return float(numbers @ (scales / (1 - scales * c))) - 1 / c

    c = float(brentq(slope, 1 / (total + 2), (total + 1) / (total + 2)))
    rates = scales / (1 - scales * c)
    width = 1 / math.sqrt(float(numbers @ rates**2) + 1 / c**2)

    def integrand(u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Size and angle at each u, relative to the saddle point."""
        y = width * np.sinh(u)
        turns = y[:, None] * rates
        size = np.exp(np.log1p(turns**2) @ numbers / -2) / np.hypot(1, y / c) * np.cosh(u)
        return size, np.arctan(turns) @ numbers - np.arctan(y / c)

    coarse = np.array([2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0])
    last = coarse[np.append(integrand(coarse)[0][:-1] < 1e-6, True).argmax()]
    size, angle = integrand(np.arange(0, last, INTEGRATION_STEP))
    found = size * np.cos(angle)
    integral = width * INTEGRATION_STEP * (found.sum() - found[0] / 2)
    return math.log(integral / (math.pi * c)) - float(numbers @ np.log1p(-scales * c))


def _drawn_means(sums: np.ndarray, counts: np.ndarray, end: float, weights: np.ndarray) -> np.ndarray:
    """[R, K] weighted means of the scores of clusters and of one more cluster at `end`, from [R, G + 1] weights."""
    more = counts.mean() * weights[:, -1:]
    return np.asarray((weights[:, :-1] @ sums.T + more * end) / (weights[:, :-1] @ counts[:, None] + more))


def _weights(clusters: int) -> Sequence[np.ndarray] | Iterator[np.ndarray]:
    """[R, G + 1] weights in parts; divided by their sum they are uniform over all that add up to 1."""
    if clusters <= DRAWS_AT_ONCE // RESAMPLES:
        return (_few_weights(clusters),)
    generator, rows = np.random.default_rng(SEED), max(DRAWS_AT_ONCE // clusters, 1)
    sizes = [min(rows, RESAMPLES - begin) for begin in range(0, RESAMPLES, rows)]
    return (generator.exponential(size=(size, clusters + 1)) for size in sizes)


@lru_cache(maxsize=1)
def _few_weights(clusters: int) -> np.ndarray:
    return np.random.default_rng(SEED).exponential(size=(RESAMPLES, clusters + 1))


def ratio_interval(
    one: float,
    one_interval: tuple[float, float],
    other: float,
    other_interval: tuple[float, float],
    correlation: float = 0.0,
) -> tuple[float, float | None]:
    """Interval of `one` / `other`, both above 0, from the intervals (l1, u1) and (l2, u2) of two estimates.

    MOVER-R: the lower limit R is where the interval of one - R * other, of which each side is put together from the
    distances of the two estimates to their own limits in squares, ends at 0, the upper limit likewise: R^2 * u2 * (2 *
    other - u2) - 2 * R * (one * other - r * (one - l1) * (u2 - other)) + l1 * (2 * one - l1) = 0 with the estimates'
    correlation r, and with l2 and u1 for the upper one (A. Donner and G. Zou, "Closed-form confidence intervals for
    functions of the normal mean and standard deviation", Statistical Methods in Medical Research 21 (2012) 347; R.
    Newcombe, "MOVER-R confidence intervals for ratios and products of two independently estimated quantities", ibid. 25
    (2016) 1774). With symmetrical intervals it is Fieller's; it keeps the asymmetry of an interval such as an
    accuracy's. The upper limit is None where l2 is not above 0.
    """
    (l1, u1), (l2, u2) = one_interval, other_interval

    def larger_root(end: float, other_end: float) -> float:
        """Half of the linear term and the square root of the discriminant, with these ends of one and of other."""
        middle = one * other - correlation * (one - end) * (other_end - other)
        return middle + math.sqrt(max(middle**2 - end * (2 * one - end) * other_end * (2 * other - other_end), 0.0))

    low = l1 * (2 * one - l1) / larger_root(l1, u2)
    return low, larger_root(u1, l2) / (l2 * (2 * other - l2)) if l2 > 0 else None


def correlation_of_means(
    one: Sequence[float],
    one_clusters: Sequence[Hashable],
    other: Sequence[float],
    other_clusters: Sequence[Hashable],
) -> float:
    """Correlation of two means over clusters that they share in part; 0 where one of them does not vary.

    Each cluster moves a mean by (sum - mean * count) / n; what moves both makes them correlated.
    """
    moved: list[dict[Hashable, float]] = []
    for values, clusters in ((one, one_clusters), (other, other_clusters)):
        numbers = np.asarray(values, dtype=np.float64)
        sums, _ = cluster_totals(numbers - numbers.mean(), clusters)
        moved.append(dict(zip(dict.fromkeys(clusters), map(float, sums), strict=True)))
    first, second = moved
    shared = math.fsum(value * second.get(cluster, 0.0) for cluster, value in first.items())
    size = math.sqrt(math.fsum(v * v for v in first.values()) * math.fsum(v * v for v in second.values()))
    return shared / size if size > 0 else 0.0


def cluster_totals(
    values: Sequence[float] | np.ndarray,
    clusters: Sequence[Hashable] | None,
    weights: Sequence[float] | np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Sum and number of the values of each cluster, [G] and [G], in the order in which clusters are met.

    Args:
        weights: how many values each one counts as; None where each is one.
    """
    shares = np.ones(len(values)) if weights is None else np.asarray(weights, dtype=np.float64)
    weighted = np.asarray(values, dtype=np.float64) * shares
    if clusters is None:
        return weighted, shares
    sums: dict[Hashable, float] = defaultdict(float)
    counts: dict[Hashable, float] = defaultdict(float)
    for value, share, cluster in zip(weighted.tolist(), shares.tolist(), clusters, strict=True):
        sums[cluster] += value
        counts[cluster] += share
    return np.array([*sums.values()]), np.array([*counts.values()])


def relative_half_width(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> float | None:
    """Half of the 95 % interval of the mean, as a fraction of the mean; None for fewer than 2 clusters or a mean of 0.

    Student's t over values, or, where values share a cluster (samples that share a picture), over clusters: the
    variance of the mean is G / (G - 1) * sum over clusters of (sum - mean * count)^2 / n^2, with G - 1 degrees of
    freedom (W. Cochran, "Sampling Techniques", 3rd ed. 1977, 9A). The interval of `describe` is by it.
    """
    sums, counts = cluster_totals(values, clusters)
    mean = float(sums.sum() / counts.sum()) if len(sums) else 0.0
    half = _half_width(sums, counts, mean)
    return None if half is None or mean == 0.0 else half / abs(mean)


def _half_width(sums: np.ndarray, counts: np.ndarray, mean: float) -> float | None:
    """Half of the 95 % interval of the mean of clusters with these sums and counts; None for fewer than 2 clusters."""
    groups = len(sums)
    if groups < 2:
        return None
    variance = groups / (groups - 1) * float(((sums - mean * counts) ** 2).sum()) / float(counts.sum()) ** 2
    return float(stdtrit(groups - 1, 0.5 + CONFIDENCE / 2)) * math.sqrt(variance)


def rate(one: float, other: float) -> float | None:
    """`one` per `other`; None where there is nothing of either, so that a run without work has no rate of 0."""
    return one / other if one and other else None


def fraction_of(part: float, whole: float) -> float | None:
    """`part` / `whole`; None where there is nothing of the whole."""
    return part / whole if whole else None


def on_front(cost: np.ndarray, accuracy: np.ndarray, allowance: float = 0.0) -> np.ndarray:
    """[..., S] bool from [..., S] and [..., S].

    Args:
        allowance: share by which every other setting's cost is taken as higher.
    """
    if not cost.size:
        return np.zeros(cost.shape, dtype=bool)
    size = cost.shape[-1]
    costs, accuracies = cost.reshape(-1, size), accuracy.reshape(-1, size)
    rows = [_on_front_of_one(*row, allowance) for row in zip(costs, accuracies, strict=True)]
    return np.array(rows, dtype=bool).reshape(cost.shape)


def _on_front_of_one(cost: np.ndarray, accuracy: np.ndarray, allowance: float) -> np.ndarray:
    """[S]; by the highest accuracy up to each cost, so that the time grows with S log S."""
    order = np.argsort(cost, kind="stable")
    others = cost[order] * (1 + allowance)
    # What costs less, and what costs no more; the highest accuracy of none is below all.
    highest = np.concatenate([[-np.inf], np.fmax.accumulate(accuracy[order])])
    less, no_more = (highest[np.searchsorted(others, cost, side=side)] for side in ("left", "right"))
    dominated = (less >= accuracy) | (no_more > accuracy)
    return np.asarray(~dominated | np.isnan(cost))


def spread_of(values: Sequence[float]) -> dict[str, Any] | None:
    """The keys of `Distribution`; None for no values."""
    spread = describe(values)
    return None if spread is None else asdict(spread)
