"""Rules of steady measurement: the order of settings, the end of warm-up and of sampling, and outliers.

Nothing here knows a clock, a device or a file.
"""

import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import numpy as np
from scipy.special import ndtr, stdtrit

from experiment_core_utils.primitives.contrasts import PairedContrasts
from experiment_core_utils.records.settings import MeasuringOrder, Outliers, WarmUp

T = TypeVar("T")
# Runs of a warm-up that must agree, and within what fraction of the shortest.
STABLE_RUNS = 3
STABLE_WITHIN = 0.05
# Fewer samples say too little about their own spread to stop on it.
LEAST_SAMPLES_TO_STOP = 10
# How many times as many samples there are when it is asked again whether they are enough.
LOOK_FACTOR = 1.1
# Iglewicz and Hoaglin's limit of the modified z-score, and what makes the first quartile of the distances of pairs of
# normal values a standard deviation: 1 / (sqrt(2) * 0.31864), where 5 / 8 of normal values are below 0.31864.
OUTLIER_Z = 3.5
QUARTILE_TO_STD = 2.21914
OUTLIER_BEYOND = 0.05
MIN_RUNS_FOR_OUTLIERS = 3


def shuffled(items: Sequence[T], seed: int) -> tuple[T, ...]:
    """The items in a random order, the same one for the same number of items and seed.

    `numpy.random.RandomState(seed).permutation(len(items))`, whose stream numpy keeps for ever.
    """
    return tuple(items[int(place)] for place in np.random.RandomState(seed).permutation(len(items)))


def measuring_order(keys: Sequence[str], setting_order: str, seed: int) -> MeasuringOrder:
    """The order in which a plan's settings are warmed up; it depends on these arguments only, so that a resumed run
    keeps it.

    Args:
        setting_order: `shuffled` or `planned`.
    """
    if setting_order == "planned":
        return MeasuringOrder(None, tuple(keys))
    return MeasuringOrder(seed, shuffled(keys, seed))


def spread_of_last(totals_s: Sequence[float]) -> float | None:
    """max / min - 1 of the last three; None for fewer."""
    last = totals_s[-STABLE_RUNS:]
    return max(last) / min(last) - 1 if len(last) == STABLE_RUNS else None


def is_stable(totals_s: Sequence[float]) -> bool:
    """Whether the last three runs agree within 5 %."""
    spread = spread_of_last(totals_s)
    return spread is not None and spread <= STABLE_WITHIN


def warm_up_of(totals_s: Sequence[float], least: int, experiment_id: str, rank: int) -> WarmUp:
    """The record of a warm-up; one that is switched off (`least` 0) is neither stable nor unstable."""
    stable = is_stable(totals_s) if least else None
    return WarmUp(experiment_id, rank, tuple(totals_s), stable, spread_of_last(totals_s))


def needs_another_run(totals_s: Sequence[float], least: int, most: int) -> bool:
    """Whether a warm-up of these runs continues; one that is switched off (`least` 0) does not begin."""
    if least == 0 or len(totals_s) >= most:
        return False
    return len(totals_s) < least or not is_stable(totals_s)


@dataclass(frozen=True)
class PrecisionGoal:
    """When a part of the samples is enough: when how many times as long settings take as each other is known.

    It is asked of the mean logarithms that verdicts are of, and of their differences, in which a slow run counts alike
    for all settings. The mean time of a setting has no such rule: an end before the rare slow runs have come looks
    precise, and is too short. It is asked seldom, each time of a tenth more samples, since every time one more interval
    has the chance to be narrow by luck.
    """

    relative: float  #: half of the 95 % interval of every two settings' ratio, as a fraction of it, at which to stop

    def of_shard(self, num_processes: int) -> "PrecisionGoal":
        """The goal of one of several processes, which checks its own samples: the interval of n times as many is
        narrower by sqrt(n)."""
        return PrecisionGoal(self.relative * math.sqrt(num_processes))

    @staticmethod
    def last_look(num_samples: int) -> int:
        """The largest number of samples, of so many, at which it is asked; 0 below 10."""
        look = LEAST_SAMPLES_TO_STOP if num_samples >= LEAST_SAMPLES_TO_STOP else 0
        while look and (following := math.ceil(LOOK_FACTOR * look)) <= num_samples:
            look = following
        return look

    def is_reached(self, log_times: np.ndarray, pictures: Sequence[Hashable]) -> bool:
        """Whether these samples are enough; never for one setting, or fewer than 10 samples that all settings have.

        Args:
            log_times: [S, N], of each sample the mean over its runs of the logarithm of the time; nan for none.
            pictures: [N], the picture of each sample.
        """
        if len(log_times) < 2:
            return False
        found = PairedContrasts.of(log_times, np.array([str(each) for each in pictures]))
        if found.num_samples < LEAST_SAMPLES_TO_STOP or found.no_verdict is not None:
            return False
        widest = max(float(found.errors(at).max()) for at in range(len(log_times)))
        return found.critical() * widest <= math.log1p(self.relative)


def find_outliers(totals_s: Sequence[Sequence[float]]) -> Outliers:
    """Mark outlying runs by the ratio of each run's total to the median of its sample, on the scale of all samples.

    Samples differ in length, runs of one sample do not, so ratios are comparable. The standard deviation of the
    logarithm of a run is 2.21914 times the first quartile of the distances between two runs of one sample, pooled over
    samples (Qn of P. Rousseeuw and C. Croux, "Alternatives to the median absolute deviation", Journal of the American
    Statistical Association 88 (1993) 1273). Distances to the sample's median would make it too small, as one of three
    runs is that median itself. An outlier is more than 5 % off, below which nothing is worth a mark, and further off
    than 3.5 standard deviations, the limit of B. Iglewicz and D. Hoaglin, "How to Detect and Handle Outliers", ASQC
    Quality Press (1993): with few runs further, by Student's t of the same probability, with as many degrees of freedom
    as there are runs beside the first of each sample.

    Of undisturbed runs whose times are log-normal, less than 1 % are marked, however few they are.

    Args:
        totals_s: the runs of each sample; samples with fewer than 3 runs are not checked.
    """
    logs = [[math.log(run) for run in runs] if len(runs) >= MIN_RUNS_FOR_OUTLIERS else None for runs in totals_s]
    checked = [runs for runs in logs if runs is not None]
    if not checked:
        return Outliers(tuple(None for _ in logs), None, f"no sample has {MIN_RUNS_FOR_OUTLIERS} runs")
    distances = sorted(abs(one - other) for runs in checked for one, other in combinations(runs, 2))
    num_runs = sum(map(len, checked))
    z = -float(stdtrit(num_runs - len(checked), ndtr(-OUTLIER_Z)))
    limit = z * QUARTILE_TO_STD * distances[(len(distances) - 1) // 4]
    found = tuple(None if runs is None else _beyond(runs, limit) for runs in logs)
    return Outliers(found, sum(len(each) for each in found if each is not None) / num_runs, None)


def _beyond(logs: Sequence[float], limit: float) -> tuple[int, ...]:
    middle = statistics.median(logs)
    return tuple(
        index
        for index, value in enumerate(logs)
        if abs(value - middle) > limit and abs(math.exp(value - middle) - 1) > OUTLIER_BEYOND
    )
