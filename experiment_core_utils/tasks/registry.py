"""The registry of tasks and metrics by name, open to those of other modules.

The one place that knows which there are.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    first_line,
    package_of_extra,
)
from experiment_core_utils.primitives.files import check_file_name_part, run_python_file, shortened
from experiment_core_utils.primitives.texts import did_you_mean
from experiment_core_utils.tasks.datasets.files.data_file import OPEN_METRIC, DataFileTask
from experiment_core_utils.tasks.datasets.harness_task import HarnessTask
from experiment_core_utils.tasks.datasets.reference_captions import ReferenceCaptions
from experiment_core_utils.tasks.datasets.reference_choice import ReferenceChoice
from experiment_core_utils.tasks.datasets.reference_counting import ReferenceCounting
from experiment_core_utils.tasks.datasets.reference_knowledge import ReferenceKnowledge
from experiment_core_utils.tasks.datasets.reference_mixed import MixedMetric, ReferenceMixed
from experiment_core_utils.tasks.datasets.reference_questions import ReferenceQuestions, ReferenceQuestionsChoice
from experiment_core_utils.tasks.datasets.reference_reading import ReferenceReading
from experiment_core_utils.tasks.datasets.reference_task import GeneratedTask
from experiment_core_utils.tasks.datasets.reference_vqa import ReferenceVQA
from experiment_core_utils.tasks.interface import Metric, Task
from experiment_core_utils.tasks.scoring.likelihood import Scored
from experiment_core_utils.tasks.scoring.metrics import METRICS, RELAXED

T = TypeVar("T")
REFERENCE_TASKS: tuple[type[GeneratedTask], ...] = (
    ReferenceVQA,
    ReferenceReading,
    ReferenceCounting,
    ReferenceChoice,
    ReferenceCaptions,
    ReferenceKnowledge,
)
# Every task whose scenes are generated.
GENERATED_TASKS: tuple[type[GeneratedTask] | type[ReferenceMixed], ...] = (*REFERENCE_TASKS, ReferenceMixed)


@dataclass(frozen=True)
class TaskSource:
    """Where a dataset is read from, and how its prompts are made; generated tasks use the prompts' template alone."""

    data_dir: Path | None = None  #: contains what the user put there
    cache_dir: Path | None = None  #: what a download may leave
    prompt_template: str | None = None  #: instead of the task's own prompts
    revision: str | None = None  #: of the hub's copy, instead of the reader's own
    model_type: str | None = None  #: of the model that will be asked, where it is known


@dataclass(frozen=True)
class TaskEntry:
    """How a task is opened, which metric scores it, and which split is meant where none is named."""

    metric: str
    default_split: str
    open: Callable[[str, TaskSource], Task]
    has_pictures: bool | None = None  #: None where only its samples show that


def _without_folders(
    task: type[GeneratedTask] | type[ReferenceMixed] | type[ReferenceQuestions], what: str
) -> TaskEntry:
    def open_task(split: str, source: TaskSource) -> Task:
        if (source.data_dir, source.revision) != (None, None):
            raise ConfigurationError(f"{task.name} {what} and takes no folder or revision: leave them out")
        return task(split, prompt_template=source.prompt_template)

    return TaskEntry(metric=task.metric, default_split="validation", open=open_task)


def _published(module: str, reader: str, metric: str, default_split: str = "validation") -> TaskEntry:
    def open_task(split: str, source: TaskSource) -> Task:
        # Imported here, for the readers need the `datasets` library, which takes seconds that other tasks need not pay.
        with package_of_extra("datasets", "datasets"):
            task: Callable[..., Task] = getattr(import_module(f"experiment_core_utils.tasks.datasets.{module}"), reader)
        return task(split, **{name: value for name, value in vars(source).items() if name != "model_type"})

    return TaskEntry(metric=metric, default_split=default_split, open=open_task, has_pictures=True)


def _of_harness(name: str) -> TaskEntry:
    harness, _, own_name = name.partition(":")
    title = harness.replace("_", "-")

    def open_task(split: str, source: TaskSource) -> Task:
        if source.revision is not None:
            raise ConfigurationError(f"{name} names its data itself: drop --dataset_revision")
        try:
            module = import_module(f"experiment_core_utils.tasks.datasets.{harness}_task")
        except ImportError as error:
            raise ConfigurationError(
                f"{name} needs {title}, which cannot be imported ({first_line(error)}); run `pip install {title}`"
            ) from error
        given = own_name, split, None if source.data_dir is None else str(source.data_dir), source.prompt_template
        is_lm_eval = harness == "lm_eval"
        task: HarnessTask = module.LmEvalTask(*given) if is_lm_eval else module.LmmsEvalTask(*given, source.model_type)
        if task.scorer is not None:
            register_metric(task.scorer)
        return task

    return TaskEntry(metric=f"{title}'s own", default_split="", open=open_task)


_HARNESSES = ("lm_eval:", "lmms_eval:")
# What is read of a file of texts.
TEXT_COLUMNS = MappingProxyType({"question": "text", "answer": "text"})
_TASKS: Mapping[str, TaskEntry] = MappingProxyType(
    {
        **{task.name: _without_folders(task, "is generated") for task in GENERATED_TASKS},
        **{
            task.name: _without_folders(task, "comes with the package")
            for task in (ReferenceQuestions, ReferenceQuestionsChoice)
        },
        "coco_2014_vqa": _published("coco", "Coco2014VQA", "vqa_score"),
        "text_vqa": _published("text_vqa", "TextVQA", "vqa_score"),
        "okvqa": _published("coco", "OKVQA", "vqa_score"),
        "science_qa_img": _published("science_qa", "ScienceQAImages", "mc"),
        "st_qa": _published("st_qa", "SceneTextQA", "ansl_em"),
        "doc_qa": _published("doc_qa", "DocVQA", "ansl_em"),
        "tally_qa": _published("tally_qa", "TallyQA", "em", default_split="test"),
        "coco_caption": _published("coco", "CocoCaption", "cider_score"),
        "mmmu": _published("mmmu", "MMMU", "mmmu_score"),
    }
)

_METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in (*METRICS, MixedMetric())})
_registered_tasks: dict[str, TaskEntry] = {}
_registered_metrics: dict[str, Metric] = {}


def register_task(
    name: str, open_task: Callable[[str, TaskSource], Task], *, metric: str, default_split: str = "validation"
) -> None:
    """Make a task known under `name`, as `--dataset_name` gives it; registered again, the later one counts.

    Args:
        open_task: opens one split; raises ConfigurationError for a split that is not there.
        metric: name of the metric that scores it, as the task's own `metric`.
        default_split: the one that is read where none is requested.

    Raises:
        ConfigurationError: a name that the project's own tasks have, or that cannot be part of a file's name.
    """
    check_file_name_part(name, "task")
    if name in _TASKS:
        raise ConfigurationError(f"task {name!r} is one of the project's own; register it under another name")
    _registered_tasks[name] = TaskEntry(metric, default_split, open_task)


def register_metric(metric: Metric) -> None:
    """Make a metric known under its name.

    Raises:
        ConfigurationError: the project's own metrics have the name, it cannot be part of a folder's name, or `best` is
            no highest score.
    """
    if not isinstance(metric.name, str) or not re.fullmatch("[A-Za-z0-9][A-Za-z0-9_.@+-]{0,99}", metric.name):
        raise ConfigurationError(
            f"metric {shortened(metric.name)} is part of folder names; use letters, digits, _, -, ., @ and + only, 100 "
            "at most, a letter or digit first"
        )
    if not 0 < metric.best <= 1e6:
        raise ConfigurationError(f"metric {metric.name}: best is {metric.best}; give the highest score, above 0")
    if metric.name in _METRICS:
        raise ConfigurationError(f"metric {metric.name!r} is one of the project's own; give it another name")
    _registered_metrics[metric.name] = metric


def load_task_module(path: Path) -> None:
    """Run a Python file that registers tasks and metrics; raises ConfigurationError where it cannot be run."""
    run_python_file(path, "--task_module")


def list_tasks() -> list[str]:
    """The names of all tasks, sorted."""
    return sorted({**_TASKS, **_registered_tasks})


def is_own_task(name: str) -> bool:
    """Whether a task is one of the project's own, whose names no other task can have."""
    return name in _TASKS


def list_metrics() -> list[str]:
    """The names of all metrics, sorted."""
    return sorted({**_METRICS, **_registered_metrics})


def load_task(
    name: str,
    split: str | None = None,
    *,
    data_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    prompt_template: str | None = None,
    revision: str | None = None,
    model_type: str | None = None,
) -> Task:
    """Open one split of a task.

    Args:
        name: one of `list_tasks()`.
        split: one of the task's splits; None takes the task's default.
        data_dir: folder with the task's files, for tasks that are not generated.
        cache_dir: folder for what a task downloads.
        prompt_template: in place of the task's own prompts, with {question}, {style} and {options} as its fields.
        revision: commit, tag or branch of a published dataset's copy on the hub.
        model_type: of the model that will be asked, as transformers calls it; for tasks of lmms-eval.

    Raises:
        ConfigurationError: unknown task or split, a dataset that is not there, a template that cannot be filled.
    """
    entry = task_entry(name)
    source = TaskSource(
        data_dir=None if data_dir is None else Path(data_dir),
        cache_dir=None if cache_dir is None else Path(cache_dir),
        prompt_template=prompt_template,
        revision=revision,
        model_type=model_type,
    )
    return entry.open(entry.default_split if split is None else split, source)


def load_data_file(
    path: Path,
    metric: str | None = None,
    *,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    prompt_template: str | None = None,
    columns: Mapping[str, str] | None = None,
    text_only: bool = False,
    split: str | None = None,
    revision: str | None = None,
    has_chat_template: bool = False,
) -> Task:
    """The rows of a file, a folder or a dataset of the hub as a task; arguments as of `DataFileTask`.

    Args:
        metric: name of the metric that scores it; None: `mc` where every row has options, and where none has
            `em_lenient`, or `relaxed` for a model with a chat template.
        has_chat_template: whether the model that will be asked has one, and so answers in sentences.

    Raises:
        ConfigurationError: a file or template that `DataFileTask` refuses, or a metric that cannot score its rows.
    """
    scored = None if metric is None else scored_by(metric)
    if scored == "text" and not columns:
        columns = TEXT_COLUMNS
    task = DataFileTask(
        path,
        data_dir=data_dir,
        cache_dir=cache_dir,
        prompt_template=prompt_template,
        columns=columns,
        text_only=text_only,
        split=split,
        revision=revision,
        lists_options=scored is None,
    )
    if task.name in list_tasks():
        raise ConfigurationError(f"--data_file {path} would be called like the task {task.name}; rename the file")
    if metric is None and not task.metric:
        raise ConfigurationError(
            f"--data_file {path} has rows with options and rows without: say which metric scores both, such as "
            "--metric relaxed or --metric mmmu_score"
        )
    by_default = RELAXED if has_chat_template and task.metric == OPEN_METRIC else task.metric
    task.metric = metric or by_default
    task.check_scorable(get_metric(task.metric), METRICS)
    return task


def scored_by(metric_name: str) -> Scored | None:
    """What a metric of log-probabilities scores in place of an answer; None for any other."""
    return getattr({**_METRICS, **_registered_metrics}.get(metric_name), "scored", None)


def score_name(*metrics: tuple[str, float]) -> str:
    """What the scores of metrics, each given by name and best score, are called where they are shown together.

    Returns:
        `accuracy` where the best score is 1, else the metric's own label or name; `score` where metrics differ in it.
    """
    known = {**_METRICS, **_registered_metrics}
    names = {"accuracy" if best == 1 else str(getattr(known.get(name), "label", name)) for name, best in metrics}
    return names.pop() if len(names) == 1 else "score"


def get_metric_for_dataset(name: str) -> str:
    """The name of the metric that scores task `name`; raises ConfigurationError for an unknown task."""
    return task_entry(name).metric


def get_metric(metric_name: str) -> Metric:
    """The metric of that name, which scores the answers of a run; raises ConfigurationError if unknown."""
    return _named("metric", metric_name, {**_METRICS, **_registered_metrics})


def task_entry(name: str) -> TaskEntry:
    """How task `name` is opened; raises ConfigurationError for an unknown one."""
    if name.startswith(_HARNESSES):
        return _of_harness(name)
    return _named("task", name, {**_TASKS, **_registered_tasks})


def _named(kind: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        names = sorted(known)
        raise ConfigurationError(
            f"unknown {kind} {name!r}{did_you_mean(name, names)}: known are {', '.join(names)}; use one of these names"
        )
    return known[name]
