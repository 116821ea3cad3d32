"""Prompt templates: Molmo's text to the letter, and templates that cannot be filled."""

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.tasks.datasets.questions import (
    CHOICE_TEMPLATE,
    OPEN_TEMPLATE,
    check_template,
    fill,
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
