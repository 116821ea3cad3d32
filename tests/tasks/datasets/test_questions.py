"""Prompt templates: Molmo's text to the letter, and templates that cannot be filled."""

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.tasks.datasets.questions import (
    CHOICE_TEMPLATE,
    OPEN_TEMPLATE,
    check_template,
    fill,
    is_list_literal,
    literal_list,
    options_block,
)


def test_molmos_prompts_to_the_letter() -> None:
    assert fill(OPEN_TEMPLATE, "vqa2", "What is {this}?", ()) == " User: vqa2: What is {this}? Assistant:"
    assert (
        fill(CHOICE_TEMPLATE, "science_qa", "Which?", ("one", "{two}"))
        == " User: science_qa: Which?\nA: one\nB: {two}\n Assistant:"
    )


def test_a_template_names_known_fields_only() -> None:
    assert check_template("{question} {{x}}", ("question",)) == "{question} {{x}}"
    for template in ("{question} {hint}", "{question!r}", "{question:>9}", "{question.__class__}", "{}", "{0}"):
        with pytest.raises(ConfigurationError, match=r"plain \{question\}, \{style\}, \{options\} are known"):
            check_template(template, ())
    with pytest.raises(ConfigurationError, match="malformed"):
        check_template("{question", ())
    with pytest.raises(ConfigurationError, match=r"leaves out \{options\}"):
        check_template("{question}", ("question", "options"))


def test_there_are_26_letters() -> None:
    assert options_block(["x"] * 26).endswith("Z: x\n")
    with pytest.raises(SampleError, match="27 options"):
        options_block(["x"] * 27)


def test_a_template_is_utf_8() -> None:
    # What Python makes of an argument that is not.
    with pytest.raises(ConfigurationError, match="is not valid UTF-8; write it in UTF-8"):
        check_template("{question} \udcff", ("question",))


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("['red', 'blue']", ["red", "blue"]), ("['red' 'crimson']", ["red", "crimson"]), ("['red'\n 'crimson']", ["red",
         "crimson"]), ('["it\'s" \'x\']', ["it's", "x"]), ("['a, b' 'c]']", ["a, b", "c]"]), ("[1 2 3]", [1, 2, 3]),
        ("[-1 2.5 -3.]", [-1, 2.5, -3.0]), ("[1e-3 2]", [0.001, 2]), ("array(['a', 'b'], dtype=object)", ["a", "b"]),
        ("array(['a', 'b'], dtype='<U3')", ["a", "b"]), ("[np.str_('a'), np.str_('b (c)')]", ["a", "b (c)"]),
        ("[np.float64(1.5) np.int64(2)]", [1.5, 2]), ("('x', 'y')", ["x", "y"]), ("[]", []), ("['']", [""]),
    ],
)  # fmt: skip
def test_lists_as_python_and_numpy_write_them(text: str, entries: list[object]) -> None:
    assert is_list_literal(text) and literal_list(text, "answers") == entries


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("['a', 'b' 'c']", "a list with a comma missing between 'b' and 'c'"),
        # A doubled quote, which is one text in SQL, and two in Python.
        ("['it''s', 'b']", "a comma missing between 'it' and 's'"),
        ("['a''b']", "a comma missing between 'a' and 'b'"),
        ("[['a'] ['b']]", "answers is not a list"),
        ("[['a'], ['b']]", "contains ['a'], neither a text nor a number"),
        ("['a' nan]", "answers is not a list"),
        ("['a' ... 'b']", "answers is not a list"),
        ("[b'a']", "neither a text nor a number"),
        ("[0, 1)", "answers is not a list"),
        ("[open('x')]", "answers is not a list"),
    ],
)
def test_what_is_no_list_of_texts_or_numbers_is_refused(text: str, words: str) -> None:
    with pytest.raises(SampleError) as caught:
        literal_list(text, "answers")
    assert words in str(caught.value)


def test_a_text_in_brackets_is_no_list() -> None:
    assert not any(map(is_list_literal, ("(a) red", "(1, 2)", "{1, 2}", "red [sic]", "array of lamps")))
