"""Linear fits of a stage's time against its driver, with intervals from a bootstrap over clusters."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from experiment_core_utils.knobs.active_blocks import ACTIVE_BLOCKS
from experiment_core_utils.knobs.interface import Level
from experiment_core_utils.knobs.registry import all_knobs, knob_named
from experiments.analyses.stages.fractions import Generation, grouped, sums_by_cluster
from experiments.fitting.intervals import drawn_sums, interval
from experiments.fitting.regression import LEAST_SPAN


@dataclass(frozen=True)
class LineFit:
    """The line y = intercept + slope x by ordinary least squares; intervals of 95 %, None where `reason` says why.

    The intervals are percentiles of 2000 fits to clusters drawn with replacement, with a fixed seed, because points of
    one cluster are not independent. Where points are clustered in several ways (by picture, and by the setting during
    which they were measured), each way gives an interval, and the one here reaches from the lowest end to the
    highest.
    """

    intercept: float
    slope: float
    intercept_ci95: tuple[float, float] | None
    slope_ci95: tuple[float, float] | None
    r2: float | None  #: fraction of the variance of y that the line explains
    residual_std: float | None  #: standard deviation of what it does not explain (n - 2)
    n: int  #: points
    num_clusters: int  #: the fewest that were drawn from, of the ways that have at least two
    #: x_min, x_max: where there were points; outside the line is a guess
    x_min: float
    x_max: float
    reason: str | None

    def at(self, x: float) -> float:
        """The line's value at x."""
        return self.intercept + self.slope * x


def fit_line(
    x: Sequence[float], y: Sequence[float], clusterings: Sequence[Sequence[Hashable]]
) -> tuple[LineFit | None, str | None]:
    """The line, or None with the reason: fewer than 3 points, or no span of x.

    Args:
        x: 0 or more.
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
    if xs.max() < LEAST_SPAN * xs.min():
        return None, f"x is {xs.min():.6g} to {xs.max():.6g}, and a slope takes {LEAST_SPAN:g} times the smallest x"
    # Centred, so that sums of squares keep their digits.
    centre = xs.mean()
    middle, slope = (float(each) for each in _solved(_sums_by_cluster(xs - centre, ys, [0] * len(xs))[0]))
    residuals = ys - (middle + slope * (xs - centre))
    total = float(((ys - ys.mean()) ** 2).sum())
    ways = [_sums_by_cluster(xs - centre, ys, each) for each in clusterings]
    drawn_from = [len(sums) for sums in ways if len(sums) > 1]
    draws = [lines for sums in ways if (lines := _draws(sums)) is not None]
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
        reason=None if draws else "no interval: all points belong to one cluster",
    ), None


def known_line(
    x: Sequence[float], y: Sequence[float], clusterings: Sequence[Sequence[Hashable]]
) -> tuple[LineFit | None, str | None]:
    """The line as `fit_line` has it, or None with the reason, also where its slope is not known within a half of it."""
    fit, reason = fit_line(x, y, clusterings)
    if fit is None or fit.slope_ci95 is None:
        return None, reason if fit is None else fit.reason
    low, high = fit.slope_ci95
    if high - low > abs(fit.slope):
        return None, "the points scatter too much: the 95 % interval of the slope is wider than the slope"
    return fit, None


def _sums_by_cluster(x: np.ndarray, y: np.ndarray, clusters: Sequence[Hashable]) -> np.ndarray:
    """n, sum of x, of y, of xx and of xy for each cluster, [G, 5]: enough for any fit to whole clusters."""
    return sums_by_cluster((np.ones_like(x), x, y, x * x, x * y), clusters)


def _solved(sums: np.ndarray) -> np.ndarray:
    """Intercept and slope from such sums, [..., 5] -> [..., 2]; NaN where all x are equal."""
    n, x, y, xx, xy = np.moveaxis(sums, -1, 0)
    spread = n * xx - x * x
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where(spread > 1e-9 * n * xx, (n * xy - x * y) / spread, np.nan)
    return np.stack([(y - slope * x) / n, slope], axis=-1)


def _draws(sums: np.ndarray) -> np.ndarray | None:
    """Intercept (at the centre) and slope of each resample, [R, 2]; those with all points at one x are left out."""
    if len(sums) < 2:
        return None
    lines = _solved(drawn_sums(sums))
    return lines[np.isfinite(lines).all(axis=1)]


def _hull(draws: Sequence[np.ndarray]) -> tuple[float, float] | None:
    ends = [interval(draw) for draw in draws]
    return (min(low for low, _ in ends), max(high for _, high in ends)) if ends else None


# What is on the x axis of each stage.
DRIVERS = {"vision": "image_features", "prefill": "prompt_tokens", "decode": "output_tokens"}


@dataclass(frozen=True)
class StageLine:
    """A stage's time in ms against its driver, over the generations with the same levels of some knobs, or over all."""

    task: str
    stage: str
    driver: str
    levels: Mapping[str, Level]  #: by knob; without those whose values are pooled, as for vision, which none touches
    fit: LineFit | None
    reason: str | None  #: why there is no line


@dataclass(frozen=True)
class Point:
    """A stage's time at one value of its driver, and the generation that it belongs to."""

    x: float
    ms: float
    generation: Generation


def points_of(generations: Sequence[Generation], stage: str) -> list[Point]:
    """The points of a stage, one a generation; of decode one for each token after the first: the time until it."""
    if stage == "decode":
        return [
            Point(float(token), ms, each)
            for each in generations
            for token, ms in enumerate(accumulate(each.inter_token_ms), start=2)
        ]
    if stage == "prefill":
        return [Point(float(each.prompt_tokens), each.prefill_ms, each) for each in generations]
    return [
        Point(float(each.image_features), each.vision_ms, each)
        for each in generations
        if each.image_features is not None and each.vision_ms is not None
    ]


def stage_lines(generations: Sequence[Generation]) -> list[StageLine]:
    """The lines of each task: each stage over all settings; prefill and decode also by the first of `line_knobs`, by
    the first two, and so on.
    """
    lines = []
    for task in dict.fromkeys(each.task for each in generations):
        own = [each for each in generations if each.task == task]
        knobs = line_knobs(own)
        for stage in DRIVERS:
            lines.append(_line(own, task, stage, {}))
            for number in range(1, len(knobs) + 1) if stage != "vision" else ():
                groups = levels_apart(own, knobs[:number])
                lines += [_line(group, task, stage, levels) for levels, group in groups]
    return lines


def line_knobs(generations: Sequence[Generation]) -> tuple[str, ...]:
    """The knobs whose values have lines of their own: blocks, of which times are a multiple, then the others.

    Knobs that change the tokens are not among them: tokens are on the axis.
    """
    names = [
        knob.name
        for knob in all_knobs()
        if not knob.changes_tokens and any(knob.name in each.levels for each in generations)
    ]
    return tuple(sorted(names, key=lambda name: name != ACTIVE_BLOCKS.name))


def levels_apart(
    generations: Sequence[Generation], knobs: Sequence[str]
) -> list[tuple[Mapping[str, Level], list[Generation]]]:
    """The generations by their levels of these knobs, the cheapest first; without those that lack one."""
    having = [each for each in generations if all(name in each.levels for name in knobs)]
    groups = grouped(having, lambda each: tuple(each.levels[name] for name in knobs))

    def order(levels: Sequence[Level]) -> list[tuple[float, ...]]:
        pairs = zip(map(knob_named, knobs), levels, strict=True)
        return [knob.order(knob.of_level(level)) for knob, level in pairs]

    return [(dict(zip(knobs, levels, strict=True)), groups[levels]) for levels in sorted(groups, key=order)]


def _line(generations: Sequence[Generation], task: str, stage: str, levels: Mapping[str, Level]) -> StageLine:
    points = points_of(generations, stage)
    ways = [point.generation.picture for point in points], [each.generation.setting for each in points]
    fit, reason = known_line([each.x for each in points], [each.ms for each in points], ways)
    return StageLine(task, stage, DRIVERS[stage], levels, fit, reason)
