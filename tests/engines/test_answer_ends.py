"""Ends of answers by hand-made tokens, and the ends that a checkpoint names."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

from experiment_core_utils.engines.answer_ends import (
    NO_ENDS,
    AnswerEnds,
    eos_sources,
    split_stops,
    text_reader,
    turn_end,
    without_appended_eos,
)
from tests.models.tiny_checkpoints import write_checkpoint

EOS = 9
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def letters(token_ids: Sequence[int]) -> str:
    """0 is "a", 1 is "b", ...; 8 is a line end, 9 shows nothing."""
    return "".join("abcdefgh\n"[token] for token in token_ids if token != EOS)


def ends(*stop: str, **more: Any) -> AnswerEnds:
    return AnswerEnds(frozenset({EOS}), stop, letters, **more)


@pytest.mark.parametrize(
    ("tokens", "length"),
    [([4, 5, 9, 8, 8], 3), ([4, 5, 6], None), ([9, 9], 1), ([1, 8, 2, 3, 4], 4), ([2, 8, 2], None), ([1, 8], None)],
)
def test_the_first_end_counts_and_is_among_the_tokens(tokens: list[int], length: int | None) -> None:
    by_stop = ends("\ncd", "bb")
    assert by_stop.up_to_end(tokens) == (tokens[:length], length is not None)
    reached = [number for number in range(1, len(tokens) + 1) if by_stop.are_reached(tokens[:number])]
    assert reached[:1] == ([] if length is None else [length])


def test_several_tokens_may_end_and_none() -> None:
    assert AnswerEnds(frozenset({7, 9})).up_to_end([4, 7, 9]) == ([4, 7], True)
    assert NO_ENDS.up_to_end([4, 9]) == ([4, 9], False)


def test_a_stop_text_is_not_in_the_answer_and_its_tokens_are_generated() -> None:
    found = ends("\ncd")
    assert found.up_to_end([1, 8, 2, 3, 4, 5]) == ([1, 8, 2, 3], True)
    assert found.text([1, 8, 2, 3]) == "b"
    assert ends().text([1, 8, 2, 3, 9, 1]) == "b\ncd"


def test_a_stop_text_longer_than_many_tokens_is_found_at_its_end() -> None:
    tokens = [0] * 50 + [1, 2, 3] * 7
    assert ends("bcd" * 7).up_to_end([*tokens, 0, 0])[0] == tokens


def test_where_ends_are_ignored_generation_goes_on_and_the_answer_ends_all_the_same() -> None:
    ignored = ends("\n", are_ignored=True)
    assert not any(ignored.are_reached([1, 9, 2, 8][:number]) for number in (1, 2, 3, 4))
    assert ignored.generated([1, 9, 2, 8]) == [1, 9, 2, 8]
    assert ends("\n").generated([1, 9, 2, 8]) == [1, 9]
    assert ignored.text([1, 9, 2]) == "b"
    assert [ignored.up_to_end(each)[1] for each in ([1, 9, 2], [1, 2])] == [True, False]


def words(token_ids: Sequence[int]) -> str:
    return "".join(("<think>", "hm ", "</think>", "red", "\n\n")[token] for token in token_ids)


PIECES = (b"<think>", b"hm ", b"</think>", b"red", b"\n\n", "\u3002".encode()[:1], "\u3002".encode()[1:], b"<answer>")


def of_bytes(token_ids: Sequence[int]) -> str:
    """Text of pieces of bytes, of which two make one full stop."""
    return b"".join(PIECES[token] for token in token_ids if token != EOS).decode(errors="replace")


@pytest.mark.parametrize("is_open", [False, True])
def test_the_first_end_is_where_generation_would_have_ended(is_open: bool) -> None:
    generator = random.Random(3)
    found = AnswerEnds(frozenset({EOS}), ("\n\n", "\u3002", "d\n"), of_bytes, is_thinking_open=is_open)
    for _ in range(400):
        tokens = generator.choices([*range(len(PIECES)), EOS], weights=[3, 9, 3, 9, 3, 3, 3, 1, 1], k=12)
        first = next((number for number in range(1, 13) if found.are_reached(tokens[:number])), None)
        assert found.up_to_end(tokens) == (tokens[:first], first is not None), tokens


@pytest.mark.parametrize("stop", [(), ("\n\n",), ("never",)])
def test_an_answer_four_times_as_long_costs_about_four_times_as_much(stop: tuple[str, ...]) -> None:
    def read(number: int) -> int:
        """Tokens that are turned into text for the end of an answer behind a thought with many stop texts."""
        count = 0

        def counting(token_ids: Sequence[int]) -> str:
            nonlocal count
            count += len(token_ids)
            return of_bytes(token_ids)

        tokens = [0, *([1, 4] * number), 2, *([3] * number), 4, 3]
        found = AnswerEnds(frozenset({EOS}), stop, counting).up_to_end(tokens)
        assert found == ((tokens[:-1], True) if stop == ("\n\n",) else (tokens, False))
        return count

    # A search in n tokens has a logarithm of n steps: two more for four times as many, of 12.
    assert read(4 * 1024) <= 4 * 1.25 * read(1024)


@pytest.mark.parametrize(
    ("tokens", "is_open", "thought", "answer"),
    [
        ([0, 1, 1, 2, 4, 3], False, 4, "red"),
        ([0, 2, 3], False, 2, "red"),
        ([1, 1, 2, 3], True, 3, "red"),
        ([1, 1], True, 2, ""),
        ([0, 1, 1], False, 3, ""),
        ([3, 3], False, 0, "redred"),
    ],
)
def test_thinking_is_counted_and_no_answer(tokens: list[int], is_open: bool, thought: int, answer: str) -> None:
    found = AnswerEnds(text_of=words, is_thinking_open=is_open)
    assert (found.thinking_tokens(tokens), found.answer(tokens)) == (thought, answer)


@pytest.mark.parametrize(("prompt", "is_open"), [([3, 0], True), ([0, 4], True), ([0, 1], False), ([], False)])
def test_a_prompt_opens_the_thinking_of_its_own_answer(prompt: list[int], is_open: bool) -> None:
    assert AnswerEnds(text_of=words).after(prompt).is_thinking_open == is_open
    assert NO_ENDS.after(prompt) is NO_ENDS


def test_no_stop_text_ends_thinking() -> None:
    found = AnswerEnds(stop=("\n\n",), text_of=words)
    assert found.up_to_end([0, 4, 2, 4, 3, 4, 3]) == ([0, 4, 2, 4, 3, 4], True)
    assert found.answer([0, 4, 2, 4, 3, 4]) == "red"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    found = AutoTokenizer.from_pretrained(folder)
    found.add_tokens(["<|im_start|>", "<|im_end|>", "<|channel|>", "<|message|>"], special_tokens=True)
    found.add_tokens(["<think>", "plain"])
    return found


def test_the_end_of_turn_is_the_special_token_behind_an_answer(tokenizer: Any) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert turn_end(tokenizer, CHATML) == (end,)
    parts = "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %} </s>{% endfor %}"
    assert turn_end(tokenizer, parts) == (tokenizer.eos_token_id,)
    assert turn_end(tokenizer, "{% for m in messages %}{{ m['content'] }}plain{% endfor %}") == ()
    assert turn_end(tokenizer, "{% for m in messages %}{{ m['content'] }}\n{% endfor %}") == ()
    assert turn_end(tokenizer, "{{ raise_exception('no') }}") == ()
    # Between the channels of one answer it ends nothing.
    tokenizer.add_tokens(["<|end|>"], special_tokens=True)
    assert turn_end(tokenizer, "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}") == ()


def test_every_source_counts_once_and_of_a_config_only_special_tokens(tokenizer: Any) -> None:
    end, own = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id
    found = eos_sources(GenerationConfig(eos_token_id=[7, own]), LlamaConfig(eos_token_id=2), tokenizer, CHATML, (end,))
    assert found.content() == {
        "generation_config": [7, own, end],
        "tokenizer": [own],
        "chat_template": [end],
    }
    assert found.token_ids == (7, own, end)
    special = eos_sources(None, LlamaConfig(eos_token_id=end), tokenizer, None)
    assert special.content() == {"config": [end], "tokenizer": [own]}
    assert eos_sources(None, LlamaConfig(eos_token_id=None), None, None).eos_token_id is None


@pytest.mark.parametrize(("text", "ends_itself"), [("ab", False), ("ab</s>", True), ("ab</s>\n", True), ("", False)])
def test_only_the_tokenizers_own_end_is_taken_off(tokenizer: Any, text: str, ends_itself: bool) -> None:
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    plain = tokenizer(text)["input_ids"]
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B", special_tokens=[("<s>", bos), ("</s>", eos)]
    )
    given = tokenizer(text)["input_ids"]
    assert given == [bos, *plain, eos]
    assert without_appended_eos(given, text, tokenizer) == (given if ends_itself else [bos, *plain])
    assert without_appended_eos([bos, *plain, 7], text, tokenizer) == [bos, *plain, 7]


def test_marks_of_thinking_stay_in_the_text_and_other_special_tokens_do_not(tokenizer: Any) -> None:
    text = "<|im_start|><|channel|>final<|message|>red<|im_end|></s>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text_reader(tokenizer)(ids) == "<|channel|>final<|message|>red"
    plain = tokenizer("<|im_start|><think>red</s>", add_special_tokens=False)["input_ids"]
    assert text_reader(tokenizer)(plain) == "<think>red"


def test_stop_texts_that_are_special_tokens_end_as_tokens(tokenizer: Any) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert split_stops(("Q:", "<|im_end|>", "<think>"), tokenizer) == (("Q:", "<think>"), (end,))
    assert split_stops((), None) == ((), ())
