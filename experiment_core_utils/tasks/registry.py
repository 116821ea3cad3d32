"""The registry of tasks and metrics by name: the one place that knows which there are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from experiment_core_utils.primitives.errors import ConfigurationError, package_of_extra
from experiment_core_utils.primitives.texts import did_you_mean
from experiment_core_utils.tasks.datasets.reference_captions import ReferenceCaptions
from experiment_core_utils.tasks.datasets.reference_choice import ReferenceChoice
from experiment_core_utils.tasks.datasets.reference_counting import ReferenceCounting
from experiment_core_utils.tasks.datasets.reference_reading import ReferenceReading
from experiment_core_utils.tasks.datasets.reference_task import GeneratedTask
from experiment_core_utils.tasks.datasets.reference_vqa import ReferenceVQA
from experiment_core_utils.tasks.interface import Metric, Task
from experiment_core_utils.tasks.scoring.metrics import METRICS

REFERENCE_TASKS: tuple[type[GeneratedTask], ...] = (
    ReferenceVQA,
    ReferenceReading,
    ReferenceCounting,
    ReferenceChoice,
    ReferenceCaptions,
)


@dataclass(frozen=True)
class TaskEntry:
    """How a task is opened, which metric scores it, and which split is meant where none is named."""

    metric: str
    default_split: str
    open: Callable[..., Task]


def _generated(task: type[GeneratedTask]) -> TaskEntry:
    def open_task(split: str, **source: Any) -> Task:
        # Its scenes are generated, so the folders have nothing for it.
        if any(source[name] is not None for name in ("data_dir", "prompt_template", "revision")):
            raise ConfigurationError(
                f"{task.name} is generated and takes no folder, prompt template or revision: leave them out"
            )
        return task(split)

    return TaskEntry(metric=task.metric, default_split="validation", open=open_task)


def _published(module: str, reader: str, metric: str, default_split: str = "validation") -> TaskEntry:
    def open_task(split: str, **source: Any) -> Task:
        # Imported here, for the readers need the `datasets` library, which takes seconds that other tasks need not pay.
        with package_of_extra("datasets", "datasets"):
            task: Callable[..., Task] = getattr(import_module(f"experiment_core_utils.tasks.datasets.{module}"), reader)
        return task(split, **source)

    return TaskEntry(metric=metric, default_split=default_split, open=open_task)


_TASKS: Mapping[str, TaskEntry] = MappingProxyType(
    {
        **{task.name: _generated(task) for task in REFERENCE_TASKS},
        "coco_2014_vqa": _published("coco_vqa", "Coco2014VQA", "vqa_score"),
        "text_vqa": _published("text_vqa", "TextVQA", "vqa_score"),
        "okvqa": _published("coco_vqa", "OKVQA", "vqa_score"),
        "science_qa_img": _published("science_qa", "ScienceQAImages", "mc"),
        "st_qa": _published("st_qa", "SceneTextQA", "ansl_em"),
        "doc_qa": _published("doc_qa", "DocVQA", "ansl_em"),
        "tally_qa": _published("tally_qa", "TallyQA", "em", default_split="test"),
        "coco_caption": _published("coco_caption", "CocoCaption", "cider_score"),
        "mmmu": _published("mmmu", "MMMU", "mmmu_score"),
    }
)

_METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in METRICS})


def list_tasks() -> list[str]:
    """The names of all tasks, sorted."""
    return sorted(_TASKS)


def list_metrics() -> list[str]:
    """The names of all metrics, sorted."""
    return sorted(_METRICS)


def load_task(
    name: str,
    split: str | None = None,
    *,
    data_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    prompt_template: str | None = None,
    revision: str | None = None,
) -> Task:
    """Open one split of a task.

    Args:
        name: one of `list_tasks()`.
        split: one of the task's splits; None takes the task's default.
        data_dir: folder with the task's files, for tasks that are not generated.
        cache_dir: folder for what a task downloads.
        prompt_template: the prompt of a published dataset, with {question}, {style} and {options} as its fields.
        revision: commit, tag or branch of a published dataset's copy on the hub.

    Raises:
        ConfigurationError: unknown task or split, a dataset that is not there, a template that cannot be filled.
    """
    entry = _entry(name)
    return entry.open(
        entry.default_split if split is None else split,
        data_dir=None if data_dir is None else Path(data_dir),
        cache_dir=None if cache_dir is None else Path(cache_dir),
        prompt_template=prompt_template,
        revision=revision,
    )


def get_default_split(name: str) -> str:
    """The split of task `name` that is read where none is requested; raises ConfigurationError for an unknown task."""
    return _entry(name).default_split


def get_metric_for_dataset(name: str) -> str:
    """The name of the metric that scores task `name`; raises ConfigurationError for an unknown task."""
    return _entry(name).metric


def get_metric(metric_name: str) -> Metric:
    """The metric of that name, which scores the answers of a run; raises ConfigurationError if unknown."""
    if metric_name not in _METRICS:
        raise ConfigurationError(
            f"unknown metric {metric_name!r}{did_you_mean(metric_name, _METRICS)}: known are "
            f"{', '.join(list_metrics())}; use one of these names"
        )
    return _METRICS[metric_name]


def _entry(name: str) -> TaskEntry:
    if name not in _TASKS:
        raise ConfigurationError(
            f"unknown task {name!r}{did_you_mean(name, _TASKS)}: known are {', '.join(list_tasks())}; use one of these "
            "names"
        )
    return _TASKS[name]
