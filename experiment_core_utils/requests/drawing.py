"""The task of a run and the samples that are drawn from it."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from experiment_core_utils.config.parts import TaskConfig
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.meters.stability import shuffled
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.texts import all_of
from experiment_core_utils.tasks.content import digests_of
from experiment_core_utils.tasks.datasets.files.columns import mapping_of
from experiment_core_utils.tasks.interface import Sample, Task
from experiment_core_utils.tasks.registry import get_metric, load_data_file, load_task, load_task_module
from experiment_core_utils.tasks.sampling import SampledDataset, create_sampled_dataset

# What is asked where no task is given.
VISION_TASK, TEXT_TASK = "reference_vqa", "reference_questions"


def with_task_named(config: TaskConfig, *, takes_pictures: bool) -> TaskConfig:
    """The configuration with the name of the default task of such a model, where neither task nor file is given."""
    if config.dataset_name is not None or config.data_file is not None:
        return config
    return config.model_copy(update={"dataset_name": VISION_TASK if takes_pictures else TEXT_TASK})


def open_task(config: TaskConfig, *, has_chat_template: bool = False, model_type: str | None = None) -> Task:
    """The requested task: rows of a file, or a split of a dataset.

    Args:
        has_chat_template: whether the model that will be asked has one; of your own data its open answers are then
            scored by `relaxed` where no metric is named.
        model_type: of that model, for tasks of lmms-eval that have other words for some models.

    Raises:
        ConfigurationError: it is not there or has no row that can be used, or there is no such metric.
    """
    if config.task_module is not None:
        load_task_module(config.task_module)
    if config.data_file is not None:
        return load_data_file(
            config.data_file,
            config.metric,
            data_dir=config.data_dir,
            cache_dir=config.hf_cache_dir,
            prompt_template=config.prompt_template,
            columns=mapping_of(config.named_columns),
            text_only=config.text_only,
            split=config.split,
            revision=config.dataset_revision,
            has_chat_template=has_chat_template,
        )
    task = load_task(
        config.dataset_name or VISION_TASK,
        config.split,
        data_dir=config.data_dir,
        cache_dir=config.hf_cache_dir,
        prompt_template=config.prompt_template,
        revision=config.dataset_revision,
        model_type=model_type,
    )
    if config.metric is not None:
        task.metric = get_metric(config.metric).name
    return task


def open_tasks(
    config: TaskConfig, names: Sequence[str], *, has_chat_template: bool = False, model_type: str | None = None
) -> dict[str, Task]:
    """Tasks by name, each once, as `open_task` opens them; the rows of a file are the one task that there is.

    Raises:
        ConfigurationError: one of them is not there, or is not what the file is called.
    """
    if config.data_file is None:
        named = {name: config.model_copy(update={"dataset_name": name}) for name in names}
        return {name: open_task(each, model_type=model_type) for name, each in named.items()}
    task = open_task(config, has_chat_template=has_chat_template)
    others = [name for name in dict.fromkeys(names) if name != task.name]
    if others:
        raise ConfigurationError(f"--data_file {config.data_file} is the task {task.name}, not {others[0]}; drop one")
    return {task.name: task}


def draw_samples(
    task: Task, config: TaskConfig, *, may_stop_early: bool = False, left_out: Set[int] = frozenset()
) -> SampledDataset[Sample]:
    """The requested samples, in the order in which every setting measures them.

    Ids ascend, so that neighbours that share a picture stay neighbours. Where a setting may stop early
    (`--until_precision`) they are shuffled by the seed: any beginning is then a random sample of the whole, and the
    settings share their beginnings.

    Args:
        left_out: ids that are not drawn, because the blocks were chosen by these samples.

    Raises:
        ConfigurationError: `--ids` outside the split or among those left out, or nothing else is there.
    """
    remedy = "score the blocks on another split (knobprof blocks --split), or give --importance_scores_file none"
    if seen := [each for each in config.ids or () if each in left_out]:
        raise ConfigurationError(
            f"--ids {seen[0]}: {len(seen)} of these samples of {task.name} {task.split} chose the blocks, and accuracy "
            f"would be too good; give other ids, {remedy}"
        )
    if len(left_out) == len(task) > 0:
        raise ConfigurationError(
            f"{all_of(len(task), 'sample')} of {task.name} {task.split} chose the blocks, and accuracy would be "
            f"too good; {remedy}"
        )
    drawn = create_sampled_dataset(
        task,
        config.num_samples,
        config.seed,
        stratify_by_type=config.sample_by == "question_type",
        ids=config.ids,
        left_out=left_out,
    )
    ascending = tuple(sorted(drawn.sample_ids))
    in_order = shuffled(ascending, config.seed) if may_stop_early else ascending
    return replace(drawn, sample_ids=in_order)


def draw_other_samples(
    task: Task, config: TaskConfig, choice: BlockChoice, *, may_stop_early: bool = False
) -> SampledDataset[Sample]:
    """As `draw_samples`, without the samples by which the blocks were chosen, as far as that is known.

    Those of the same task, split and source are known by their ids, any others by their content.
    """
    left_out = ids_that_chose(task, choice)
    contents = {digest for scored in (choice.questions or {}).values() for digest in scored.scored_sha256 or ()}
    while True:
        drawn = draw_samples(task, config, may_stop_early=may_stop_early, left_out=left_out)
        digests = digests_of(task, drawn.sample_ids, None) if contents else None
        seen = {sample_id for sample_id, digest in (digests or {}).items() if digest in contents}
        if not seen:
            return drawn
        left_out |= seen


def ids_that_chose(task: Task, choice: BlockChoice) -> set[int]:
    """The samples of the task by which the blocks were chosen, where that was on the same split and source."""
    found = set[int]()
    for name, scored in (choice.questions or {}).items():
        if (name, scored.split, _where_from(scored.source)) == (task.name, task.split, _where_from(task.source)):
            found.update(each for each in scored.scored_ids if each < len(task))
    return found


def _where_from(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """A task's source without the folder, which may be another for the same data."""
    return {name: value for name, value in source.items() if name != "path"}
