"""How much a run's speed varies, of settings that were measured in several runs, and whether settings took turns."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from experiment_core_utils.records.sample_result import SampleResult
from experiment_core_utils.records.setting_result import SettingResult
from experiments.fitting.run_ratios import BESIDE_LOAD, BETWEEN_RUNS, ON_A_CPU


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
    """Whether settings were measured in rounds, by `how` of a result's `setting_order`."""
    return how == "rounds"


def is_in_loads(result: SettingResult) -> bool:
    """Whether each run of its samples is of another load of the model."""
    return result.setting_order is not None and result.setting_order.how == "loads"


def means_of_loads(rows: Sequence[Mapping[int, SampleResult]]) -> list[list[float]]:
    """Of each setting the mean over samples of the natural logarithm of `T_total` in the run of each load; samples that
    all settings timed count.
    """
    timed = set.intersection(*({key for key, sample in row.items() if sample.runs} for row in rows))
    loads = min((len(row[key].runs) for row in rows for key in timed), default=0)
    return [
        [float(np.mean([math.log(row[key].runs[load].T_total) for key in timed])) for load in range(loads)]
        for row in rows
    ]
