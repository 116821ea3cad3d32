"""What makes all times of a setting longer or shorter where settings were measured one after another.

In rounds the machine's speed is common to all settings and there is nothing of the kind. In blocked order it is part
of each setting's time and of no other's, so that no number of samples takes it out. Its variance is that of what a
model of the settings' mean logarithmic times leaves: additive in the knobs, with their interactions in pairs where
enough settings are left to estimate from, else without. It contains what the model does not describe and the sampling
error of a setting's mean, so that it is rather too large. With fewer settings it is that of the readings of the run's
control setting. With none of these it is not known, and nothing is said of a latency.

Of settings that were measured in several runs a run's speed varies, too, by what is stated of two runs of one thing.

Nor is it known of requests that arrived at a rate (`--request_rate`): they wait for each other, so that one delay makes
many times of a setting longer, and samples taken for independent called equal settings different in 16 % of simulated
pairs where the server was busy 40 % of the time, and in 54 % at 80 %.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from experiment_core_utils.knobs.interface import Level
from experiment_core_utils.primitives.replication import UNKNOWN, Replication, one_after_another
from experiment_core_utils.records.setting_result import SettingResult
from experiments.fitting.run_ratios import BESIDE_LOAD, BETWEEN_RUNS, ON_A_CPU

# A variance of fewer degrees of freedom is no estimate.
FEWEST_DEGREES = 4


def setting_variance(
    log_times: np.ndarray,
    levels: Mapping[str, Sequence[Level]],
    readings: Sequence[float] = (),
    inside: Sequence[int] | None = None,
) -> Replication:
    """What is known of the variance between S settings that were measured one after another.

    Args:
        log_times: [S, N], nan where a sample has none; the samples that all settings have count.
        levels: knob -> its value at each setting that it is estimated from.
        readings: times of the control setting over its first.
        inside: these settings, in order; None for all.
    """
    own = log_times if inside is None else log_times[list(inside)]
    shared = own[:, np.isfinite(own).all(axis=0)]
    moving = [values for values in levels.values() if len(set(values)) > 1]
    if shared.shape[1] and moving:
        means = shared.mean(axis=1)
        for largest in (2, 1):
            design = _design(moving, largest)
            fit, _, rank, _ = np.linalg.lstsq(design, means, rcond=1e-9)
            degrees = len(means) - int(rank)
            if degrees >= FEWEST_DEGREES:
                squares = float(((means - design @ fit) ** 2).sum())
                return one_after_another(squares / degrees, degrees, "settings", len(log_times))
    # A reading is after one setting and before the next; the first, which the others are relative to, is 1.
    later = [math.log(ratio) for ratio in set(readings) - {1.0}]
    if later:
        return one_after_another(float(np.mean(np.square(later))), len(later), "control", len(log_times))
    return UNKNOWN


def stated_run_deviation(results: Sequence[SettingResult]) -> float:
    """Standard deviation of the log of a run's speed where no run was repeated: larger on a CPU, and beside load."""
    on_cpu = any(each.provenance.hardware.device is not None and each.provenance.hardware.gpu_name is None
                 for each in results)  # fmt: skip
    return max(ON_A_CPU if on_cpu else BETWEEN_RUNS, BESIDE_LOAD * other_load(results))


def other_load(results: Sequence[SettingResult]) -> float:
    """The largest fraction of the CPUs that other processes used in any run on a CPU; 0 where none was read."""
    on_cpu = (each for each in results if each.provenance.hardware.gpu_name is None)
    return max((reading.foreign_cpu_share or 0.0 for each in on_cpu for reading in each.conditions), default=0.0)


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
