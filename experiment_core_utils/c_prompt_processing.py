"""In: a task, or texts, with their options; out: the drawn prompts, each as tensors with true token counts."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from experiment_core_utils.config.parts import TaskConfig
from experiment_core_utils.config.text import PromptSource
from experiment_core_utils.engines.answer_ends import without_appended_eos
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.meters.stability import shuffled
from experiment_core_utils.models.common.text_generation import is_surely_longer
from experiment_core_utils.models.hf.requests import UNUSABLE, PromptLayout, default_template, prompt_layout_of
from experiment_core_utils.models.interface import Runnable
from experiment_core_utils.primitives.errors import ConfigurationError, SampleError, first_line, library_faults_named
from experiment_core_utils.primitives.interruption import time_limit
from experiment_core_utils.primitives.texts import all_of, short_digest, shown
from experiment_core_utils.records.provenance import FinalPrompt
from experiment_core_utils.records.requests import TokenisedPrompts
from experiment_core_utils.tasks.content import digests_of
from experiment_core_utils.tasks.datasets.files.columns import mapping_of
from experiment_core_utils.tasks.datasets.files.data_file import DataFileTask
from experiment_core_utils.tasks.interface import Sample, Task
from experiment_core_utils.tasks.prompt_forms import prompt_for
from experiment_core_utils.tasks.registry import get_metric, load_data_file, load_task, load_task_module, task_entry
from experiment_core_utils.tasks.sampling import SampledDataset, create_sampled_dataset, inspected

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
            columns=mapping_of(config.columns),
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
    limits: Sequence[int] | None,
    max_new_tokens: int,
) -> None:
    """Refuse what a request to a server would have that its samples lack, or that the limit of all answers cuts.

    Args:
        sides, limits: of `--picture_side_list` and `--answer_limit_list`; None if not given.
        max_new_tokens: the limit of all answers.

    Raises:
        ConfigurationError: pictures are scaled, and by its first few samples the task has none; a limit of answers is
            above that of all; or `--text_only` is given for a task that is not a file.
    """
    if config.text_only and config.data_file is None:
        raise ConfigurationError(f"--text_only is for a text model or the rows of --data_file, not {task.name}")
    if sides is not None and not _has_pictures(task, sample_ids):
        raise ConfigurationError(
            f"--picture_side_list cannot act: {task.name} has no pictures; give a task with some, such as "
            f"--dataset_name {VISION_TASK}, or drop it"
        )
    most = max(limits or (), default=0)
    if most > max_new_tokens:
        raise ConfigurationError(
            f"--answer_limit_list {most} is above the {max_new_tokens} tokens that an answer of {task.name} may have; "
            f"give --max_new_tokens {most}"
        )


def _has_pictures(task: Task, sample_ids: Sequence[int]) -> bool:
    """Whether any row of a file, or any of the first few samples that can be read, has one."""
    if isinstance(task, DataFileTask):
        return task.has_pictures
    return any(each.image is not None for each in inspected(task, sample_ids))


def fingerprint_of_ids(sample_ids: Sequence[int]) -> str:
    """Short digest of the ids, to recognise results made on the same samples."""
    return short_digest(",".join(map(str, sample_ids)))


@dataclass(frozen=True)
class ChatForm:
    """What stands around each prompt of a text run."""

    layout: PromptLayout | None  #: None where prompts are taken as they are
    fields: Mapping[str, str]  #: for the record: `chat_template`, which is `applied`, `none` or `off`, `system_prompt`

    @property
    def adds_special_tokens(self) -> bool:
        """Whether the tokenizer adds its special tokens: a chat template has its own."""
        return self.layout is None

    def final(self, prompt: str) -> str:
        """The text to tokenise; raises ConfigurationError where the template cannot be used for it."""
        if self.layout is None:
            return prompt
        try:
            return self.layout.text(prompt, num_pictures=0)
        except UNUSABLE as error:
            raise ConfigurationError(
                f"the chat template cannot be used for the prompt {shown(repr(prompt))} ({first_line(error)}); leave "
                "the prompt out, or write prompts.chat_template: off"
            ) from error


def chat_form_of(source: PromptSource, tokenizer: Any, name: str) -> ChatForm:
    """The chat template of a tokenizer, where it has one and it is wanted.

    Raises:
        ConfigurationError: it cannot be used, or has no place for the system prompt, or there is none for it.
    """
    template = default_template(getattr(tokenizer, "chat_template", None), name)
    if template is None and source.system_prompt is not None:
        raise ConfigurationError(f"prompts.system_prompt has no place: {name} has no chat template; drop it")
    if template is None or source.chat_template == "off":
        return ChatForm(None, {"chat_template": "none" if template is None else "off"})
    layout = prompt_layout_of(tokenizer, template, None, name, source.system_prompt)
    more = {"system_prompt": source.system_prompt, "date": layout.date}
    return ChatForm(
        layout, {"chat_template": "applied", **{name: value for name, value in more.items() if value is not None}}
    )


def filter_prompts_by_length(
    prompts: Iterable[str], tokenizer: Any, max_tokens: int, *, add_special_tokens: bool = True
) -> list[str]:
    """The prompts of at most `max_tokens` tokens, in their order; what the tokenizer adds (special tokens) counts."""
    prompts = [prompt for prompt in _listed(prompts) if not is_surely_longer(prompt, max_tokens, tokenizer)]
    lengths = _true_lengths(prompts, tokenizer, add_special_tokens)
    return [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= max_tokens]


def sort_prompts_by_length(prompts: Iterable[str], tokenizer: Any, *, add_special_tokens: bool = True) -> list[str]:
    """Prompts with fewer tokens first; those of the same length keep their order."""
    prompts = _listed(prompts)
    lengths = _true_lengths(prompts, tokenizer, add_special_tokens)
    return [prompts[place] for place in sorted(range(len(prompts)), key=lengths.__getitem__)]


def tokenise_prompts(prompts: Iterable[str], tokenizer: Any, *, add_special_tokens: bool = True) -> TokenisedPrompts:
    """Token ids and mask [N, T] on the host, padded on the left to the longest prompt, nothing cut.

    Args:
        tokenizer: of transformers, with a pad token; which side it pads by itself does not matter.
        add_special_tokens: whether it adds its own, which prompts in a chat template have already.

    Raises:
        ConfigurationError: no prompt, a prompt without any token, or a tokenizer without a pad token.
    """
    prompts = _listed(prompts)
    if not prompts:
        raise ConfigurationError("there is no prompt to tokenise; give at least one (did the length filter drop all?)")
    if tokenizer.pad_token_id is None:
        raise ConfigurationError(
            "the tokenizer has no pad token; set tokenizer.pad_token = tokenizer.eos_token before tokenising"
        )
    rows = _token_ids(prompts, tokenizer, add_special_tokens)
    for place, row in enumerate(rows):
        if not row:
            raise ConfigurationError(f"prompt {place} ({prompts[place]!r}) has no token; leave it out")
    longest = max(map(len, rows))
    input_ids = torch.full((len(rows), longest), tokenizer.pad_token_id, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for place, row in enumerate(rows):
        input_ids[place, longest - len(row) :] = torch.tensor(row, dtype=torch.long)
        attention_mask[place, longest - len(row) :] = 1
    return TokenisedPrompts(input_ids=input_ids, attention_mask=attention_mask)


def _listed(prompts: Iterable[str]) -> list[str]:
    """A column or a generator will do; raises ConfigurationError for one string, whose letters would do too."""
    if isinstance(prompts, str):
        raise ConfigurationError(f"one string was given as the prompts ({prompts[:40]!r}); give a list of strings")
    return list(prompts)


def _true_lengths(prompts: Sequence[str], tokenizer: Any, add_special_tokens: bool) -> list[int]:
    return [len(row) for row in _token_ids(prompts, tokenizer, add_special_tokens)]


def _token_ids(prompts: Sequence[str], tokenizer: Any, add_special_tokens: bool) -> list[list[int]]:
    """Ids of each prompt as the run feeds them, from one call for all; the tokenizer does not end them."""
    if not prompts:
        return []
    options = {"padding": False, "truncation": False, "verbose": False, "add_special_tokens": add_special_tokens}
    rows: list[list[int]] = tokenizer(list(prompts), **options)["input_ids"]
    return [without_appended_eos(row, prompt, tokenizer) for row, prompt in zip(rows, prompts, strict=True)]


def first_final_prompt(
    task: Task, model: Runnable, sample_ids: Sequence[int], crops: CropRange | None, sample_timeout_s: float | None
) -> FinalPrompt | None:
    """What the model is given of the first sample that can be used; None where none can."""
    for sample_id in sample_ids:
        try:
            with library_faults_named(f"sample {sample_id}"), time_limit(sample_timeout_s):
                sample = task[sample_id]
                request = model.prepare(sample, prompt_for(task, sample, model.prompt_family), crops)
        except SampleError:  # not counted: it is a failed sample where it is requested
            continue
        ids = request.inputs.get("input_ids")
        return FinalPrompt.of_ids(sample_id, request.text, None if ids is None else ids[0].tolist())
    return None
