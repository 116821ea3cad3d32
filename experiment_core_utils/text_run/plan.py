"""The plan of a text run: which combinations and prompts are due, before a model is loaded."""

import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedConfig

from experiment_core_utils.a_distributed import setup_distributed
from experiment_core_utils.c_prompt_processing import (
    chat_layout_of,
    filter_prompts_by_length,
    final_text,
    sort_prompts_by_length,
    tokenise_prompts,
)
from experiment_core_utils.config.text import PromptSource, TextConfig
from experiment_core_utils.config.text_grid import Combination
from experiment_core_utils.meters.host_facts import environment_stamp
from experiment_core_utils.models.common.checkpoint_files import model_digest
from experiment_core_utils.models.common.preferences import preferences_in
from experiment_core_utils.models.common.text_generation import check_context
from experiment_core_utils.models.text_model import LanguageModelSource, load_tokenizer, validate_loadable
from experiment_core_utils.primitives.collectives import broadcast_from_main, processes_on_this_machine
from experiment_core_utils.primitives.device import set_cpu_threads
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsRefused
from experiment_core_utils.primitives.files import check_replaceable
from experiment_core_utils.primitives.texts import short_digest
from experiment_core_utils.records.provenance import FinalPrompt
from experiment_core_utils.records.requests import TokenisedPrompts
from experiment_core_utils.records.result_files import aggregated_path, raw_result_path, read_experiments
from experiment_core_utils.records.text import SavedExperiment, ShownExperiment
from experiment_core_utils.tasks.prompts import Prompts, read_prompts
from experiment_core_utils.text_run.custom_metrics import CustomMetric, find_custom_metrics


@dataclass(frozen=True)
class SelectedPrompts:
    """The prompts that run, in the order in which they do."""

    texts: tuple[str, ...]
    indices: tuple[int, ...]  #: the place of each in its source, from 0, those that are left out counted
    tokenised: TokenisedPrompts  #: the same, in the chat template where one is applied
    num_too_long: int  #: left out because they have more than `max_input_tokens` tokens, the template's counted
    #: `chat_template`: `applied`, `none` or `off`; `system_prompt`, if given; `final_prompt`: `text` and `token_ids` of
    #: the first prompt as the model gets it
    form: Mapping[str, Any]


def choose_prompts(
    config: TextConfig, prompts: Sequence[str], tokenizer: Any, model_config: PreTrainedConfig
) -> SelectedPrompts:
    """The first `num_input_prompts` of those that are short enough, shortest first where they are to be sorted.

    Raises:
        ConfigurationError: fewer are short enough than requested, or none is; an answer to one of them does not fit
            the model's context; the tokenizer has tokens that the model does not know.
    """
    layout, fields = chat_layout_of(config.prompts, tokenizer, config.model_name)
    finals = [final_text(layout, prompt) for prompt in prompts]
    places: dict[str, deque[int]] = defaultdict(deque)
    for place, text in enumerate(finals):
        places[text].append(place)
    # A chat template has its own.
    options = {"add_special_tokens": layout.template is None}
    short = filter_prompts_by_length(finals, tokenizer, config.max_input_tokens, **options)
    wanted = config.num_input_prompts or len(short)
    if not short or wanted > len(short):
        raise ConfigurationError(
            f"{config.num_input_prompts or 'all'} prompts of at most {config.max_input_tokens} tokens are requested, "
            f"and {len(short)} of {len(prompts)} are that short; lower num_input_prompts or raise max_input_tokens"
        )
    texts = short[:wanted]
    if config.sort_prompts:
        texts = sort_prompts_by_length(texts, tokenizer, **options)
    tokenised = tokenise_prompts(texts, tokenizer, **options)
    check_context(tokenised, config.max_output_tokens, model_config)
    _check_vocabulary(config.model_name, tokenised, model_config)
    first_ids = tokenised["input_ids"][0][tokenised["attention_mask"][0].bool()].tolist()
    final = FinalPrompt.of_ids(0, texts[0], first_ids)
    form = {**fields, "final_prompt": {"text": final.text, "token_ids": final.token_ids}}
    # Of equal ones the first is taken first, and stays in front.
    indices = tuple(places[text].popleft() for text in texts)
    chosen = tuple(prompts[place] for place in indices)
    return SelectedPrompts(chosen, indices, tokenised, len(prompts) - len(short), form)


def _check_vocabulary(model_name: str, tokenised: TokenisedPrompts, model_config: PreTrainedConfig) -> None:
    highest = int(tokenised["input_ids"].max())
    # As `context_length`.
    vocabulary = getattr(model_config.get_text_config(), "vocab_size", None)
    if vocabulary is not None and highest >= vocabulary:
        raise ConfigurationError(
            f"{model_name}: its tokenizer gives token {highest}, and the model knows {vocabulary}; they do not "
            "belong together"
        )


# What the figures of an experiment do not depend on.
_OF_THE_RUN = frozenset({"worker_timeout", "num_processes", "save_outputs", "task_type", "further", "energy"})


@dataclass(frozen=True)
class DueExperiment:
    """A combination that can run here."""

    title: str  #: its place in the grid and what is varied
    varied: Mapping[str, Any]
    config: TextConfig
    source: LanguageModelSource
    prompts: Prompts
    chosen: SelectedPrompts  #: those of `prompts` that run
    custom_metrics: Sequence[CustomMetric]
    fingerprint: str


@dataclass(frozen=True)
class TextPlan:
    """A whole grid."""

    due: tuple[DueExperiment, ...]  #: to be measured, in order
    saved: Mapping[str, str]  #: title -> name of the saved experiment that an earlier run made of it
    #: title -> why it is not measured: not possible together or on this machine, or the same as another
    left_out: Mapping[str, str]

    def lines(self) -> list[str]:
        """One line for each combination that is settled already, and for each that is due; then what the models prefer
        of decoding.
        """
        return [
            *(f"{title}: left out: {reason}" for title, reason in self.left_out.items()),
            *(f"{title}: done before, as {name}" for title, name in self.saved.items()),
            *(f"{each.title}: due" for each in self.due),
            *self._decoding_lines(),
        ]

    def prompt_lines(self) -> list[str]:
        """The first prompt of each form that is due as the model gets it, its text and ids."""
        forms = {repr((each.source.folder, each.chosen.form)): each.chosen.form for each in self.due}
        return [
            line
            for form in forms.values()
            for line in FinalPrompt(sample_id=0, **form["final_prompt"]).lines(f"chat_template {form['chat_template']}")
        ]

    def _decoding_lines(self) -> Iterator[str]:
        models = {each.source.folder: each for each in self.due}
        for folder, each in models.items():
            name = each.source.name
            yield from preferences_in(folder, load_tokenizer(each.source), name).lines(name)


def any_config(grid: Sequence[Combination]) -> TextConfig:
    """Any combination's configuration, for the keys of the launch, which all combinations share."""
    return next(each.config for each in grid if each.config is not None)


def launched(grid: Sequence[Combination], results_dir: Path) -> Accelerator:
    """This process's place among those that measure a grid.

    Raises:
        ConfigurationError: the results' folder is a file.
        WorkerLost: the processes launched are not those requested.
    """
    first = any_config(grid)
    accelerator = setup_distributed(first)
    set_cpu_threads(first.num_threads, processes_on_this_machine(accelerator))
    if results_dir.exists() and not results_dir.is_dir():
        raise ConfigurationError(f"{results_dir} is a file; give a folder for the results")
    return accelerator


def plan_of(grid: Sequence[Combination], results_dir: Path, accelerator: Accelerator) -> TextPlan:
    """What is to be done for a grid: models, prompts and metrics of its combinations, and what is saved of them.

    Raises:
        ConfigurationError: not a single combination is possible here; says why the first is not.
        ResultsRefused: what an earlier run saved here is broken.
        OutputRefused: something else than a regular file has the name of the results file.
    """
    path = aggregated_path(any_config(grid).task_type, ".json", results_dir)
    advice = "repair it, or remove the experiment, and the same command measures it again"

    def load() -> dict[str, dict[str, Any]]:
        # It is written again at the end.
        check_replaceable(path)
        return read_experiments(path)

    saved = broadcast_from_main(load, accelerator)
    # Those that a notebook saved have no digest.
    by_digest = {
        SavedExperiment.read(saved[name], f"{path}: {name}", advice).digest: name
        for name in saved
        if "digest" in saved[name]
    }
    # Combinations mostly share their prompts, and a dataset is read whole.
    prompts_of, digest_of = cache(read_prompts), cache(model_digest)
    due: list[DueExperiment] = []
    done: dict[str, str] = {}
    left_out: dict[str, str] = {}
    titles: dict[str, str] = {}
    for number, combination in enumerate(grid, start=1):
        values = (f"{key.rpartition('.')[2]}={value}" for key, value in combination.varied.items())
        title = " ".join((f"{number}/{len(grid)}", *values))
        experiment = _checked_experiment(title, combination, accelerator, prompts_of, digest_of)
        if isinstance(experiment, str):
            left_out[title] = experiment
            continue
        name = by_digest.get(experiment.fingerprint)
        if experiment.fingerprint in titles:
            left_out[title] = f"the same experiment as {titles[experiment.fingerprint]}"
        elif name is not None and (not experiment.config.save_outputs or _has_outputs(saved[name], results_dir)):
            ShownExperiment.read(saved[name], f"{path}: {name}", advice)
            done[title] = name
        else:
            due.append(experiment)
        titles.setdefault(experiment.fingerprint, title)
    if not due and not done:
        raise ConfigurationError(next(iter(left_out.values())))
    return TextPlan(tuple(due), done, left_out)


def _has_outputs(experiment: Mapping[str, Any], results_dir: Path) -> bool:
    """Whether a saved experiment saved its texts; raises ResultsRefused where something else has their name."""
    texts = raw_result_path(str(experiment["experiment_id"]), "text_output", results_dir)
    if os.path.lexists(texts) and not texts.is_file():
        raise ResultsRefused(
            f"{texts} is not a result, but a folder, a pipe, a device or a link to nothing; move it away"
        )
    return texts.is_file()


def _checked_experiment(
    title: str,
    combination: Combination,
    accelerator: Accelerator,
    prompts_of: Callable[[PromptSource], Prompts],
    digest_of: Callable[[Path], str],
) -> DueExperiment | str:
    """What can be measured, or why it cannot."""
    config = combination.config
    if config is None:
        return str(combination.reason)
    try:
        source = validate_loadable(config)
        prompts = prompts_of(config.prompts)
        metrics = find_custom_metrics(config.custom_metrics)
        chosen = choose_prompts(config, prompts.texts, load_tokenizer(source), source.config)
    except ConfigurationError as error:
        return str(error)
    # Known by its content wherever it lies.
    model = source.stamp if source.revision else (digest_of(source.folder),)
    applied = {name: value for name, value in chosen.form.items() if name != "final_prompt"}
    fingerprint = short_digest(repr(fingerprint_parts(config, source, prompts, accelerator, model, applied)))
    return DueExperiment(title, combination.varied, config, source, prompts, chosen, metrics, fingerprint)


def fingerprint_parts(
    config: TextConfig,
    source: LanguageModelSource,
    prompts: Prompts,
    accelerator: Accelerator,
    model: tuple[object, ...],
    chat: Mapping[str, str] = MappingProxyType({}),
) -> tuple[object, ...]:
    """What the figures of an experiment depend on.

    Args:
        model: what the model is known by: its name and commit on the hub, or the digest of its files.
        chat: what is done about the chat template; what counts is whether it is applied.
    """
    left_out = _OF_THE_RUN if model == source.stamp else _OF_THE_RUN | {"model_name"}
    # Not there yet when earlier results were saved, which still count.
    left_out |= {name for name in ("stop", "ignore_eos") if not getattr(config, name)}
    # As before there was a layer for the chat template: experiments from then without one still count.
    excluded: dict[str, Any] = {**dict.fromkeys(left_out, True), "prompts": {"chat_template", "system_prompt"}}
    return (
        config.effective().model_dump_json(exclude=excluded),
        model,
        prompts.source["digest"],
        accelerator.num_processes,
        environment_stamp(accelerator.device),
        *([sorted(chat.items())] if chat.get("chat_template") == "applied" else []),
    )
