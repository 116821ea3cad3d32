"""Which option an output chooses, rule by rule, and Molmo's choice against its recorded ones."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.scoring.mc import mc, mc_molmo, select_mc_option
from tests.tasks.scoring.vectors import vectors

GASES = ["oxygen", "carbon dioxide", "water", "nitrogen"]
STATES = ["West Virginia", "Virginia", "New Hampshire", "Maine"]
BLOOD = ["A", "B", "AB", "O", "none of these"]
SOLID = ["a solid", "a liquid", "a gas"]
NINE = [f"option {number}" for number in range(9)]

# Where ours differs from Molmo's recorded score on purpose: (ours, why). A case that agrees again must leave the list.
DIFFERENT_FROM_MOLMO = {
    "letter_colon_text": (1.0, "names its letter first; Molmo's nearest letter is the first that the words contain"),
    "text_case": (1.0, "is an option's text"),
    "text_lower_article": (1.0, "is an option's text"),
    "substring_trap": (1.0, "is an option's text"),
    "options_letters_AB": (1.0, "is an option's text"),
    "unicode": (1.0, "a full-width letter is one"),
    "empty_gold_A": (0.0, "nothing is no answer"),
    "garbage_gold_A": (0.0, "garbage is no answer"),
    "letter_far": (1.0, "names its letter"),
    "cot_last": (1.0, "names its letter last"),
}


@pytest.mark.parametrize("row", vectors("mc_molmo"))
def test_molmo_vector(row: dict[str, Any]) -> None:
    assert mc_molmo(row["prediction"], row["options"], row["answer_idx"]) == row["expected"]


@pytest.mark.parametrize("row", vectors("mc_molmo"))
def test_agrees_with_molmo_or_is_listed(row: dict[str, Any]) -> None:
    expected, _ = DIFFERENT_FROM_MOLMO.get(row["case"], (row["expected"], ""))
    assert mc(row["prediction"], row["options"], row["answer_idx"]) == expected
    assert (expected != row["expected"]) == (row["case"] in DIFFERENT_FROM_MOLMO)


@pytest.mark.parametrize(
    ("prediction", "options", "expected"),
    [
        ("B", GASES, (1, "letter")),
        (" b\n", GASES, (1, "letter")),
        ("(b)", GASES, (1, "letter")),
        ("**C**", GASES, (2, "letter")),
        ("a.", GASES, (0, "letter")),
        ("E", GASES, (None, "unparsed")),
        ("Ｂ", GASES, (1, "letter")),
        ("B", BLOOD, (1, "letter")),
        ("O", BLOOD, (3, "option_text")),
        ("AB", BLOOD, (2, "option_text")),
        ("Carbon  Dioxide.", GASES, (1, "option_text")),
        ("A liquid", SOLID, (1, "option_text")),
        ("vitamin C", ["vitamin A", "vitamin B", "vitamin D", "vitamin C"], (3, "option_text")),
        ("Virginia", STATES, (1, "option_text")),
        ("same", ["same", "same"], (None, "unparsed")),
        ("B: carbon dioxide", GASES, (1, "leading_letter")),
        ("(C) because of D", GASES, (2, "leading_letter")),
        ("B) or C", GASES, (None, "unparsed")),
        ("D.C. is the capital", GASES, (None, "unparsed")),
        ("A liquid boils, so the answer is B", SOLID, (1, "answer_is")),
        ("The answer is A? No, the answer is (C).", GASES, (2, "answer_is")),
        ("Final Answer: D because of B", GASES, (3, "answer_is")),
        ("the answer is b.", GASES, (1, "answer_is")),
        ("the answer is a liquid", SOLID, (1, "option_text")),
        ("The answer is E", GASES, (None, "unparsed")),
        ("it takes in carbon dioxide (B) during photosynthesis", GASES, (1, "last_letter")),
        ("A is oxygen. So B", GASES, (1, "last_letter")),
        ("I choose A", GASES, (0, "last_letter")),
        ("A is right", GASES, (0, "last_letter")),
        ("A plant takes it in. A man does not.", GASES, (None, "unparsed")),
        ("Is it B or E", GASES, (1, "last_letter")),
        ("Plan B's end, X-ray C-3", GASES, (None, "unparsed")),
        ("i think b is right", GASES, (1, "last_letter")),
        ("I'm sorry, I can't see the image", NINE, (None, "unparsed")),
        ("I think it is unclear", NINE, (None, "unparsed")),
        ("I", NINE, (8, "letter")),
        ("2", GASES, (None, "unparsed")),
        ("carbn dioxide", GASES, (None, "unparsed")),
        ("", GASES, (None, "unparsed")),
        ("...", GASES, (None, "unparsed")),
    ],
)
def test_ladder(prediction: str, options: list[str], expected: tuple[int | None, str]) -> None:
    assert select_mc_option(prediction, options) == expected


def test_scores() -> None:
    assert mc("B", GASES, 1) == 1.0
    assert mc("B", GASES, 0) == 0.0
    assert mc("zzz", GASES, 0) == 0.0
    assert mc_molmo("zzz", GASES, 0) == 1.0  # why `mc` guesses nothing
    assert mc_molmo("dab", GASES, 0) == 1.0  # a, b and d are two edits away, c three: the first of the nearest


@pytest.mark.parametrize(("options", "answer_index"), [([], 0), (GASES, 4), (GASES, -1)])
@pytest.mark.parametrize("metric", [mc, mc_molmo])
def test_a_question_without_its_right_option_is_an_error(metric: Any, options: list[str], answer_index: int) -> None:
    with pytest.raises(SampleError, match="answer_index"):
        metric("A", options, answer_index)


@pytest.mark.parametrize("options", [[], ["x"] * 27])
def test_more_options_than_letters_is_an_error(options: list[str]) -> None:
    with pytest.raises(SampleError, match="1 to 26 options"):
        select_mc_option("A", options)


@given(st.text(), st.lists(st.text(max_size=6), min_size=1, max_size=26))
def test_wild_outputs_choose_an_option_or_none(prediction: str, options: list[str]) -> None:
    index, status = select_mc_option(prediction, options)
    assert (index is None) == (status == "unparsed")
    assert index is None or 0 <= index < len(options)
    assert sum(mc(prediction, options, right) for right in range(len(options))) == (index is not None)
    assert sum(mc_molmo(prediction, options, right) for right in range(len(options))) == 1.0


@given(st.sampled_from("ABCD"), st.sampled_from(["{}", "({})", "{}.", "Answer: {}", "it must be {}", "{}: since"]))
def test_a_named_letter_is_found(letter: str, template: str) -> None:
    assert select_mc_option(template.format(letter), GASES)[0] == "ABCD".index(letter)


ECHO = "A: red\nB: green\nC: blue"


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        (ECHO, (None, "unparsed")),
        ("(A) red\n(B) green", (None, "unparsed")),
        (f"{ECHO}\nAnswer: B", (1, "answer_is")),
        (f"{ECHO}\nC", (2, "last_letter")),
        ("A: red", (0, "leading_letter")),
        ("B: green\nbecause it is green", (1, "leading_letter")),
    ],
)
def test_a_repeated_list_of_options_chooses_none(prediction: str, expected: tuple[int | None, str]) -> None:
    assert select_mc_option(prediction, ["red", "green", "blue"]) == expected
