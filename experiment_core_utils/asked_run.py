"""In: a configuration; out: the run that it asks for, judged against model and task before any weight is read."""

from dataclasses import dataclass

from experiment_core_utils.b_model_loader import ModelSource, find_model
from experiment_core_utils.c_prompt_processing import draw_samples, open_task
from experiment_core_utils.primitives.config import ProfilingConfig
from experiment_core_utils.primitives.knobs import KnobSetting
from experiment_core_utils.primitives.records import MeasuringOrder
from experiment_core_utils.primitives.stability import measuring_order
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
