"""Intervals from draws of whole clusters, and from held-out ratios."""

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache

import numpy as np

from experiment_core_utils.primitives.statistics import CONFIDENCE, DRAWS_AT_ONCE, RESAMPLES

_TAIL_PERCENT = 50 * (1 - CONFIDENCE)


def resampled(generator: np.random.Generator, num_clusters: int, num_draws: int) -> np.ndarray:
    """[B, G], how often each of the clusters is in each draw of as many, with replacement."""
    return generator.multinomial(num_clusters, np.full(num_clusters, 1 / num_clusters), size=num_draws)


def drawn_medians(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[B], the median of each draw, which contains each of [N] values as often as its count in [B, N]."""
    order = np.argsort(values)
    last = counts[:, order].cumsum(axis=1)
    middle = [(last[:, -1:] - 1) // 2, last[:, -1:] // 2]
    return np.asarray(np.mean([values[order][(last > place).argmax(axis=1)] for place in middle], axis=0))


def drawn_sums(sums: np.ndarray, seed: int = 0) -> np.ndarray:
    """[R, C], sums over as many clusters drawn with replacement, of [G, C] sums of each cluster; a seed is a draw."""
    # All draws of many clusters would take gigabytes; few clusters ask for the same draws again and again.
    is_small = len(sums) * RESAMPLES <= DRAWS_AT_ONCE
    parts = (_few_counts(len(sums), seed),) if is_small else _counts(len(sums), seed)
    return np.concatenate([counts @ sums for counts in parts])


def ratio_intervals(sums: np.ndarray, counts: np.ndarray) -> list[tuple[float, float]]:
    """95 % percentile interval of sum / count over drawn clusters, of each row of [K, G] sums and counts."""
    drawn = drawn_sums(np.concatenate([sums, counts]).T)
    return intervals(drawn[:, : len(sums)] / drawn[:, len(sums) :])


@lru_cache(maxsize=8)
def _few_counts(num_clusters: int, seed: int) -> np.ndarray:
    """[R, G]; their counts are below 2^16, because the clusters are."""
    return np.concatenate(list(_counts(num_clusters, seed))).astype(np.uint16)


def _counts(num_clusters: int, seed: int) -> Iterator[np.ndarray]:
    """[R, G] in parts, how often each draw holds each cluster."""
    generator, rows = np.random.default_rng(seed), max(DRAWS_AT_ONCE // num_clusters, 1)
    for begin in range(0, RESAMPLES, rows):
        yield resampled(generator, num_clusters, min(rows, RESAMPLES - begin))


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
