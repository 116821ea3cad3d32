"""How much a run's speed varies, of settings that were measured in several runs, and whether settings took turns."""

import math
import statistics
from collections.abc import Mapping, Sequence

from experiment_core_utils.primitives.replication import Replication, in_loads
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


def over_loads(results: Sequence[SettingResult], rows: Sequence[Mapping[int, SampleResult]]) -> Replication | None:
    """The levels at which times of a run were repeated whose runs of a sample are each of another load of the model;
    None where they are not. Of samples, those count that all settings timed.

    Args:
        rows: samples of each setting, by id.
    """
    if {None if each.setting_order is None else each.setting_order.how for each in results} != {"loads"}:
        return None
    timed = set.intersection(*({key for key, sample in row.items() if sample.runs} for row in rows))
    loads = min((len(row[key].runs) for row in rows for key in timed), default=0)
    logarithms = [[[math.log(row[key].runs[load].T_total) for key in timed] for load in range(loads)] for row in rows]
    return in_loads([[statistics.fmean(load) for load in each] for each in logarithms])
