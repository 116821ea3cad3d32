"""Which prompts run: the first of those that are short enough, in order, if the model can answer them."""

from typing import Any

import pytest
from transformers import OlmoeConfig

from experiment_core_utils.config.text import TextConfig, validated
from experiment_core_utils.primitives.errors import ConfigurationError, ImpossibleCombination
from experiment_core_utils.text_run.plan import SelectedPrompts, choose_prompts
from tests.tiny_models.chat_families import CHAT_FAMILIES, tokenizer_of
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


def test_the_index_of_a_prompt_is_its_place_in_its_source() -> None:
    prompts = [FIVE, SEVEN, ONE, "b", FIVE, THREE, ONE]
    found = choose_prompts(config_of(num_input_prompts=5), prompts, TOKENIZER, OlmoeConfig())
    # Of 5, 7, 1, 1, 5, 3 and 1 tokens the first five that are short enough; equal ones keep their order.
    assert found.indices == (2, 3, 5, 0, 4)
    assert found.texts == tuple(prompts[index] for index in found.indices)


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


# --- chat template ------------------------------------------------------------------------------------------------

LLAMA3 = CHAT_FAMILIES["llama3"]


def chat_chosen(prompts: list[str], template: str | None = LLAMA3.template, **source: Any) -> SelectedPrompts:
    """With Llama 3's format and a token for each byte; its tokenizer adds the begin of sequence to every text."""
    tokenizer = tokenizer_of(LLAMA3)
    tokenizer.chat_template = template
    model = OlmoeConfig(max_position_embeddings=500, vocab_size=len(tokenizer))
    config = config_of(prompts=source, max_input_tokens=59)
    return choose_prompts(config, prompts, tokenizer, model)


def test_prompts_are_user_turns_with_one_begin_of_sequence() -> None:
    found = chat_chosen(["Why is it so?", "Why?"])
    # Begin, 4 marks around the roles, the end of the turn, 13 letters of the roles, 4 line breaks; and the question.
    assert found.tokenised["attention_mask"].sum(dim=1).tolist() == [1 + 4 + 1 + 13 + 4 + 4, 1 + 4 + 1 + 13 + 4 + 13]
    assert found.texts == ("Why?", "Why is it so?")
    begin = tokenizer_of(LLAMA3).bos_token_id
    assert [row.tolist().count(begin) for row in found.tokenised["input_ids"]] == [1, 1]
    assert found.form["chat_template"] == "applied" and found.form["final_prompt"]["text"] == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    # Two line breaks are no run yet.
    assert len(found.form["final_prompt"]["token_ids"]) == 27


def test_the_length_of_a_prompt_is_that_of_its_turn() -> None:
    # 23 tokens stand around it: 36 letters make 59 tokens, 37 one too many.
    assert chat_chosen(["a" * 36, "a" * 37]).num_too_long == 1
    assert chat_chosen(["a" * 58, "a" * 59], chat_template="off").num_too_long == 1
    assert chat_chosen(["a" * 58, "a" * 59], template=None).num_too_long == 1


@pytest.mark.parametrize(("source", "use"), [({"chat_template": "off"}, "off"), ({"chat_template": False}, "off")])
def test_prompts_are_taken_as_they_are_where_the_template_is_off(source: dict[str, Any], use: str) -> None:
    found = chat_chosen(["Why?"], **source)
    assert (found.form["chat_template"], found.form["final_prompt"]["text"]) == (use, "Why?")
    assert found.tokenised["input_ids"][0].tolist().count(tokenizer_of(LLAMA3).bos_token_id) == 1


def test_a_model_without_a_template_has_none() -> None:
    assert chat_chosen(["Why?"], template=None).form["chat_template"] == "none"
    with pytest.raises(
        ConfigurationError, match=r"^prompts\.system_prompt has no place: tiny has no chat template; drop"
    ):
        chat_chosen(["Why?"], template=None, system_prompt="Be kind.")


def test_the_date_in_prompts_is_part_of_their_form() -> None:
    form = chat_chosen(["Why?"], template="{{ strftime_now('%Y') }} {{ messages[0]['content'] }}").form
    assert (form["date"], form["final_prompt"]["text"]) == ("2024-07-26", "2024 Why?")
    assert "date" not in chat_chosen(["Why?"]).form


def test_a_system_prompt_goes_before_every_turn_and_counts() -> None:
    found = chat_chosen(["Why?"], system_prompt="Be kind.")
    assert found.form["system_prompt"] == "Be kind."
    assert found.form["final_prompt"]["text"].startswith(
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|><|start_header_id|>user"
    )
    with pytest.raises(
        ImpossibleCombination, match=r"prompts\.system_prompt is a part of the chat template, which is off"
    ):
        chat_chosen(["Why?"], chat_template="off", system_prompt="Be kind.")


def test_a_prompt_that_the_template_refuses_is_named() -> None:
    template = (
        "{% if 'odd' in messages[0]['content'] %}{{ raise_exception('no') }}{% endif %}{{ messages[0]['content'] }}"
    )
    assert chat_chosen(["even"], template=template).texts == ("even",)
    with pytest.raises(
        ConfigurationError, match=r"^the chat template cannot be used for the prompt 'odd' \(no\); leave"
    ):
        chat_chosen(["even", "odd"], template=template)
