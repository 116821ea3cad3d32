"""Which prompts run: the first of those that are short enough, in order, if the model can answer them."""

from typing import Any

import pytest
from transformers import OlmoeConfig

from experiment_core_utils.config.text import TextConfig, validated
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.text_run.plan import SelectedPrompts, choose_prompts
from tests.tiny_models.tiny_text_model import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def prompt_of(length: int) -> str:
    """A text of that many tokens."""
    text = " ".join(["a"] * length)
    assert len(TOKENIZER(text)["input_ids"]) == length
    return text


ONE, THREE, FIVE, SEVEN = map(prompt_of, (1, 3, 5, 7))


def config_of(**values: Any) -> TextConfig:
    return validated({"model_name": "tiny", "max_input_tokens": 5, "max_output_tokens": 4, **values})


def chosen(positions: int = 9, vocabulary: int = len(TOKENIZER), **values: Any) -> SelectedPrompts:
    model = OlmoeConfig(max_position_embeddings=positions, vocab_size=vocabulary)
    return choose_prompts(config_of(**values), [FIVE, SEVEN, ONE, THREE], TOKENIZER, model)


def test_long_prompts_are_left_out_and_counted_and_the_rest_keeps_its_order() -> None:
    found = chosen(sort_prompts=False)
    assert found.texts == (FIVE, ONE, THREE)
    assert found.num_too_long == 1
    assert found.tokenised["attention_mask"].sum(dim=1).tolist() == [5, 1, 3]


def test_the_first_are_taken_before_they_are_sorted() -> None:
    found = chosen(sort_prompts=True, num_input_prompts=2)
    # Of 5, 1 and 3 tokens the first two, then the shorter one first; the one of 3 was short enough and not wanted.
    assert (found.texts, found.num_too_long) == ((ONE, FIVE), 1)


def test_more_than_are_short_enough_are_refused() -> None:
    assert len(chosen(num_input_prompts=3).texts) == 3
    with pytest.raises(ConfigurationError, match="4 prompts of at most 5 tokens are requested, and 3 of 4 are that"):
        chosen(num_input_prompts=4)


def test_none_short_enough_is_refused_where_all_are_requested() -> None:
    with pytest.raises(ConfigurationError, match="all prompts of at most 2 tokens are requested, and 0 of 1"):
        choose_prompts(config_of(max_input_tokens=2), [FIVE], TOKENIZER, OlmoeConfig())


def test_prompt_and_answer_have_to_fit_the_models_positions() -> None:
    # 5 tokens and an answer of 4 are 9 positions.
    assert chosen(positions=9).num_too_long == 1
    fault = "prompt . of 5 tokens with max_output_tokens 4 is longer than .* context of 8"
    with pytest.raises(ConfigurationError, match=fault):
        chosen(positions=8)


def test_a_token_that_the_model_does_not_know_is_refused() -> None:
    highest = max(TOKENIZER(FIVE)["input_ids"])
    assert chosen(vocabulary=highest + 1).num_too_long == 1
    with pytest.raises(ConfigurationError, match=f"gives token {highest}, and the model knows {highest}"):
        chosen(vocabulary=highest)
