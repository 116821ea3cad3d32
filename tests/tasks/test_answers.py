import pytest

from experiment_core_utils.tasks.answers import (
    answer_in,
    before_stop,
    is_in_thinking,
    is_thinking_opened_by,
    thinking_pair,
    thinking_spans,
    unwrapped,
    up_to_stop,
)

HARMONY = "<|channel|>analysis<|message|>hm blue<|end|><|start|>assistant<|channel|>final<|message|>red"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("red", "red"),
        (" <b>red</b> ", " <b>red</b> "),  # nothing is thought, and nothing changed
        ("<think>hm blue</think>red", "red"),
        ("<think>\n\n</think>\n\nParis", "Paris"),
        ("hm blue</think>\n\nred", "red"),
        ("a</think>b</think>red", "red"),
        ("<think>hm blue", ""),
        ("<think>", ""),
        ("<think>a</think><think>b</think> red", "red"),
        ("<think>a</think>red\n<think>b", "red"),
        ("<Think>hm</THINK>red", "red"),
        ("<thinking>hm</thinking>red", "red"),
        ("<reasoning>a <think> tag</reasoning>red", "red"),
        ("<seed:think>hm</seed:think>red", "red"),
        ("[THINK]hm[/THINK]red", "red"),
        ("◁think▷hm◁/think▷red", "red"),
        ("<|START_THINKING|>hm<|END_THINKING|>red", "red"),
        ("<|inner_prefix|>hm<|inner_suffix|>red", "red"),
        ("<mm:think>hm</mm:think>red", "red"),
        ("<longcat_think>hm</longcat_think>red", "red"),
        ("<|begin_of_thought|>hm<|end_of_thought|>red", "red"),
        ("<start_working_out>hm<end_working_out>red", "red"),
        ("<|think_start|>hm<|think_end|>red", "red"),
        ("<｜begin▁of▁thinking｜>hm<｜end▁of▁thinking｜>red", "red"),
        ("<|channel>thought\nhm<channel|>red", "red"),
        ("<rethinking>red", "<rethinking>red"),
        ("<think>hm</think><answer> B </answer>", "<answer> B </answer>"),
        ("<answer>B</answer>", "<answer>B</answer>"),
        (HARMONY, "red"),
        (HARMONY + "<|end|><|start|>assistant<|channel|>analysis<|message|>more", "red"),
        ("<|channel|>final<|message|>red", "red"),
        ("<|channel|>analysis<|message|>hm blue<|end|>", ""),
        ("<|channel|>commentary to=f <|message|>{}", ""),
        ("analysisWe need a colour.assistantfinalred", "red"),
    ],
)
def test_the_answer_is_what_is_not_thinking(text: str, answer: str) -> None:
    assert answer_in(text) == answer


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<answer> B </answer>", "B"),
        ("<answer>B", "B"),
        ("<Answer>B</ANSWER>\n", "B"),
        ("It is red.\n<answer>red</answer> Done.", "red"),
        ("<answer>red</answer> no, wait <answer>blue</answer>", "blue"),
        ("<answer>red</answer><answer> </answer>", "red"),
        ("<answer></answer>", ""),
        ("red<answer></answer>", "red"),
        (" <b>red</b> ", " <b>red</b> "),
        ("", ""),
    ],
)
def test_an_answer_in_tags_is_what_is_in_the_last_of_them(answer: str, expected: str) -> None:
    assert unwrapped(answer) == expected


@pytest.mark.parametrize(
    ("text", "answer"),
    [("hm blue", ""), ("", ""), ("hm</think>red", "red"), ("<think>hm</think>red", "red")],
)
def test_a_prompt_may_open_the_thinking(text: str, answer: str) -> None:
    assert answer_in(text, is_open=True) == answer


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("What does <think> mean?\nAnswer:", False),
        ("[/INST][THINK]", True),
        ("", False),
    ],
)
def test_whether_a_prompt_opens_thinking(prompt: str, opens: bool) -> None:
    assert is_thinking_opened_by(prompt) == opens


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("green\n\nQ: how many?\nA: 6\n\nQ:", "green"),
        ("green Q: x User: y", "green "),
        ("User: Q:", ""),
        ("green\nUser", None),
        ("", None),
        ("<think>a\n\nb Q:</think>\n\ngreen\n\nmore", "<think>a\n\nb Q:</think>\n\ngreen"),
        ("<think>a\n\nb", None),
        ("a\n\nb</think>c\n\nd", "a\n\nb</think>c"),
    ],
)
def test_what_comes_before_the_first_stop_text(text: str, before: str | None) -> None:
    stop = ("\n\n", "Q:", "User:")
    assert before_stop(text, stop) == before
    assert up_to_stop(text, stop) == (text if before is None else before)


def test_without_stop_texts_nothing_is_cut() -> None:
    assert before_stop("a\n\nb", ()) is None


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("", False, False), ("", True, True), ("hm", False, False), ("hm", True, True), ("<think>", False, True),
        ("<think>hm", False, True), ("<think>hm</think>", False, False), ("hm</think>", True, False),
        ("hm</think> red", True, False), ("red <think>", False, False), ("<think>a</think>b<think>c", False, True),
    ],
)  # fmt: skip
def test_whether_a_text_so_far_ends_inside_thinking(text: str, is_open: bool, expected: bool) -> None:
    assert is_in_thinking(text, is_open) == expected


@pytest.mark.parametrize(
    ("marks", "pair"),
    [
        (["</think>", "<think>"], ("<think>", "</think>")),
        (["<seed:think>", "<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>", "</seed:think>"],
         ("<seed:think>", "</seed:think>")),
        (["<|END_THINKING|>", "<|START_THINKING|>"], ("<|START_THINKING|>", "<|END_THINKING|>")),
        (["<|inner_prefix|>", "<|inner_suffix|>"], ("<|inner_prefix|>", "<|inner_suffix|>")),
        (["[THINK]", "[/THINK]"], ("[THINK]", "[/THINK]")),
        (["<|channel>", "<channel|>"], ("<|channel>", "<channel|>")),
        (["<think>"], None), (["<think>", "</reason>"], None), ([], None),
    ],
)  # fmt: skip
def test_marks_that_begin_and_end_thinking_are_found_as_a_pair(marks: list[str], pair: tuple[str, str] | None) -> None:
    assert thinking_pair(marks) == pair


def test_spans_of_thinking_are_in_order_and_apart() -> None:
    assert thinking_spans("<think>a</think>b<think>c") == [(0, 16), (17, 25)]
    assert thinking_spans("ab</think>c") == [(0, 10)]
    assert thinking_spans("abc", is_open=True) == [(0, 3)]
