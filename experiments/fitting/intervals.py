"""Intervals from draws of whole clusters, and from held-out ratios."""

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache

import numpy as np

from experiment_core_utils.primitives.statistics import CONFIDENCE, DRAWS_AT_ONCE, RESAMPLES

_TAIL_PERCENT = 50 * (1 - CONFIDENCE)


def resampled(generator: np.random.Generator, num_clusters: int, num_draws: int) -> np.ndarray:
    """[B, G], how often each of the clusters is in each draw of as many, with replacement."""
    return generator.multinomial(num_clusters, np.full(num_clusters, 1 / num_clusters), size=num_draws)


def draw_counts(clusters: Sequence[Hashable], pattern: np.ndarray, num_draws: int, seed: int) -> np.ndarray:
    """[B, N], how often each draw contains each sample: all samples of a cluster (a picture) together.

    Args:
        pattern: [N], what a sample has; clusters that have the same are drawn from one another.
    """
    numbers = np.unique(np.asarray(clusters, dtype=str), return_inverse=True)[1]
    num_clusters = int(numbers.max()) + 1
    kinds = np.zeros(num_clusters, dtype=np.int64)
    np.bitwise_or.at(kinds, numbers, np.asarray(pattern, dtype=np.int64))
    generator = np.random.default_rng(seed)
    counts = np.zeros((num_draws, num_clusters), dtype=np.int64)
    for kind in np.unique(kinds):
        members = np.flatnonzero(kinds == kind)
        counts[:, members] = resampled(generator, len(members), num_draws)
    return counts[:, numbers]


def interval(draws: np.ndarray) -> tuple[float, float]:
    """95 % percentile interval of [B] draws; nan does not count."""
    low, high = np.nanpercentile(draws, (_TAIL_PERCENT, 100 - _TAIL_PERCENT))
    return float(low), float(high)


def intervals(draws: np.ndarray) -> list[tuple[float, float]]:
    """`interval` of each column of [B, S] draws."""
    if not np.isfinite(draws).all():
        return [interval(column) for column in draws.T]
    low, high = np.percentile(draws, (_TAIL_PERCENT, 100 - _TAIL_PERCENT), axis=0)
    return list(zip(low.tolist(), high.tolist(), strict=True))


def bootstrap_interval(sums: np.ndarray, counts: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of sum / count over clusters drawn with replacement, with a fixed seed."""
    clusters = len(sums)
    # All draws at once would take gigabytes for large runs; small ones ask for the same draws again and again.
    all_picks = [_few_picks(clusters, seed)] if clusters <= DRAWS_AT_ONCE // RESAMPLES else _picks(clusters, seed)
    means = [sums[picks].sum(axis=1) / counts[picks].sum(axis=1) for picks in all_picks]
    return interval(np.concatenate(means))


def bootstrap_intervals(sums: np.ndarray, counts: np.ndarray, seed: int = 0) -> list[tuple[float, float]]:
    """`bootstrap_interval` of each row of [K, G] sums and counts; all rows get the same draws."""
    clusters = sums.shape[1]
    if clusters > DRAWS_AT_ONCE // RESAMPLES:
        return [bootstrap_interval(*row, seed) for row in zip(sums, counts, strict=True)]
    places = np.arange(RESAMPLES)[:, None] * clusters + _few_picks(clusters, seed)
    drawn = np.bincount(places.ravel(), minlength=RESAMPLES * clusters).reshape(RESAMPLES, clusters).astype(np.float64)
    found: list[tuple[float, float]] = []
    for begin in range(0, len(sums), DRAWS_AT_ONCE // RESAMPLES):
        rows = slice(begin, begin + DRAWS_AT_ONCE // RESAMPLES)
        means = (sums[rows] @ drawn.T) / (counts[rows] @ drawn.T)
        found += intervals(means.T)
    return found


@lru_cache(maxsize=1)
def _few_picks(clusters: int, seed: int) -> np.ndarray:
    (picks,) = _picks(clusters, seed)
    return picks


def _picks(clusters: int, seed: int) -> Iterator[np.ndarray]:
    """[R, G] clusters drawn with replacement, in parts."""
    generator = np.random.default_rng(seed)
    rows = max(DRAWS_AT_ONCE // clusters, 1)
    for begin in range(0, RESAMPLES, rows):
        yield generator.integers(0, clusters, size=(min(rows, RESAMPLES - begin), clusters))


def conformal_ratios(ratios: np.ndarray, level: float) -> tuple[float, float]:
    """Order statistics of n held-out ratios between which the next one lies with probability `level` or more.

    The k-th smallest from either end, k = floor((n + 1) (1 - level) / 2), and the extremes where n is too small for
    that: J. Lei et al., "Distribution-free predictive inference for regression", JASA 113 (2018), 1094, with ratios as
    scores. (1, 1) where no sample has the stage.
    """
    if not len(ratios):
        return 1.0, 1.0
    ordered = np.sort(ratios)
    k = max(int((len(ordered) + 1) * (1 - level) / 2 + 1e-9), 1)
    return float(ordered[k - 1]), float(ordered[-k])
