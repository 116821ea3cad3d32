"""Counts, combinations of counts and sums of digits on a scene that can be counted by hand."""

import random

import pytest

from experiment_core_utils.tasks.datasets.reference_counting import digits_sum, has_number, make_questions
from tests.tasks.datasets.hand_made_scene import FOUR, item


@pytest.mark.parametrize(
    ("question", "answer", "kind"),
    [
        ("how many circles are there?", "2", "simple"),
        ("how many red shapes are there?", "2", "simple"),
        ("how many shapes are not red?", "2", "complex"),
        ("how many shapes are not blue?", "3", "complex"),
        ("how many shapes are red or green?", "3", "complex"),
        ("how many circles and stars are there?", "4", "complex"),
        ("how many more circles than stars are there?", "0", "complex"),
        ("how many shapes have a number as text?", "2", "complex"),
        ("what is the sum of the digits on the red circle?", "6", "arithmetic"),  # 4 + 2
        ("what is the sum of the digits on the red star?", "17", "arithmetic"),  # 9 + 0 + 8
    ],
)
def test_questions_of_a_known_scene(question: str, answer: str, kind: str) -> None:
    found = {each.question: each for each in make_questions(FOUR, random.Random(0))}
    assert (found[question].answer, found[question].question_type) == (answer, kind)
    assert found[question].references == (answer,)


def test_one_absent_kind_and_colour_is_in_the_questions() -> None:
    zeros = [each for each in make_questions(FOUR, random.Random(3)) if each.question_type == "simple"]
    assert sum(each.answer == "0" for each in zeros) == 2
    assert len(zeros) == 2 + 1 + 3 + 1


def test_only_numbers_are_added_up() -> None:
    assert has_number(item("red", "star", "0990", 0, 0)) and digits_sum(item("red", "star", "0990", 0, 0)) == 18
    assert not has_number(item("red", "star", "K7", 0, 0))
    questions = [each.question for each in make_questions(FOUR, random.Random(0)) if each.question_type == "arithmetic"]
    assert len(questions) == 2
