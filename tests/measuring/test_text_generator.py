"""What is in force while `generate()` runs, what stays as it was, and which times come out."""

from typing import Any

import pytest
import torch

from experiment_core_utils.config.text import validated
from experiment_core_utils.measuring.text_generator import TextGenerator
from experiment_core_utils.models.common.text_generation import generation_values
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.finite_logits import LogitsNotFinite
from tests.tiny_models.tiny_text_model import (
    EOS,
    PAD,
    NumberTokenizer,
    ScriptedTextModel,
    left_padded,
    number_generator,
    tiny_text_model,
)

MODEL = tiny_text_model()
PROMPT = left_padded([[60, 61, 62], [70]])


def generator(model: Any, seed: int = 42, **decoding: Any) -> TextGenerator:
    config = validated({"decoder_config": decoding, "random_seed": seed, "max_output_tokens": 6})
    return number_generator(model, config)


def test_what_is_not_used_is_switched_off_where_it_acts() -> None:
    """transformers would cut to the 50 likeliest tokens by itself."""
    values = generator(ScriptedTextModel({}), decoding_mode="top_p", decoder_top_p=0.9).generation
    assert (values.top_k, values.top_p, values.temperature) == (0, 0.9, 1.0)
    values = generator(ScriptedTextModel({}), decoding_mode="top_k", decoder_top_k=3).generation
    assert (values.top_k, values.top_p, values.temperature) == (3, 1.0, 1.0)


def test_ids_are_the_models_own_or_else_the_tokenisers() -> None:
    model = ScriptedTextModel({})
    model.generation_config.eos_token_id = [5, 6]
    model.generation_config.pad_token_id = None
    values = generator(model)
    assert (values.generation.eos_token_id, values.generation.pad_token_id) == ([5, 6, EOS], PAD)
    assert values.ends.token_ids == {5, 6, EOS}

    class WithoutPad(NumberTokenizer):
        pad_token_id = None  # type: ignore[assignment]

    with pytest.raises(ConfigurationError, match="neither the model nor the tokeniser has a pad token"):
        generation_values(validated({}), model, WithoutPad())


def test_the_models_own_values_do_not_act_and_come_back() -> None:
    model = tiny_text_model()
    plain = generator(model).generate(PROMPT, 0, 6).token_ids
    own = model.generation_config
    own.repetition_penalty, own.no_repeat_ngram_size, own.max_length = 5.0, 1, 4
    own.do_sample, own.temperature, own.top_k = True, 9.0, 500
    by_its_own = model.generate(**PROMPT, max_new_tokens=6, do_sample=False)[:, 3:].tolist()
    assert by_its_own != plain  # these values would have acted
    assert generator(model).generate(PROMPT, 0, 6).token_ids == plain
    assert model.generation_config is own


def test_the_models_own_values_come_back_after_an_error() -> None:
    model = ScriptedTextModel({}, largest_batch=0)
    own = model.generation_config
    with pytest.raises(Exception, match="out of memory"):
        generator(model).generate(PROMPT, 0, 6)
    assert model.generation_config is own


SAMPLING = {"decoding_mode": "temperature", "decoder_temperature": 1.5}


def test_drawn_tokens_depend_on_seed_and_first_prompt_only() -> None:
    model = MODEL
    drawn = generator(model, **SAMPLING).generate(PROMPT, 0, 6).token_ids
    torch.rand(17)
    assert generator(model, **SAMPLING).generate(PROMPT, 0, 6).token_ids == drawn
    assert generator(model, seed=43, **SAMPLING).generate(PROMPT, 0, 6).token_ids != drawn
    assert generator(model, **SAMPLING).generate(PROMPT, 1, 6).token_ids != drawn
    # Fewer tokens are the beginning of more.
    assert generator(model, **SAMPLING).generate(PROMPT, 0, 3).token_ids == [row[:3] for row in drawn]


def test_the_global_random_state_is_left_as_it_was() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    generator(MODEL, **SAMPLING).generate(PROMPT, 0, 6)
    assert torch.equal(torch.get_rng_state(), before)


def test_top_k_of_one_is_greedy() -> None:
    greedy = generator(MODEL).generate(PROMPT, 0, 6).token_ids
    assert generator(MODEL, decoding_mode="top_k", decoder_top_k=1).generate(PROMPT, 0, 6).token_ids == greedy


@pytest.mark.parametrize("rows", [1, 2])
def test_one_mark_a_token_for_any_number_of_rows(rows: int) -> None:
    prompts = {name: tensor[:rows] for name, tensor in PROMPT.items()}
    batch = generator(MODEL).generate(prompts, 0, 6)
    num_tokens = len(batch.token_ids[0])
    assert num_tokens > 1
    assert batch.ttft_s is not None
    assert len(batch.inter_token_s) == num_tokens - 1
    rest = batch.inference_time_s - batch.ttft_s - sum(batch.inter_token_s)
    assert rest > 0  # the tokens' way to the host


def test_a_model_that_tells_nothing_of_single_tokens_has_a_total_only() -> None:
    batch = generator(ScriptedTextModel({60: (1, 2), 70: (3,)}, reports_tokens=False)).generate(PROMPT, 0, 6)
    assert batch.token_ids == [[1, 2], [3, PAD]]
    assert (batch.ttft_s, batch.inter_token_s) == (None, [])
    assert batch.inference_time_s > 0


@pytest.mark.parametrize("decoding", [{}, SAMPLING])
def test_prompts_with_logits_that_are_not_finite_are_known(decoding: dict[str, Any]) -> None:
    """The embedding of token 70 is not finite, which the second prompt contains; drawing from NaN would be an error."""
    model: Any = tiny_text_model()
    generator(model, **decoding).generate(PROMPT, 0, 2)
    with torch.no_grad():
        model.get_input_embeddings().weight[70] = float("nan")
    with pytest.raises(LogitsNotFinite) as caught:
        generator(model, **decoding).generate(PROMPT, 0, 2)
    assert caught.value.row == 1
