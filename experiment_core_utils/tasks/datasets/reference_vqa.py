"""Questions about generated scenes with ten reference answers, scored by VQA accuracy.

The task asks five types of question: `reading` a label, the `colour` or the `shape` of an item, a `count`, and
`yes_no`. Only reading, and colour and shape by label, need legible text; the others also work on a coarse
picture, which is what makes the effect of more image crops visible by type.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, get_args

from experiment_core_utils.tasks.datasets.reference_scenes import COLOURS, KINDS, Item, SceneContent
from experiment_core_utils.tasks.datasets.reference_task import (
    GeneratedTask,
    QuestionAnswer,
    absent_names,
    counts_of_each,
    scene_question,
    with_article,
)

QuestionType = Literal["reading", "colour", "shape", "count", "yes_no"]
QUESTION_TYPES: tuple[QuestionType, ...] = get_args(QuestionType)
# Share of each type in the task.
TYPE_WEIGHTS: MappingProxyType[QuestionType, float] = MappingProxyType(
    {"reading": 0.50, "colour": 0.15, "shape": 0.10, "count": 0.12, "yes_no": 0.13}
)
QUESTIONS_PER_IMAGE = 4

# Within a type, the fraction of each way of asking; families that a scene does not offer leave theirs to the others.
_FAMILY_WEIGHTS: MappingProxyType[str, float] = MappingProxyType(
    {
        "reading_by_colour_and_kind": 0.8,
        "reading_by_place": 0.2,
        "colour_by_text": 0.6,
        "colour_by_kind": 0.4,
        "shape_by_text": 1.0,
        "count_kind": 0.4,
        "count_colour": 0.35,
        "count_all": 0.25,
        "yes": 0.5,
        "no": 0.5,
    }
)
_CLEAR_PLACE = 0.08  # of the canvas side: by how much an item must lead to be called the leftmost, topmost, ...
_REFERENCES = 10
_MIN_CANONICAL = 7
_NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


# --- questions about one scene --------------------------------------------------------------------------------------


def make_questions(scene: SceneContent, rng: random.Random) -> list[QuestionAnswer]:
    """Every question that `scene` allows, in shuffled order.

    There are as many yes_no questions answered "no" as "yes". The "no" ones ask for a colour and a kind that both
    occur, but not together, as long as there are such pairs. Count questions ask for what occurs, and for one kind
    and one colour that do not (answer "0") where there are any.
    """
    questions = [
        *_reading_questions(scene),
        *_colour_questions(scene),
        *_shape_questions(scene),
        *_count_questions(scene, rng),
        *_yes_no_questions(scene, rng),
    ]
    rng.shuffle(questions)
    return questions


def _reading_questions(scene: SceneContent) -> list[QuestionAnswer]:
    named = [
        *((item.name, "reading_by_colour_and_kind", item) for item in scene.items),
        *((f"{place} shape", "reading_by_place", item) for place, item in clear_places(scene).items()),
    ]
    return [
        scene_question(item, f"what is written on the {name}?", item.label, "reading", family, text=True)
        for name, family, item in named
    ]


def clear_places(scene: SceneContent) -> Mapping[str, Item]:
    """leftmost, rightmost, topmost, bottommost: those whose shape leads all others by a clear margin."""
    axes: dict[str, tuple[Callable[[Item], float], int]] = {
        "leftmost": (lambda item: item.centre[0], scene.width),
        "rightmost": (lambda item: -item.centre[0], scene.width),
        "topmost": (lambda item: item.centre[1], scene.height),
        "bottommost": (lambda item: -item.centre[1], scene.height),
    }
    found: dict[str, Item] = {}
    if len(scene.items) < 2:
        return found
    for place, (position, side) in axes.items():
        first, second = sorted(scene.items, key=position)[:2]
        if position(second) - position(first) >= _CLEAR_PLACE * side:
            found[place] = first
    return found


def _colour_questions(scene: SceneContent) -> list[QuestionAnswer]:
    kinds = Counter(item.kind for item in scene.items)
    named = [
        *((f"shape with the text {item.label}", "colour_by_text", item, True) for item in scene.items),
        *((item.kind, "colour_by_kind", item, False) for item in scene.items if kinds[item.kind] == 1),
    ]
    return [
        scene_question(item, f"which colour is the {name}?", item.colour, "colour", family, text=text)
        for name, family, item, text in named
    ]


def _shape_questions(scene: SceneContent) -> list[QuestionAnswer]:
    return [
        scene_question(item, f"which shape has the text {item.label}?", item.kind, "shape", "shape_by_text", text=True)
        for item in scene.items
    ]


def _count_questions(scene: SceneContent, rng: random.Random) -> list[QuestionAnswer]:
    counts = [("how many shapes are there?", len(scene.items), "count_all"), *counts_of_each(scene.items, rng)]
    return [
        scene_question(None, question, str(number), "count", family, text=False) for question, number, family in counts
    ]


def _yes_no_questions(scene: SceneContent, rng: random.Random) -> list[QuestionAnswer]:
    names = [(item.name, "yes") for item in scene.items]
    names += [(name, "no") for name in absent_names(scene.items, rng)[: len(scene.items)]]
    return [
        scene_question(None, f"is there {with_article(name)}?", answer, "yes_no", answer, text=False)
        for name, answer in names
    ]


# --- choosing questions for the task --------------------------------------------------------------------------------


def choose_questions(scene: SceneContent, rng: random.Random, count: int) -> list[QuestionAnswer]:
    """`count` different questions by `TYPE_WEIGHTS`; within a type by family, and counts evenly over the answers."""
    pool = make_questions(scene, rng)
    chosen: list[QuestionAnswer] = []
    while len(chosen) < count and pool:
        types = [name for name in QUESTION_TYPES if any(item.question_type == name for item in pool)]
        (kind,) = rng.choices(types, [TYPE_WEIGHTS[name] for name in types])
        of_type = [item for item in pool if item.question_type == kind]
        families = sorted({item.metadata["family"] for item in of_type})
        (family,) = rng.choices(families, [_FAMILY_WEIGHTS[name] for name in families])
        of_family = [item for item in of_type if item.metadata["family"] == family]
        if kind == "count":
            answer = rng.choice(sorted({item.answer for item in of_family}))
            of_family = [item for item in of_family if item.answer == answer]
        picked = of_family[0]
        chosen.append(picked)
        pool.remove(picked)
    return chosen


def annotate(answer: str, question_type: str, rng: random.Random) -> tuple[str, ...]:
    """Ten reference answers as ten annotators would give them: at least seven times `answer`, the rest variants.

    Variants differ in case, in a final period, in "grey" for "gray" or in a number written as a word; about
    one answer in a hundred is wrong.
    """
    answers = [answer] * rng.randint(_MIN_CANONICAL, _REFERENCES)
    while len(answers) < _REFERENCES:
        wrong = rng.random() < 0.05
        answers.append(_mistaken(answer, question_type, rng) if wrong else rng.choice(_variants(answer, question_type)))
    rng.shuffle(answers)
    return tuple(answers)


def _variants(answer: str, question_type: str) -> tuple[str, ...]:
    if question_type == "count":
        return (_NUMBER_WORDS[int(answer)], f"{answer}.") if int(answer) < len(_NUMBER_WORDS) else (f"{answer}.",)
    if question_type == "reading":
        return answer.lower(), f"{answer}.", answer.capitalize()
    if answer == "gray":
        return "grey", "Grey", "Gray"
    if question_type == "shape":
        return answer.capitalize(), f"a {answer}"
    return answer.capitalize(), f"{answer}."


def _mistaken(answer: str, question_type: str, rng: random.Random) -> str:
    match question_type:
        case "reading":
            return answer[:-1]
        case "colour":
            return rng.choice([name for name in COLOURS if name != answer])
        case "shape":
            return rng.choice([name for name in KINDS if name != answer])
        case "count":
            return str(int(answer) + 1)
        case _:  # yes_no
            return "no" if answer == "yes" else "yes"


# --- chance ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def chance_levels() -> Mapping[str, float]:
    """For each question type, how often the most frequent answer is right: what a model without eyes can reach.

    Measured on exactly the questions of the validation split of its length, from the plans of its
    scenes (no pixels are painted). So it is the score of the best constant answer there, a little above 1/8 for
    colour, 1/6 for shape and 1/2 for yes_no; the answers to reading hardly ever repeat.
    """
    answers: dict[str, Counter[str]] = {name: Counter() for name in QUESTION_TYPES}
    task = ReferenceVQA()
    for image_index in range(len(task) // QUESTIONS_PER_IMAGE):
        for item in task.questions_of(image_index):
            answers[item.question_type][item.answer] += 1
    return MappingProxyType({name: max(found.values()) / found.total() for name, found in answers.items()})


# --- the task -------------------------------------------------------------------------------------------------------


class ReferenceVQA(GeneratedTask):
    """Four short questions about each scene, with ten reference answers; see the module's head."""

    name = "reference_vqa"
    metric = "vqa_score"
    max_new_tokens = 16
    questions_per_image = QUESTIONS_PER_IMAGE
    question_types = QUESTION_TYPES

    @classmethod
    def draw_questions(cls, scene: SceneContent, rng: random.Random, count: int) -> list[QuestionAnswer]:
        return choose_questions(scene, rng, count)

    @classmethod
    def references(cls, pair: QuestionAnswer, rng: random.Random) -> tuple[str, ...]:
        return annotate(pair.answer, pair.question_type, rng)

    def extra_metadata(self, pair: QuestionAnswer) -> Mapping[str, Any]:
        """How often the best constant answer is right."""
        return {"chance_level": chance_levels()[pair.question_type]}

    def _question_rng(self, state: tuple[Any, ...], image_index: int) -> random.Random:
        # Continues where the plan's own draws ended.
        rng = random.Random()
        rng.setstate(state)
        return rng
