"""Captions of generated scenes with five references each, scored by CIDEr-D.

The references differ as people's captions do: in order, in wording, and in what they leave out. Shapes and colours can
be recognised in a coarse picture, the text on them cannot.
"""

import random
from collections.abc import Sequence

from experiment_core_utils.tasks.datasets.reference_scenes import Item, SceneContent
from experiment_core_utils.tasks.datasets.reference_task import (
    GeneratedTask,
    QuestionAnswer,
    reading_order,
    scene_question,
    with_article,
)

QUESTION = "tell me what is in this picture."
_NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def listed(parts: Sequence[str]) -> str:
    """The parts as English lists them: commas, and "and" before the last."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def caption(items: Sequence[Item]) -> str:
    """The full caption, in the items' order: "a red circle with K7Q, a blue star with 42 and a gray cross with WEB"."""
    return listed([f"{with_article(item.name)} with {item.label}" for item in items])


def five_captions(items: Sequence[Item]) -> tuple[str, ...]:
    """Five captions of one scene; `items` in reading order.

    In full; the text first; with the number of shapes; without the text; and the largest shape before the others.
    """
    named = [with_article(item.name) for item in items]
    by_size = sorted(items, key=lambda item: -item.diameter)
    largest, others = by_size[0], by_size[1:]
    number = _NUMBER_WORDS[len(items)] if len(items) < len(_NUMBER_WORDS) else str(len(items))
    shapes = "one shape" if len(items) == 1 else f"{number} shapes"
    beside = listed([with_article(item.name) for item in others]) if others else "nothing else"
    return (
        caption(items),
        listed([f"{item.label} on {name}" for item, name in zip(items, named, strict=True)]),
        f"there are {shapes}: {caption(items)}",
        f"a picture of {listed(named)}",
        f"a big {largest.name} with {largest.label}, and {beside}",
    )


class ReferenceCaptions(GeneratedTask):
    """One request for a caption about each scene, with five references."""

    name = "reference_captions"
    metric = "cider_score"
    max_new_tokens = 72
    questions_per_image = 1
    question_types = ("caption",)

    @classmethod
    def draw_questions(cls, scene: SceneContent, rng: random.Random, count: int) -> list[QuestionAnswer]:
        """The one request; its `answer` is the full caption."""
        ordered = reading_order(scene.items)
        references = five_captions(ordered)
        return [scene_question(None, QUESTION, references[0], "caption", text=True, references=references)][:count]
