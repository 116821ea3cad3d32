"""Five captions of a scene that can be described by hand."""

import random

from experiment_core_utils.tasks.datasets.reference_captions import ReferenceCaptions, five_captions, listed
from experiment_core_utils.tasks.datasets.reference_task import reading_order
from tests.tasks.datasets.hand_made_scene import FOUR, item, plan


def test_captions_of_a_known_scene() -> None:
    assert five_captions(reading_order(FOUR.items)) == (
        "a red circle with 42, a blue star with K7Q, a red star with 908 and a green circle with WEB",
        "42 on a red circle, K7Q on a blue star, 908 on a red star and WEB on a green circle",
        "there are four shapes: a red circle with 42, a blue star with K7Q, a red star with 908 and a green circle "
        "with WEB",
        "a picture of a red circle, a blue star, a red star and a green circle",
        "a big red star with 908, and a red circle, a blue star and a green circle",
    )


def test_a_single_orange_shape() -> None:
    first, *_, last = five_captions([item("orange", "star", "7A", 0, 0)])
    assert (first, last) == ("an orange star with 7A", "a big orange star with 7A, and nothing else")
    assert listed(["a", "b"]) == "a and b"


def test_the_request() -> None:
    (pair,) = ReferenceCaptions.draw_questions(FOUR, random.Random(0), 1)
    assert pair.answer == pair.references[0] and len(pair.references) == 5
    assert ReferenceCaptions.draw_questions(plan(*FOUR.items), random.Random(0), 0) == []
