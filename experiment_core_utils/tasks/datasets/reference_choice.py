"""Multiple-choice questions about generated scenes.

`reading` and `arithmetic` need legible text, `presence` and `place` do not. Wrong options are close to the right one:
a label with one other character, a neighbouring number, a colour and a kind that both occur but not together.
"""

import random
from collections.abc import Sequence
from types import MappingProxyType

from experiment_core_utils.tasks.datasets.reference_counting import digits_question, digits_sum, has_number
from experiment_core_utils.tasks.datasets.reference_scenes import (
    COLOURS,
    DIGITS,
    KINDS,
    LETTERS,
    Item,
    Scene,
    ScenePlan,
)
from experiment_core_utils.tasks.datasets.reference_task import (
    LETTERS_OF_OPTIONS,
    GeneratedTask,
    QuestionAnswer,
    facts_of,
)
from experiment_core_utils.tasks.datasets.reference_vqa import clear_places

TYPE_WEIGHTS = MappingProxyType({"reading": 0.35, "presence": 0.2, "place": 0.2, "arithmetic": 0.25})
OPTIONS = 4
_LARGEST_STEP = 3  # between the numbers of an arithmetic question


def _choice(
    question: str, right: str, wrong: Sequence[str], kind: str, item: Item | None, rng: random.Random, *, text: bool
) -> QuestionAnswer:
    options = [right, *wrong]
    rng.shuffle(options)
    index = options.index(right)
    facts = facts_of(kind, item, needs_text=text)
    return QuestionAnswer(question, LETTERS_OF_OPTIONS[index], kind, facts, (right,), tuple(options), index)


def _name(item: Item) -> str:
    return f"{item.colour} {item.kind}"


def make_questions(scene: Scene | ScenePlan, rng: random.Random) -> list[QuestionAnswer]:
    """One question of reading and of arithmetic for each item that allows it, of place for each clear place, and one
    of presence for each item."""
    questions = [_reading(item, rng) for item in scene.items]
    questions += [_arithmetic(item, rng) for item in scene.items if has_number(item)]
    for place, item in clear_places(scene).items():
        others = [_name(other) for other in scene.items if other is not item]
        wrong = rng.sample(others, min(OPTIONS - 1, len(others)))
        questions.append(_choice(f"which shape is the {place}?", _name(item), wrong, "place", item, rng, text=False))
    return questions + [_presence(item, scene.items, rng) for item in scene.items]


def _reading(item: Item, rng: random.Random) -> QuestionAnswer:
    wrong = lookalikes(item.label, rng)
    return _choice(f"what is written on the {_name(item)}?", item.label, wrong, "reading", item, rng, text=True)


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
    present = {_name(each) for each in items}
    colours, kinds = {each.colour for each in items}, {each.kind for each in items}
    absent = [f"{colour} {kind}" for colour in COLOURS for kind in KINDS if f"{colour} {kind}" not in present]
    rng.shuffle(absent)
    # Hard ones first: both words occur, then one of them; the sort keeps the shuffled order among equals.
    absent.sort(key=lambda name: -((name.split()[0] in colours) + (name.split()[1] in kinds)))
    question = "which of these is in this picture?"
    return _choice(question, _name(item), absent[: OPTIONS - 1], "presence", item, rng, text=False)


class ReferenceChoice(GeneratedTask):
    """Two questions about each scene; the prompt shows the options, the answer is a letter."""

    name = "reference_choice"
    metric = "mc"
    max_new_tokens = 16
    questions_per_image = 2
    question_types = tuple(TYPE_WEIGHTS)
    type_weights = TYPE_WEIGHTS
    make_questions = staticmethod(make_questions)
