"""Requests that a model or a server cannot be given are refused before anything is loaded."""

from collections.abc import Iterable, Sequence

from experiment_core_utils.config.parts import TaskConfig
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.primitives.errors import ConfigurationError, SampleError, library_faults_named
from experiment_core_utils.primitives.interruption import time_limit
from experiment_core_utils.requests.drawing import TEXT_TASK, VISION_TASK
from experiment_core_utils.tasks.datasets.files.data_file import DataFileTask
from experiment_core_utils.tasks.interface import PromptFamily, Task, check_scorable
from experiment_core_utils.tasks.prompt_forms import with_continuations
from experiment_core_utils.tasks.registry import get_metric, load_task_module, scored_by, task_entry
from experiment_core_utils.tasks.sampling import inspected


def refuse_unfit_pictures(
    task: Task, sample_ids: Sequence[int], config: TaskConfig, *, takes_pictures: bool, model: str
) -> None:
    """Refuse to ask a text model about pictures, and a model with vision about rows without any, as if it were blind.

    Args:
        sample_ids: by the first few of them that can be read, a text model's task has pictures.

    Raises:
        ConfigurationError: see above, where `--text_only` is not given; or it is given for a model that sees pictures,
            and a task that is not a file.
    """
    if takes_pictures:
        if config.text_only and config.data_file is None:
            raise ConfigurationError(f"--text_only is for a text model or the rows of --data_file, not {task.name}")
        if isinstance(task, DataFileTask) and not task.has_pictures and not config.text_only:
            raise ConfigurationError(
                f"--data_file {config.data_file} has no picture in any row, and this model takes pictures: give the "
                "column of the pictures by --columns image=COLUMN, or --text_only to ask without any"
            )
    elif not config.text_only and any(each.image is not None for each in inspected(task, sample_ids)):
        raise _unseen(model, task.name)


def refuse_picture_tasks(names: Iterable[str | None], config: TaskConfig, *, takes_pictures: bool, model: str) -> None:
    """Refuse to ask a text model about tasks that are known to have pictures, before their data are looked for.

    Raises:
        ConfigurationError: see above; or there is no task of a name.
    """
    if takes_pictures or config.text_only or config.data_file is not None:
        return
    if config.task_module is not None:
        load_task_module(config.task_module)
    if pictured := [name for name in names if name is not None and task_entry(name).has_pictures]:
        raise _unseen(model, pictured[0])


def _unseen(model: str, task: str) -> ConfigurationError:
    return ConfigurationError(
        f"{model} is a text model and cannot see the pictures of {task}; give a task without pictures, such as "
        f"--dataset_name {TEXT_TASK}, or --text_only to ask without them"
    )


def refuse_unfit_requests(
    task: Task,
    sample_ids: Sequence[int],
    config: TaskConfig,
    *,
    sides: Sequence[int] | None,
) -> None:
    """Refuse what a request to a server would have that its samples lack.

    Args:
        sides: of `--picture_side_list`; None if not given.

    Raises:
        ConfigurationError: pictures are scaled, and by its first few samples the task has none; or `--text_only` is
            given for a task that is not a file.
    """
    if config.text_only and config.data_file is None:
        raise ConfigurationError(f"--text_only is for a text model or the rows of --data_file, not {task.name}")
    if sides is not None and not _has_pictures(task, sample_ids):
        raise ConfigurationError(
            f"--picture_side_list cannot act: {task.name} has no pictures; give a task with some, such as "
            f"--dataset_name {VISION_TASK}, or drop it"
        )


def refuse_long_limits(
    task: Task, answer_limits: Sequence[int] | None, thinking: Sequence[int] | None, max_new_tokens: int
) -> None:
    """Raises ConfigurationError where one of `--answer_limit_list` is above the limit of all answers, or one of
    `--thinking_tokens_list` leaves nothing of it.
    """
    longest, longest_thought = (max(each or (), default=0) for each in (answer_limits, thinking))
    allowed = f"the {max_new_tokens} tokens that an answer of {task.name} may have"
    if longest > max_new_tokens:
        raise ConfigurationError(f"--answer_limit_list {longest} is above {allowed}; give --max_new_tokens {longest}")
    if thinking and longest_thought >= max_new_tokens:
        raise ConfigurationError(
            f"--thinking_tokens_list {longest_thought} leaves no answer of {allowed}, the thought among them; give "
            "--max_new_tokens for both"
        )


def _has_pictures(task: Task, sample_ids: Sequence[int]) -> bool:
    """Whether any row of a file, or any of the first few samples that can be read, has one."""
    if isinstance(task, DataFileTask):
        return task.has_pictures
    return any(each.image is not None for each in inspected(task, sample_ids))


def refuse_unscored(metric: str, config: ProfilingConfig, *, is_served: bool) -> None:
    """Refuse, where a metric scores log-probabilities, what is of generated answers alone.

    Args:
        is_served: whether a server runs the model.

    Raises:
        ConfigurationError: something is given that cannot act, or the model's logits are not seen.
    """
    scored, task, knobs = scored_by(metric), config.task, config.knobs
    if scored is None:
        return
    if is_served:
        raise ConfigurationError(
            f"--metric {metric} scores given texts by the model's logits, which no server shows: give --model_path a "
            "checkpoint, or another metric"
        )
    given = {
        "--max_new_tokens": task.max_new_tokens is not None,
        "--stop": bool(task.stop),
        "--ignore_eos": task.ignore_eos,
        "--answer_limit_list": knobs.answer_limit_list is not None,
        "--thinking_tokens_list": knobs.thinking_tokens_list is not None,
        "--batch_size_list": any(size > 1 for size in knobs.batch_size_list or ()),
        "--prompt_template": scored == "text" and task.prompt_template is not None,
        "--system_prompt": scored == "text" and task.system_prompt is not None,
    }
    idle = [flag for flag, is_given in given.items() if is_given]
    if idle:
        what = "a text as it is" if scored == "text" else "given answers, and generates none"
        raise ConfigurationError(f"--metric {metric} scores {what}: {', '.join(idle)} cannot act; drop it")


def refuse_unscorable(
    task: Task, sample_ids: Sequence[int], family: PromptFamily, sample_timeout_s: float | None
) -> None:
    """Refuse a metric that can score none of the samples; the first one that it can score ends the search.

    Raises:
        ConfigurationError: see above; or there is no such metric, or it gives a score that it may not give.
    """
    metric, reason = get_metric(task.metric), None
    for sample_id in sample_ids:
        try:
            with library_faults_named(f"sample {sample_id}"), time_limit(sample_timeout_s):
                sample = task[sample_id]
        except SampleError:  # not counted: it is a failed sample where it is requested
            continue
        try:
            check_scorable(with_continuations(task, sample, family), metric)
        except SampleError as error:
            reason = reason or f"sample {sample_id}: {error}"
        else:
            return
    if reason is not None:
        raise ConfigurationError(
            f"--metric {metric.name} can score no sample of {task.name}: {reason}; give another metric, or a task that "
            "has what it scores"
        )
