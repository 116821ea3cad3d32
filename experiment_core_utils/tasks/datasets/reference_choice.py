"""Multiple-choice questions about generated scenes.

`reading` and `arithmetic` need legible text, `presence` and `place` do not. Wrong options are close to the right one:
a label with one other character, a neighbouring number, a colour and a kind that both occur but not together.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from experiment_core_utils.tasks.datasets.reference_counting import digits_question, digits_sum, has_number
from experiment_core_utils.tasks.datasets.reference_scenes import DIGITS, LETTERS, Item, SceneContent
from experiment_core_utils.tasks.datasets.reference_task import (
    LETTERS_OF_OPTIONS,
    GeneratedTask,
    QuestionAnswer,
    absent_names,
    scene_question,
)
from experiment_core_utils.tasks.datasets.reference_vqa import clear_places

TYPE_WEIGHTS = MappingProxyType({"reading": 0.35, "presence": 0.2, "place": 0.2, "arithmetic": 0.25})
OPTIONS = 4
_LARGEST_STEP = 3  # between the numbers of an arithmetic question


def _choice(
    question: str, right: str, wrong: Sequence[str], kind: str, item: Item, rng: random.Random, *, text: bool
) -> QuestionAnswer:
    options = [right, *wrong]
    rng.shuffle(options)
    index = options.index(right)
    answer = LETTERS_OF_OPTIONS[index]
    made = scene_question(item, question, answer, kind, text=text, references=(right,))
    return replace(made, options=tuple(options), answer_index=index)


def make_questions(scene: SceneContent, rng: random.Random) -> list[QuestionAnswer]:
    """One question of reading and of arithmetic for each item that allows it, of place for each clear place, and one
    of presence for each item."""
    questions = [_reading(item, rng) for item in scene.items]
    questions += [_arithmetic(item, rng) for item in scene.items if has_number(item)]
    for place, item in clear_places(scene).items():
        others = [other.name for other in scene.items if other is not item]
        wrong = rng.sample(others, min(OPTIONS - 1, len(others)))
        questions.append(_choice(f"which shape is the {place}?", item.name, wrong, "place", item, rng, text=False))
    return questions + [_presence(item, scene.items, rng) for item in scene.items]


def _reading(item: Item, rng: random.Random) -> QuestionAnswer:
    wrong = lookalikes(item.label, rng)
    return _choice(f"what is written on the {item.name}?", item.label, wrong, "reading", item, rng, text=True)


def lookalikes(label: str, rng: random.Random) -> list[str]:
    """Three labels that differ in one of two places, in the other, and in both, digit for digit, letter for letter.

    With the label itself every combination is there once, so the options alone do not show which one is right.
    """
    first, second = rng.sample(range(len(label)), 2)
    one, other = _other_character(label, first, rng), _other_character(label, second, rng)
    both = one[:second] + other[second] + one[second + 1 :]
    return [one, other, both]


def _other_character(label: str, at: int, rng: random.Random) -> str:
    sort = DIGITS if label[at].isdecimal() else LETTERS
    return label[:at] + rng.choice([character for character in sort if character != label[at]]) + label[at + 1 :]


def _arithmetic(item: Item, rng: random.Random) -> QuestionAnswer:
    """Four equally spaced numbers; the right one has each rank equally often, as far as none is negative."""
    right = digits_sum(item)
    step = rng.randint(1, _LARGEST_STEP)
    rank = rng.randrange(min(OPTIONS, right // step + 1))
    wrong = [str(right + (place - rank) * step) for place in range(OPTIONS) if place != rank]
    return _choice(digits_question(item), str(right), wrong, "arithmetic", item, rng, text=True)


def _presence(item: Item, items: Sequence[Item], rng: random.Random) -> QuestionAnswer:
    question, absent = "which of these is in this picture?", absent_names(items, rng)
    return _choice(question, item.name, absent[: OPTIONS - 1], "presence", item, rng, text=False)


class ReferenceChoice(GeneratedTask):
    """Two questions about each scene; the prompt shows the options, the answer is a letter."""

    name = "reference_choice"
    metric = "mc"
    required_fields = ("question", "options")
    max_new_tokens = 16
    questions_per_image = 2
    question_types = tuple(TYPE_WEIGHTS)
    type_weights = TYPE_WEIGHTS
    make_questions = staticmethod(make_questions)
