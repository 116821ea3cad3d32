"""Reading several labels: which items, in which order."""

import random

from experiment_core_utils.tasks.datasets.reference_reading import ReferenceReading, make_questions
from tests.tasks.datasets.hand_made_scene import FOUR, item, plan


def test_questions_of_a_known_scene() -> None:
    found = {question.question: question for question in make_questions(FOUR, random.Random(0))}
    assert found["read all the text."].answer == "42 K7Q 908 WEB"
    assert found["read the text on all red shapes."].answer == "42 908"
    assert found["read the text on all circles."].answer == "42 WEB"
    assert found["read the text on all stars."].answer == "K7Q 908"
    # Of one colour or kind there must be two at least.
    assert not {"read the text on all blue shapes.", "read the text on all green shapes."} & set(found)
    pairs = [question for question in found.values() if question.question_type == "pair"]
    assert len(pairs) == 6
    label = {f"{each.colour} {each.kind}": each.label for each in FOUR.items}
    for pair in pairs:
        first, second = pair.question.removeprefix("read the text on the ").removesuffix(".").split(" and the ")
        assert pair.answer == f"{label[first]} {label[second]}"


def test_references_and_facts() -> None:
    (question,) = make_questions(plan(item("red", "star", "7A", 100, 100)), random.Random(0))
    assert (question.answer, question.references) == ("7A", ("7A", "7A"))
    two = plan(item("red", "star", "7A", 100, 100), item("red", "cross", "908", 500, 120))
    whole = make_questions(two, random.Random(0))[0]
    assert whole.references == ("7A 908", "7A, 908")
    assert whole.metadata["num_labels"] == 2 and whole.metadata["needs_text"] is True


def test_answers_fit_the_limit() -> None:
    # Seven labels of four characters, one token each, and the end of the text.
    assert ReferenceReading.max_new_tokens >= 7 * 4 + 1
