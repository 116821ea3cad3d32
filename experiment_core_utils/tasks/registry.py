"""In: the name of a task or metric; out: the task or metric. The one place that knows which there are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.tasks.datasets.reference_captions import ReferenceCaptions
from experiment_core_utils.tasks.datasets.reference_choice import ReferenceChoice
from experiment_core_utils.tasks.datasets.reference_counting import ReferenceCounting
from experiment_core_utils.tasks.datasets.reference_reading import ReferenceReading
from experiment_core_utils.tasks.datasets.reference_task import GeneratedTask
from experiment_core_utils.tasks.datasets.reference_vqa import ReferenceVQA
from experiment_core_utils.tasks.interface import Metric, Task
from experiment_core_utils.tasks.scoring.vqa_score import vqa_score, vqa_score_molmo

REFERENCE_TASKS: tuple[type[GeneratedTask], ...] = (
    ReferenceVQA,
    ReferenceReading,
    ReferenceCounting,
    ReferenceChoice,
    ReferenceCaptions,
)


@dataclass(frozen=True)
class TaskSource:
    """Where files of a task are: `data_dir` holds what the user put there, `cache_dir` what a download may leave."""

    data_dir: Path | None = None
    cache_dir: Path | None = None


@dataclass(frozen=True)
class TaskEntry:
    """How a task is opened and which metric scores it."""

    metric: str
    open: Callable[[str, TaskSource], Task]


def _generated(task: type[GeneratedTask]) -> TaskEntry:
    # Its scenes are generated, so the source has nothing for it.
    return TaskEntry(metric=task.metric, open=lambda split, source: task(split))


_TASKS: Mapping[str, TaskEntry] = MappingProxyType(
    {
        **{task.name: _generated(task) for task in REFERENCE_TASKS},
    }
)

_METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "vqa_score": vqa_score,
        "vqa_score_molmo": vqa_score_molmo,
    }
)


def list_tasks() -> list[str]:
    """The names of all tasks, sorted."""
    return sorted(_TASKS)


def load_task(
    name: str, split: str, *, data_dir: str | Path | None = None, cache_dir: str | Path | None = None
) -> Task:
    """Open one split of a task.

    Args:
        name: one of `list_tasks()`.
        split: one of the task's splits.
        data_dir: folder with the task's files, for tasks that are not generated.
        cache_dir: folder for what a task downloads.

    Raises:
        ConfigurationError: unknown task or split.
    """
    source = TaskSource(
        data_dir=None if data_dir is None else Path(data_dir), cache_dir=None if cache_dir is None else Path(cache_dir)
    )
    return _entry(name).open(split, source)


def get_metric_for_dataset(name: str) -> str:
    """The name of the metric that scores task `name`; raises ConfigurationError for an unknown task."""
    return _entry(name).metric


def get_metric(metric_name: str) -> Metric:
    """The metric of that name, a function of (prediction, references); raises ConfigurationError if unknown."""
    if metric_name not in _METRICS:
        raise ConfigurationError(
            f"unknown metric {metric_name!r}: known are {', '.join(sorted(_METRICS))}; use one of these names"
        )
    return _METRICS[metric_name]


def _entry(name: str) -> TaskEntry:
    if name not in _TASKS:
        raise ConfigurationError(f"unknown task {name!r}: known are {', '.join(list_tasks())}; use one of these names")
    return _TASKS[name]
