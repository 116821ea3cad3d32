"""In: all prompts of a source, a tokenizer and a model's config; out: those that run, before any weight is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from experiment_core_utils.c_prompt_processing import (
    filter_prompts_by_length,
    sort_prompts_by_length,
    tokenise_prompts,
)
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.records import TokenisedPrompts
from experiment_core_utils.primitives.text_config import TextConfig
from experiment_core_utils.text_generation import check_context


@dataclass(frozen=True)
class ChosenPrompts:
    """The prompts that run, in the order in which they do.

    Attributes:
        tokenised: the same.
        num_too_long: left out because they have more than `max_input_tokens` tokens.
    """

    texts: tuple[str, ...]
    tokenised: TokenisedPrompts
    num_too_long: int


def choose_prompts(
    config: TextConfig, prompts: Sequence[str], tokenizer: Any, model_config: PreTrainedConfig
) -> ChosenPrompts:
    """The first `num_input_prompts` of those that are short enough, shortest first where they are to be sorted.

    Raises:
        ConfigurationError: fewer are short enough than asked for, or none is; an answer to one of them does not fit
            the model's context; the tokenizer has tokens that the model does not know.
    """
    short = filter_prompts_by_length(prompts, tokenizer, config.max_input_tokens)
    wanted = config.num_input_prompts or len(short)
    if not short or wanted > len(short):
        raise ConfigurationError(
            f"{config.num_input_prompts or 'all'} prompts of at most {config.max_input_tokens} tokens are asked for, "
            f"and {len(short)} of {len(prompts)} are that short; lower num_input_prompts or raise max_input_tokens"
        )
    texts = short[:wanted]
    if config.sort_prompts:
        texts = sort_prompts_by_length(texts, tokenizer)
    tokenised = tokenise_prompts(texts, tokenizer)
    check_context(tokenised, config.max_output_tokens, model_config)
    _check_vocabulary(config, tokenised, model_config)
    return ChosenPrompts(tuple(texts), tokenised, len(prompts) - len(short))


def _check_vocabulary(config: TextConfig, tokenised: TokenisedPrompts, model_config: PreTrainedConfig) -> None:
    highest = int(tokenised["input_ids"].max())
    # As `context_length`.
    vocabulary = getattr(model_config.get_text_config(), "vocab_size", None)
    if vocabulary is not None and highest >= vocabulary:
        raise ConfigurationError(
            f"{config.model_name}: its tokenizer gives token {highest}, and the model knows {vocabulary}; they do not "
            "belong together"
        )
