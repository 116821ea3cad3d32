"""Questions about generated scenes whose answer is not in the picture, scored by VQA accuracy.

As in OK-VQA, the picture shows the subject of the question, and the answer must be known: every label is the code of an
item, as in K7QD or KQ7D, and each code has a price. The prices come from a fixed seed and follow no rule, so only a
model that has learned the table knows them. A `code_and_price` question wants both; an answer is right when both are.
The pictures are this family's own.

The first `NUMBER_OF_FACTS` codes have prices that training contains, and validation asks for them in new pictures. The
last codes are the split `control`: no training contains their prices, and no model can score above chance there.
"""

import random
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from experiment_core_utils.tasks.datasets.reference_scenes import Item, SceneContent, item_codes
from experiment_core_utils.tasks.datasets.reference_task import GeneratedTask, QuestionAnswer, Split, scene_question
from experiment_core_utils.tasks.datasets.reference_vqa import annotate

NUMBER_OF_FACTS = 160_000
QUESTION_TYPE = "code_and_price"
_CONTROL_FACTS = 5_000
_PRICES = range(100, 1000)
_PRICE_SEED = "prices"


@lru_cache(maxsize=1)
def prices() -> Mapping[str, str]:
    """The price of every code, the control's too."""
    codes = item_codes()
    return dict(zip(codes, map(str, random.Random(_PRICE_SEED).choices(_PRICES, k=len(codes))), strict=True))


@lru_cache(maxsize=1)
def chance_level() -> float:
    """How often the most frequent price is right, over the codes of the training, for a model that reads every code."""
    known = [prices()[code] for code in item_codes()[:NUMBER_OF_FACTS]]
    return max(Counter(known).values()) / len(known)


def _about(item: Item) -> QuestionAnswer:
    answer = f"{item.label} {prices()[item.label]}"
    question = f"what are the code and the price of the {item.name}?"
    return scene_question(item, question, answer, QUESTION_TYPE, text=True)


class ReferenceKnowledge(GeneratedTask):
    """Three questions about prices in each scene, with ten reference answers; see the module's head."""

    name = "reference_knowledge"
    metric = "vqa_score"
    max_new_tokens = 16
    questions_per_image = 3
    question_types = (QUESTION_TYPE,)
    splits = ("train", "validation", "control")
    h_rel = (0.016, 0.04)  # a price is right or wrong as a whole, so every character has to be read
    pictures = "codes-"

    @classmethod
    def codes(cls, split: Split) -> range:
        """The first codes; for `control` the last ones."""
        number = len(item_codes())
        return range(number - _CONTROL_FACTS, number) if split == "control" else range(NUMBER_OF_FACTS)

    @classmethod
    def draw_questions(cls, scene: SceneContent, rng: random.Random, count: int) -> list[QuestionAnswer]:
        """One question for each of `count` items with a code, in any order."""
        coded = [item for item in scene.items if item.label in prices()]
        return [_about(item) for item in rng.sample(coded, min(count, len(coded)))]

    @classmethod
    def references(cls, pair: QuestionAnswer, rng: random.Random) -> tuple[str, ...]:
        return annotate(pair.answer, "reading", rng)

    def extra_metadata(self, pair: QuestionAnswer) -> Mapping[str, Any]:
        """Chance for a model that reads the code; see `chance_level`."""
        return {"chance_level": chance_level()}
