"""How much a run's speed varies, of settings that were measured in several runs, and whether settings took turns."""

from collections.abc import Sequence

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
