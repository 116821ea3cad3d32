"""Questions about generated scenes that are answered by a number, scored by exact match.

`simple` questions count one kind or colour; `complex` ones combine or exclude several, compare two counts, or need
the text; `arithmetic` ones add up the digits of a number in the picture, which has to be read first.
"""

import random
from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from types import MappingProxyType

from experiment_core_utils.tasks.datasets.reference_scenes import Item, SceneContent
from experiment_core_utils.tasks.datasets.reference_task import (
    GeneratedTask,
    QuestionAnswer,
    counts_of_each,
    plural,
    scene_question,
)

TYPE_WEIGHTS = MappingProxyType({"simple": 0.25, "complex": 0.4, "arithmetic": 0.35})
_MOST_COMBINATIONS = 6


def _counted(
    question: str, answer: int, kind: str, family: str, item: Item | None = None, *, text: bool = False
) -> QuestionAnswer:
    return scene_question(item, question, str(answer), kind, family, text=text, references=(str(answer),))


def _some(values: list[tuple[str, str]], rng: random.Random) -> list[tuple[str, str]]:
    return rng.sample(values, min(_MOST_COMBINATIONS, len(values)))


def digits_question(item: Item) -> str:
    """Asks for the sum of the digits on an item."""
    return f"what is the sum of the digits on the {item.name}?"


def digits_sum(item: Item) -> int:
    """The sum of the digits of a label that is a number."""
    return sum(map(int, item.label))


def has_number(item: Item) -> bool:
    """Whether the label is digits only."""
    return item.label.isdecimal()


def make_questions(scene: SceneContent, rng: random.Random) -> list[QuestionAnswer]:
    """Every question that the scene offers of each type; of the combinations, a few of each form."""
    kinds = Counter(item.kind for item in scene.items)
    colours = Counter(item.colour for item in scene.items)
    num_labels = sum(map(has_number, scene.items))
    return [
        *(
            _counted(question, number, "simple", family)
            for question, number, family in counts_of_each(scene.items, rng)
        ),
        *_complex(kinds, colours, rng),
        _counted("how many shapes have a number as text?", num_labels, "complex", "number_labels", text=True),
        *(
            _counted(digits_question(item), digits_sum(item), "arithmetic", "digits_sum", item, text=True)
            for item in scene.items
            if has_number(item)
        ),
    ]


def _complex(kinds: Mapping[str, int], colours: Mapping[str, int], rng: random.Random) -> list[QuestionAnswer]:
    total = sum(kinds.values())
    questions = [
        _counted(f"how many shapes are not {colour}?", total - number, "complex", "not_colour")
        for colour, number in colours.items()
    ]
    for one, other in _some(list(combinations(colours, 2)), rng):
        question = f"how many shapes are {one} or {other}?"
        questions.append(_counted(question, colours[one] + colours[other], "complex", "either_colour"))
    for one, other in _some(list(combinations(kinds, 2)), rng):
        question = f"how many {plural(one)} and {plural(other)} are there?"
        questions.append(_counted(question, kinds[one] + kinds[other], "complex", "both_kinds"))
        more, less = sorted((one, other), key=lambda kind: -kinds[kind])
        question = f"how many more {plural(more)} than {plural(less)} are there?"
        questions.append(_counted(question, kinds[more] - kinds[less], "complex", "difference"))
    return questions


class ReferenceCounting(GeneratedTask):
    """Two questions about each scene with one reference answer each, in digits."""

    name = "reference_counting"
    metric = "em"
    max_new_tokens = 16
    questions_per_image = 2
    question_types = tuple(TYPE_WEIGHTS)
    type_weights = TYPE_WEIGHTS
    even_answers = True
    make_questions = staticmethod(make_questions)
