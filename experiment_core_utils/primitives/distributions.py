"""In: numbers; out: their spread. Percentiles by linear interpolation, intervals by the t distribution or Wilson."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Distribution:
    """Spread of n numbers in their own unit; `ci_low` and `ci_high` bound the mean with 95 % confidence.

    `std` and the interval are None for a single number: one value says nothing about spread.
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


def describe(values: Sequence[float]) -> Distribution | None:
    """Spread of `values`; None where there are none.

    The standard deviation is the sample's (n - 1). The interval is Student's t for the mean. Raises ValueError for a
    value that is not finite.
    """
    if not values:
        return None
    numbers = np.asarray(values, dtype=np.float64)
    if not np.isfinite(numbers).all():
        raise ValueError("cannot describe values that are not finite")
    mean = float(numbers.mean())
    p50, p95, p99 = (float(np.percentile(numbers, percent)) for percent in (50, 95, 99))
    std = ci_low = ci_high = None
    if len(numbers) > 1:
        std = float(numbers.std(ddof=1))
        half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(numbers) - 1)) * std / math.sqrt(len(numbers))
        ci_low, ci_high = mean - half, mean + half
    return Distribution(
        len(numbers), mean, std, p50, p95, p99, float(numbers.min()), float(numbers.max()), ci_low, ci_high
    )


def bounded_mean_interval(values: Sequence[float], seed: int = 0, resamples: int = 2000) -> tuple[float, float] | None:
    """95 % interval for the mean of scores in [0, 1], None for no scores.

    Scores that are all 0 or 1 get Wilson's interval (Wilson 1927, JASA 22:209), which holds for few samples and at
    the ends; others a percentile bootstrap with a fixed seed, or Wilson's on the mean where all are equal.
    """
    if not values:
        return None
    numbers = np.asarray(values, dtype=np.float64)
    if np.isin(numbers, (0.0, 1.0)).all() or np.ptp(numbers) == 0:
        return _wilson(float(numbers.mean()), len(numbers))
    picks = np.random.default_rng(seed).integers(0, len(numbers), size=(resamples, len(numbers)))
    means = numbers[picks].mean(axis=1)
    tail = 50 * (1 - CONFIDENCE)
    return float(np.percentile(means, tail)), float(np.percentile(means, 100 - tail))


def _wilson(share: float, n: int) -> tuple[float, float]:
    z = float(stats.norm.ppf(0.5 + CONFIDENCE / 2))
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(centre - half, 0.0), min(centre + half, 1.0)
