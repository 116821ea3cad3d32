"""Questions about generated scenes that are answered by a number, scored by exact match.

`simple` questions count one kind or colour; `complex` ones combine or exclude several, compare two counts, or need
the text; `arithmetic` ones add up the digits of a number in the picture, which has to be read first.
"""

import random
from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from types import MappingProxyType
from typing import Any

from experiment_core_utils.tasks.datasets.reference_scenes import COLOURS, KINDS, Item, Scene, ScenePlan
from experiment_core_utils.tasks.datasets.reference_task import (
    GeneratedTask,
    QuestionAnswer,
    draw_by_type,
    facts_of,
    plural,
)

TYPE_WEIGHTS = MappingProxyType({"simple": 0.25, "complex": 0.4, "arithmetic": 0.35})
_MOST_COMBINATIONS = 6


def _counted(question: str, answer: int, kind: str, family: str, *, needs_text: bool = False) -> QuestionAnswer:
    return _with_number(question, answer, kind, facts_of(family, None, needs_text=needs_text))


def _with_number(question: str, answer: int, kind: str, facts: Mapping[str, Any]) -> QuestionAnswer:
    return QuestionAnswer(question, str(answer), kind, facts, references=(str(answer),))


def _some(values: list[tuple[str, str]], rng: random.Random) -> list[tuple[str, str]]:
    return rng.sample(values, min(_MOST_COMBINATIONS, len(values)))


def digits_question(item: Item) -> str:
    """Asks for the sum of the digits on an item."""
    return f"what is the sum of the digits on the {item.colour} {item.kind}?"


def digits_sum(item: Item) -> int:
    """The sum of the digits of a label that is a number."""
    return sum(map(int, item.label))


def has_number(item: Item) -> bool:
    """Whether the label is digits only."""
    return item.label.isdecimal()


def make_questions(scene: Scene | ScenePlan, rng: random.Random) -> list[QuestionAnswer]:
    """Every question that the scene offers of each type; of the combinations, a few of each form."""
    kinds = Counter(item.kind for item in scene.items)
    colours = Counter(item.colour for item in scene.items)
    return [
        *_simple(kinds, colours, rng),
        *_complex(kinds, colours, rng),
        _counted(
            "how many shapes have a number as text?",
            sum(map(has_number, scene.items)),
            "complex",
            "number_labels",
            needs_text=True,
        ),
        *(
            _with_number(
                digits_question(item), digits_sum(item), "arithmetic", facts_of("digits_sum", item, needs_text=True)
            )
            for item in scene.items
            if has_number(item)
        ),
    ]


def _simple(kinds: Mapping[str, int], colours: Mapping[str, int], rng: random.Random) -> list[QuestionAnswer]:
    absent_kind = [kind for kind in KINDS if kind not in kinds]
    absent_colour = [colour for colour in COLOURS if colour not in colours]
    requested_kinds = [*kinds, *rng.sample(absent_kind, min(1, len(absent_kind)))]
    requested_colours = [*colours, *rng.sample(absent_colour, min(1, len(absent_colour)))]
    return [
        *(
            _counted(f"how many {plural(kind)} are there?", kinds.get(kind, 0), "simple", "count_kind")
            for kind in requested_kinds
        ),
        *(
            _counted(f"how many {colour} shapes are there?", colours.get(colour, 0), "simple", "count_colour")
            for colour in requested_colours
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

    @classmethod
    def draw_questions(cls, scene: Scene | ScenePlan, rng: random.Random, count: int) -> list[QuestionAnswer]:
        """Types by `TYPE_WEIGHTS`, answers evenly within a type."""
        return draw_by_type(make_questions(scene, rng), TYPE_WEIGHTS, rng, count, even_answers=True)
