"""The shipped tokenizer: 512 tokens, one token a label character, every text comes back from its tokens."""

import random
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from experiment_core_utils.tasks.datasets.reference_captions import caption
from experiment_core_utils.tasks.datasets.reference_scenes import COLOURS, KINDS, plan_scene
from experiment_core_utils.tasks.datasets.reference_task import plural, prompt_of
from experiment_core_utils.tasks.datasets.reference_vqa import make_questions

FOLDER = Path(__file__).parents[2] / "checkpoints" / "molmoe_tiny"
TOKENIZER = PreTrainedTokenizerFast.from_pretrained(FOLDER)
SPECIAL = ["<|endoftext|>", "<|pad|>", "<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<|image|>"]


def _pieces(text: str) -> list[str]:
    return [TOKENIZER.decode([token]) for token in TOKENIZER.encode(text)]


def test_vocabulary_and_special_tokens() -> None:
    assert len(TOKENIZER) == 512
    assert TOKENIZER.convert_tokens_to_ids(SPECIAL) == list(range(7))
    assert (TOKENIZER.eos_token, TOKENIZER.bos_token, TOKENIZER.pad_token) == (SPECIAL[0], SPECIAL[0], SPECIAL[1])
    assert sorted(TOKENIZER.all_special_ids) == list(range(7))
    assert TOKENIZER.padding_side == "left"


def test_auto_tokenizer_reads_the_folder() -> None:
    assert AutoTokenizer.from_pretrained(FOLDER).encode(" red") == TOKENIZER.encode(" red")


def test_no_special_tokens_are_added() -> None:
    tokens = TOKENIZER.encode(" User: what is written on the red circle? Assistant:")
    assert not set(tokens) & set(range(7))
    assert len(tokens) == 14


@pytest.mark.parametrize("character", string.ascii_uppercase + string.digits)
def test_label_characters_are_tokens_with_and_without_space(character: str) -> None:
    assert len(TOKENIZER.encode(character)) == 1
    assert len(TOKENIZER.encode(f" {character}")) == 1
    assert _pieces(f" {character}A7{character}") == [f" {character}", "A", "7", character]


def test_words_of_the_task_are_single_tokens() -> None:
    words = [*COLOURS, *KINDS, *map(plural, KINDS), "yes", "no", "what", "which", "written", "colour", "shape", "many"]
    assert [word for word in words if len(TOKENIZER.encode(f" {word}")) != 1] == []


def test_prompt_and_answer_are_tokenised_independently() -> None:
    for seed in range(10):
        plan = plan_scene(seed)
        for item in make_questions(plan, random.Random(seed)):
            prompt, answer = prompt_of(item.question), f" {item.answer}"
            assert TOKENIZER.encode(prompt) + TOKENIZER.encode(answer) == TOKENIZER.encode(prompt + answer)
            assert len(TOKENIZER.encode(answer)) <= 4
        text = caption(plan.items)
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40))
def test_any_text_comes_back(text: str) -> None:
    if any(token in text for token in SPECIAL):
        return
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_batches_are_padded_on_the_left() -> None:
    batch = TOKENIZER([" red", " red circle"], padding=True)
    assert batch["input_ids"][0][0] == TOKENIZER.pad_token_id
    assert batch["attention_mask"] == [[0, 1], [1, 1]]
