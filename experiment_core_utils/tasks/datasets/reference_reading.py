"""Questions about generated scenes whose answer is the text of several items, scored by ANLS.

Long answers are partly right more often than not, which is what ANLS is made for. Every question needs legible text.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from types import MappingProxyType

from experiment_core_utils.tasks.datasets.reference_scenes import COLOURS, KINDS, Item, SceneContent
from experiment_core_utils.tasks.datasets.reference_task import (
    GeneratedTask,
    QuestionAnswer,
    plural,
    reading_order,
    scene_question,
)

TYPE_WEIGHTS = MappingProxyType({"all": 0.2, "colour": 0.25, "kind": 0.25, "pair": 0.3})
_MOST_PAIRS = 6


def _about(question: str, items: Sequence[Item], kind: str) -> QuestionAnswer:
    answer = " ".join(item.label for item in items)
    smallest = min(items, key=lambda item: item.h_rel)
    references = (answer, answer.replace(" ", ", "))
    made = scene_question(smallest, question, answer, kind, text=True, references=references)
    return replace(made, metadata={**made.metadata, "label": None, "num_labels": len(items)})


def make_questions(scene: SceneContent, rng: random.Random) -> list[QuestionAnswer]:
    """Every question about all items of the scene, of one colour or of one kind, and some about two items.

    Items are read row by row, except where the question itself names them in another order. `text_height_px` and
    `h_rel` are those of the smallest text that is requested.
    """
    ordered = reading_order(scene.items)
    questions = [_about("read all the text.", ordered, "all")]
    for colour in COLOURS:
        items = [item for item in ordered if item.colour == colour]
        if len(items) > 1:
            questions.append(_about(f"read the text on all {colour} shapes.", items, "colour"))
    for kind in KINDS:
        items = [item for item in ordered if item.kind == kind]
        if len(items) > 1:
            questions.append(_about(f"read the text on all {plural(kind)}.", items, "kind"))
    pairs = list(permutations(ordered, 2))
    for first, second in rng.sample(pairs, min(_MOST_PAIRS, len(pairs))):
        questions.append(_about(f"read the text on the {first.name} and the {second.name}.", (first, second), "pair"))
    return questions


class ReferenceReading(GeneratedTask):
    """Two questions about each scene, each answered by two or more labels; the references give them with spaces and
    with commas between them."""

    name = "reference_reading"
    metric = "ansl_em"
    max_new_tokens = 40
    questions_per_image = 2
    question_types = tuple(TYPE_WEIGHTS)
    type_weights = TYPE_WEIGHTS
    make_questions = staticmethod(make_questions)
