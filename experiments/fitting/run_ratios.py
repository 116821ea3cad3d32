"""Ratio of two sides' times when each was measured in one run or in several: runs and pictures both vary.

A process is one draw of memory layout, clocks and neighbours, so that n samples are not n runs. The variance of the
mean log ratio is that between runs plus that between pictures (two crossed random factors, without what both contain of
the rest), with Satterthwaite's degrees of freedom (F. Satterthwaite, Biometrics Bulletin 2 (1946) 110; for the two
levels T. Kalibera and R. Jones, "Rigorous benchmarking in reasonable time", ISMM 2013).
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from experiments.fitting.verdicts import FEWEST_PICTURES

# Standard deviation of the log of a run's speed, for sides of one run each, which cannot show it.
BETWEEN_RUNS = 0.02
# The same on a CPU: three runs of one thing on 16 quiet virtual cores took 1, 0.994 and 0.880 times as long.
ON_A_CPU = 0.07
# The same on a CPU beside other processes, as a part of the fraction of the CPUs that they used: 10 runs of one thing
# on two cores of which others used 0.84 had 0.16.
BESIDE_LOAD = 0.2
# The chance with which a comparison should find that nothing changed, and the most runs a side that are suggested.
POWER, MOST_RUNS = 0.8, 100


@dataclass(frozen=True)
class LogRatio:
    """A mean log ratio: normal around the truth, with a variance of so many degrees of freedom."""

    mean: float
    variance: float
    degrees: float  #: infinite for a variance that was stated
    samples_variance: float  #: the part of `variance` that is not between runs
    run_deviation: float = 0.0  #: standard deviation of the log of a run's speed, as found or stated

    def interval(self, tail: float) -> tuple[float, float]:
        """Interval of the ratio; each end fails with probability `tail`."""
        return self._ends(self.variance, self.degrees, tail)

    def interval_within_runs(self, tail: float) -> tuple[float, float]:
        """The same as if two runs of one thing had one speed."""
        return self._ends(self.samples_variance, self.degrees, tail)

    def half_width_of_runs(self, tail: float) -> float:
        """Half of the interval of the log, were there no spread of samples."""
        return float(stats.t.isf(tail, self.degrees)) * math.sqrt(max(self.variance - self.samples_variance, 0.0))

    def _ends(self, variance: float, degrees: float, tail: float) -> tuple[float, float]:
        half = float(stats.t.isf(tail, degrees)) * math.sqrt(variance)
        return math.exp(self.mean - half), math.exp(self.mean + half)


def log_ratio(
    one: np.ndarray,
    other: np.ndarray,
    pictures: np.ndarray,
    *,
    is_paired: bool,
    between: float,
    more: float = 0.0,
    more_degrees: float = math.inf,
) -> LogRatio | None:
    """The mean of `other` - `one`.

    Args:
        one, other: [R, C] and [R', C] logs of the same C samples in each run of a side.
        pictures: [C] numbers of their pictures from 0, each at least once.
        is_paired: whether run r of both sides was measured together, so that its difference is one value.
        between: standard deviation of runs; used where neither side has two.
        more, more_degrees: variance to add, which is not of samples either, and its degrees of freedom.

    Returns:
        None where one run a side has fewer than 6 pictures.
    """
    blocks = [other - one] if is_paired else [one, other]
    degrees = float(sum(len(block) - 1 for block in blocks))
    groups = len(np.unique(pictures))
    if not degrees and groups < FEWEST_PICTURES:
        return None
    spread = sum(((block.mean(axis=1) - block.mean()) ** 2).sum() for block in blocks)
    a_run = float(spread) / degrees if degrees else between**2
    between_runs = a_run * sum(1 / len(block) for block in blocks)
    within = 0.0
    if groups > 1:
        # What one picture's value varies by between runs is in both parts; it is taken off one of them.
        rest = sum(_variances(_residuals(block), pictures).sum() / _ways(len(block)) for block in blocks)
        apart = other.mean(axis=0) - one.mean(axis=0)
        within = max(float(_variances((apart - apart.mean())[None], pictures)[0] - rest), 0.0)
    variance = between_runs + more + within
    known = (between_runs**2 / degrees if degrees else 0.0) + more**2 / more_degrees
    known += within**2 / (groups - 1) if groups > 1 else 0.0
    freedom = variance**2 / known if known > 0 else math.inf
    # A pair's difference has the variance of two runs.
    deviation = math.sqrt(a_run / (2 if is_paired else 1))
    return LogRatio(float(other.mean() - one.mean()), variance, freedom, within, deviation)


def _residuals(block: np.ndarray) -> np.ndarray:
    """[R, C]: what neither the run nor the sample explains."""
    return np.asarray(block - block.mean(axis=1, keepdims=True) - block.mean(axis=0) + block.mean())


def _ways(runs: int) -> float:
    """Divisor of the sum over runs of residuals' variances; infinite for one run, which has none."""
    return runs * (runs - 1) if runs > 1 else math.inf


def _variances(values: np.ndarray, pictures: np.ndarray) -> np.ndarray:
    """[R], the variance of the mean of each row of [R, C] values, whose mean is 0, over pictures (W. Cochran, 9A)."""
    groups = int(pictures.max()) + 1
    sums = np.stack([np.bincount(pictures, weights=row, minlength=groups) for row in values])
    return np.asarray((sums**2).sum(axis=1) * groups / (groups - 1) / values.shape[1] ** 2)


def chance_of_same(ratio: LogRatio, margin: float, tail: float) -> float:
    """How likely a comparison as precise as this one finds two equal sides equal within `margin` (a fraction)."""
    if ratio.variance == 0:
        return 1.0
    steps = math.log1p(margin) / math.sqrt(ratio.variance) - float(stats.t.isf(tail, ratio.degrees))
    return max(2 * float(stats.norm.cdf(steps)) - 1, 0.0)


def runs_for_same(a_run: float, margin: float, tail: float) -> int | None:
    """The fewest pairs of runs with which `chance_of_same` is 0.8 where only runs vary; None for over 100.

    Args:
        a_run: standard deviation of the log of a run's speed.
    """
    for runs in range(2, MOST_RUNS + 1):
        planned = LogRatio(0.0, 2 * a_run**2 / runs, runs - 1.0, 0.0)
        if chance_of_same(planned, margin, tail) >= POWER:
            return runs
    return None
