"""In: a task, or texts, with their options; out: the drawn prompts, each as tensors with true token counts."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from experiment_core_utils.config.text import PromptSource
from experiment_core_utils.engines.answer_ends import without_appended_eos
from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.common.text_generation import is_surely_longer
from experiment_core_utils.models.hf.requests import UNUSABLE, PromptLayout, default_template, prompt_layout_of
from experiment_core_utils.models.interface import Runnable
from experiment_core_utils.primitives.errors import ConfigurationError, SampleError, first_line, library_faults_named
from experiment_core_utils.primitives.interruption import time_limit
from experiment_core_utils.primitives.texts import short_digest, shown
from experiment_core_utils.records.provenance import FinalPrompt
from experiment_core_utils.records.requests import TokenisedPrompts
from experiment_core_utils.tasks.interface import Task
from experiment_core_utils.tasks.prompt_forms import prompt_for, with_continuations


def fingerprint_of_ids(sample_ids: Sequence[int]) -> str:
    """Short digest of the ids, to recognise results made on the same samples."""
    return short_digest(",".join(map(str, sample_ids)))


def chat_layout_of(source: PromptSource, tokenizer: Any, name: str) -> tuple[PromptLayout, dict[str, str]]:
    """What stands around each prompt of a text run: the chat template of a tokenizer, where it has one and it is
    wanted.

    Returns:
        The layout, whose template is None where prompts are taken as they are; and for the record `chat_template`,
        which is `applied`, `none` or `off`, with `system_prompt` and `date` where there is one.

    Raises:
        ConfigurationError: it cannot be used, or has no place for the system prompt, or there is none for it.
    """
    template = default_template(getattr(tokenizer, "chat_template", None), name)
    if template is None and source.system_prompt is not None:
        raise ConfigurationError(f"prompts.system_prompt has no place: {name} has no chat template; drop it")
    use = "none" if template is None else "off" if source.chat_template == "off" else "applied"
    layout = prompt_layout_of(tokenizer, template if use == "applied" else None, None, name, source.system_prompt)
    fields = {"chat_template": use, "system_prompt": source.system_prompt, "date": layout.date}
    return layout, {key: value for key, value in fields.items() if value is not None}


def final_text(layout: PromptLayout, prompt: str) -> str:
    """The text to tokenise; raises ConfigurationError where the template cannot be used for it."""
    try:
        return layout.text(prompt, num_pictures=0)
    except UNUSABLE as error:
        raise ConfigurationError(
            f"the chat template cannot be used for the prompt {shown(repr(prompt))} ({first_line(error)}); leave "
            "the prompt out, or write prompts.chat_template: off"
        ) from error


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
                sample, family = task[sample_id], model.prompt_family
                prompt = prompt_for(task, sample, family)
                request = model.prepare(with_continuations(task, sample, family), prompt, crops)
        except SampleError:  # not counted: it is a failed sample where it is requested
            continue
        ids = request.inputs.get("input_ids")
        return FinalPrompt.of_ids(sample_id, request.text, None if ids is None else ids[0].tolist())
    return None


def checked_prompts(tokenised_prompts: TokenisedPrompts) -> TokenisedPrompts:
    """The prompts on the host; raises ConfigurationError unless they are [N, T] with the padding on the left."""
    try:
        ids, mask = (torch.as_tensor(tokenised_prompts[name]).cpu() for name in ("input_ids", "attention_mask"))
    except KeyError as error:
        raise ConfigurationError(f"the tokenised prompts have no {error}; make them with tokenise_prompts") from None
    if ids.dim() != 2 or ids.shape != mask.shape or not ids.numel():
        raise ConfigurationError(
            f"input_ids {list(ids.shape)} and attention_mask {list(mask.shape)} must both be [prompts, tokens] and "
            "contain at least one prompt; make them with tokenise_prompts"
        )
    if not (mask[:, 1:] >= mask[:, :-1]).all() or not mask[:, -1].all():
        raise ConfigurationError("the prompts are not padded on the left; make them with tokenise_prompts")
    return TokenisedPrompts(input_ids=ids, attention_mask=mask)
