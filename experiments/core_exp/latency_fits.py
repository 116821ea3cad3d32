"""In: points and the cluster of each; out: a straight line through them with intervals from a bootstrap. Pure."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from experiment_core_utils.primitives.distributions import CONFIDENCE, RESAMPLES


@dataclass(frozen=True)
class LineFit:
    """y = intercept + slope x by ordinary least squares; intervals of 95 %, None where `reason` says why.

    The intervals are percentiles of 2000 fits to clusters drawn with replacement, with a fixed seed, because points of
    one cluster are not independent. Where points are clustered in several ways (by picture, and by the setting during
    which they were measured), each way gives an interval, and what stands here reaches from the lowest end to the
    highest.

    Attributes:
        r2: share of the variance of y that the line explains.
        residual_std: standard deviation of what it does not explain (n - 2).
        n: points.
        num_clusters: the fewest that were drawn from, of the ways that have at least two.
        x_min, x_max: where there were points; outside the line is a guess.
    """

    intercept: float
    slope: float
    intercept_ci95: tuple[float, float] | None
    slope_ci95: tuple[float, float] | None
    r2: float | None
    residual_std: float | None
    n: int
    num_clusters: int
    x_min: float
    x_max: float
    reason: str | None

    def at(self, x: float) -> float:
        """The line's value."""
        return self.intercept + self.slope * x


def fit_line(
    x: Sequence[float], y: Sequence[float], clusterings: Sequence[Sequence[Hashable]], seed: int = 0
) -> tuple[LineFit | None, str | None]:
    """The line, or None with the reason: fewer than 3 points, or all at one x.

    Args:
        clusterings: for each way, the cluster of each point.

    Raises:
        ValueError: x, y and clusters of different lengths, or a value that is not finite.
    """
    lengths = [len(each) for each in (x, y, *clusterings)]
    if len(set(lengths)) > 1:
        raise ValueError(f"x, y and clusters of {', '.join(map(str, lengths))} points do not fit together")
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if not (np.isfinite(xs).all() and np.isfinite(ys).all()):
        raise ValueError("cannot fit values that are not finite")
    if len(xs) < 3:
        return None, f"{len(xs)} points; a line with its scatter needs at least 3"
    if np.ptp(xs) == 0:
        return None, f"all points have the same x ({xs[0]:g})"
    # Centred, so that sums of squares keep their digits.
    centre = xs.mean()
    middle, slope = (float(each) for each in _solved(_sums_by_cluster(xs - centre, ys, [0] * len(xs))[0]))
    residuals = ys - (middle + slope * (xs - centre))
    total = float(((ys - ys.mean()) ** 2).sum())
    ways = [_sums_by_cluster(xs - centre, ys, each) for each in clusterings]
    drawn_from = [len(sums) for sums in ways if len(sums) > 1]
    draws = [lines for sums in ways if (lines := _draws(sums, seed)) is not None]
    return LineFit(
        intercept=middle - slope * float(centre),
        slope=slope,
        intercept_ci95=_hull([lines[:, 0] - lines[:, 1] * centre for lines in draws]),
        slope_ci95=_hull([lines[:, 1] for lines in draws]),
        r2=1.0 - float((residuals**2).sum()) / total if total > 0 else None,
        residual_std=float(np.sqrt((residuals**2).sum() / (len(xs) - 2))),
        n=len(xs),
        num_clusters=min(drawn_from, default=1),
        x_min=float(xs.min()),
        x_max=float(xs.max()),
        reason=None if draws else "no interval: all points are of one cluster, whose spread says nothing of others",
    ), None


def _sums_by_cluster(x: np.ndarray, y: np.ndarray, clusters: Sequence[Hashable]) -> np.ndarray:
    """n, sum of x, of y, of xx and of xy for each cluster, [G, 5]: enough for any fit to whole clusters."""
    place = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters))}
    owners = np.array([place[cluster] for cluster in clusters])
    columns = (np.ones_like(x), x, y, x * x, x * y)
    return np.stack([np.bincount(owners, column, minlength=len(place)) for column in columns], axis=1)


def _solved(sums: np.ndarray) -> np.ndarray:
    """Intercept and slope from such sums, [..., 5] -> [..., 2]; NaN where all x are equal."""
    n, x, y, xx, xy = np.moveaxis(sums, -1, 0)
    spread = n * xx - x * x
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where(spread > 1e-9 * n * xx, (n * xy - x * y) / spread, np.nan)
    return np.stack([(y - slope * x) / n, slope], axis=-1)


def _draws(sums: np.ndarray, seed: int) -> np.ndarray | None:
    """Intercept (at the centre) and slope of each resample, [R, 2]; those with all points at one x are left out."""
    groups = len(sums)
    if groups < 2:
        return None
    picks = np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), size=RESAMPLES)
    lines = _solved(picks @ sums)
    return lines[np.isfinite(lines).all(axis=1)]


def _hull(draws: Sequence[np.ndarray]) -> tuple[float, float] | None:
    tail = 50 * (1 - CONFIDENCE)
    ends = [np.percentile(each, (tail, 100 - tail)) for each in draws]
    return (float(min(low for low, _ in ends)), float(max(high for _, high in ends))) if ends else None
