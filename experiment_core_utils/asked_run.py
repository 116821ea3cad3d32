"""The run that a configuration asks for, validated against model and task, and which of its settings are due."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from experiment_core_utils.b_model_loader import ModelSource, find_model
from experiment_core_utils.c_prompt_processing import draw_samples, open_task
from experiment_core_utils.drift import fill_in_drift
from experiment_core_utils.pareto_run import finished_search
from experiment_core_utils.primitives.config import ProfilingConfig
from experiment_core_utils.primitives.errors import WorkerLost
from experiment_core_utils.primitives.files import remove_leftovers
from experiment_core_utils.primitives.journal import finished_samples, tidy_journals
from experiment_core_utils.primitives.knobs import KnobSetting
from experiment_core_utils.primitives.records import MeasuringOrder
from experiment_core_utils.primitives.run_plan import PARTS_FOLDER, PLAN_VERSION, RunPlan
from experiment_core_utils.primitives.stability import measuring_order
from experiment_core_utils.progress import Ledger
from experiment_core_utils.setting_plan import plan_for
from experiment_core_utils.tasks.interface import Sample, Task
from experiment_core_utils.tasks.sampling import SampledDataset


@dataclass(frozen=True)
class AskedRun:
    """What is to be measured, of what and on what; the same on every process.

    Attributes:
        settings: of the whole plan, done or due.
        drawn: the task's samples, in the order in which every setting measures them.
    """

    config: ProfilingConfig
    source: ModelSource
    settings: tuple[KnobSetting, ...]
    task: Task
    drawn: SampledDataset[Sample]

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the settings, in the order of the plan."""
        return tuple(setting.key for setting in self.settings)

    @property
    def order(self) -> MeasuringOrder:
        """In which the settings are measured."""
        return measuring_order(self.keys, self.config.setting_order, self.config.seed)

    @property
    def control(self) -> KnobSetting:
        """The setting that is measured first, and again along the run to see whether the machine drifts."""
        return self.settings[self.keys.index(self.order.keys[0])]


def asked_run(config: ProfilingConfig) -> AskedRun:
    """Find the model, plan its settings, open the task and draw its samples.

    Raises:
        ConfigurationError: what was asked for does not fit the model or the task, or one of them is not there.
    """
    source = find_model(config.model_path, config.hf_cache_dir)
    settings = plan_for(config, source)
    task = open_task(config)
    return AskedRun(config, source, settings, task, draw_samples(task, config))


def due_and_tidy(config: ProfilingConfig, order: MeasuringOrder, ledger: Ledger) -> tuple[str, ...]:
    """Keys of the settings that have no result yet, in `order`, once the files in the folder are put in order.

    A search is one piece of work: until it is finished all its settings are due, and their journals are kept.
    """
    remove_leftovers(config.output_dir)
    fill_in_drift(config.output_dir, ledger, order.keys)
    is_saved = {key: ledger.result(key) is not None for key in order.keys}
    if config.pareto_search:
        search = finished_search(config, order.keys, ledger)
        is_saved = dict.fromkeys(is_saved, search is not None and not search["failed"])
    tidy_journals(config.output_dir / PARTS_FOLDER, ledger.fingerprint, lambda key: is_saved.get(key, False))
    return tuple(key for key, saved in is_saved.items() if not saved)


def settings_of(keys: Sequence[str], plan: Sequence[KnobSetting]) -> list[KnobSetting]:
    """The settings that the main process wants measured, in its order.

    Raises:
        WorkerLost: this process was not given one of them.
    """
    by_key = {setting.key: setting for setting in plan}
    missing = [key for key in keys if key not in by_key]
    if missing:
        raise WorkerLost(f"this process was not given the setting {missing[0]}: all need the same arguments")
    return [by_key[key] for key in keys]


def plan_of(
    asked: AskedRun, experiment_id: str | None, ledger: Ledger, due: Sequence[KnobSetting], num_processes: int
) -> RunPlan:
    """What this run sets out to do, for those who ask how far it has come."""
    journals = asked.config.output_dir / PARTS_FOLDER
    before = [finished_samples(journals, setting.key, ledger.fingerprint) for setting in due]
    return RunPlan(
        schema_version=PLAN_VERSION,
        experiment_id=experiment_id,
        fingerprint=ledger.fingerprint,
        task=asked.task.name,
        keys=asked.keys,
        due=tuple(setting.key for setting in due),
        num_samples=len(asked.drawn),
        num_processes=num_processes,
        num_samples_before=sum(map(len, before)),
        started_unix_s=time.time(),
    )
