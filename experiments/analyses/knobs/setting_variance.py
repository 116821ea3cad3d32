"""What makes all times of a setting longer or shorter where settings were measured one after another.

In rounds the machine's speed is common to all settings and there is nothing of the kind. In blocked order it is part
of each setting's time and of no other's, so that no number of samples takes it out. Its variance is that of what a
model of the settings' mean logarithmic times leaves: additive in the knobs, with their interactions in pairs where
enough settings are left to estimate from, else without. It contains what the model does not describe and the sampling
error of a setting's mean, so that it is rather too large. With fewer settings it is that of the readings of the run's
control setting. With none of these it is not known, and nothing is said of a latency.

Nor is it known of requests that arrived at a rate (`--request_rate`): they wait for each other, so that one delay makes
many times of a setting longer, and samples taken for independent called equal settings different in 16 % of simulated
pairs where the server was busy 40 % of the time, and in 54 % at 80 %.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy import stats

from experiment_core_utils.knobs.interface import Level

# A variance of fewer degrees of freedom is no estimate.
FEWEST_DEGREES = 4


@dataclass(frozen=True)
class SettingVariance:
    """The variance of the logarithm of a disturbance that all times of a setting share, and how it is known."""

    variance: float  #: nan where it is not known
    degrees: float  #: of freedom
    #: `rounds`, `settings` (residuals of a model), `control` (readings of a control setting), `unknown` or `open_loop`
    source: str

    @property
    def is_known(self) -> bool:
        """Whether latencies can be compared."""
        return math.isfinite(self.variance)

    @property
    def is_open_loop(self) -> bool:
        """Whether requests arrived at a rate and waited for each other."""
        return self.source == OPEN_LOOP.source

    def fields(self) -> dict[str, float | str | None]:
        """Its fields in JSON: the standard deviation, null where it is not known, degrees of freedom, source."""
        std = math.sqrt(self.variance) if self.is_known else None
        return {"std": std, "degrees": self.degrees if math.isfinite(self.degrees) else None, "source": self.source}

    def factor(self, tail: float) -> float:
        """What a ratio of two settings' times is above by chance with probability `tail`, at least 1."""
        if self.variance == 0:
            return 1.0
        return math.exp(float(stats.t.isf(tail, self.degrees)) * math.sqrt(2 * self.variance))


NO_VARIANCE = SettingVariance(0.0, math.inf, "rounds")
UNKNOWN = SettingVariance(math.nan, 1, "unknown")
OPEN_LOOP = SettingVariance(math.nan, 1, "open_loop")


def setting_variance(
    log_times: np.ndarray, levels: Mapping[str, Sequence[Level]], readings: Sequence[float] = ()
) -> SettingVariance:
    """The variance between S settings that were measured one after another.

    Args:
        log_times: [S, N], nan where a sample has none; the samples that all settings have count.
        levels: knob -> its value at each setting.
        readings: times of the control setting over its first.
    """
    shared = log_times[:, np.isfinite(log_times).all(axis=0)]
    moving = [values for values in levels.values() if len(set(values)) > 1]
    if shared.shape[1] and moving:
        means = shared.mean(axis=1)
        for largest in (2, 1):
            design = _design(moving, largest)
            fit, _, rank, _ = np.linalg.lstsq(design, means, rcond=1e-9)
            degrees = len(means) - int(rank)
            if degrees >= FEWEST_DEGREES:
                return SettingVariance(float(((means - design @ fit) ** 2).sum()) / degrees, degrees, "settings")
    # A reading is after one setting and before the next; the first, which the others are relative to, is 1.
    later = [math.log(ratio) for ratio in set(readings) - {1.0}]
    if later:
        return SettingVariance(float(np.mean(np.square(later))), len(later), "control")
    return UNKNOWN


def is_in_rounds(how: str | None) -> bool:
    """Whether settings were measured in rounds, by `how` of a result's `setting_order` (None in older files)."""
    return how == "rounds"


def _design(moving: Sequence[Sequence[Level]], largest: int) -> np.ndarray:
    """[S, columns] indicators of the values, and of the combinations of values of up to `largest` knobs."""
    size = len(moving[0])
    single = [np.array([[float(each == value) for value in dict.fromkeys(own)] for each in own]) for own in moving]
    columns = [np.ones((size, 1)), *single]
    if largest > 1:
        columns += [(a[:, :, None] * b[:, None, :]).reshape(size, -1) for a, b in combinations(single, 2)]
    return np.concatenate(columns, axis=1)
