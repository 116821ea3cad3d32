"""Multiple choice: the right option is right, no other is, and the options alone do not give it away."""

import random
from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from experiment_core_utils.tasks.datasets.reference_choice import ReferenceChoice, lookalikes, make_questions
from tests.tasks.datasets.hand_made_scene import FOUR

LABELS = st.text("ABCDEFGHJKLMNPQRSTUVWXYZ0123456789", min_size=2, max_size=4)


def test_questions_of_a_known_scene() -> None:
    found = make_questions(FOUR, random.Random(0))
    right = {(each.question, each.references[0]) for each in found}
    assert ("what is written on the blue star?", "K7Q") in right
    assert ("which shape is the topmost?", "red circle") not in right  # 10 pixels above the next are no clear lead
    assert ("which shape is the leftmost?", "red circle") in right
    assert ("which shape is the rightmost?", "green circle") in right
    assert ("what is the sum of the digits on the red star?", "17") in right
    assert Counter(each.question_type for each in found) == {
        "reading": 4, "arithmetic": 2, "place": 2, "presence": 4
    }  # fmt: skip
    present = {"red circle", "blue star", "red star", "green circle"}
    for each in found:
        assert each.answer_index is not None
        assert each.options[each.answer_index] == each.references[0]
        assert each.answer == "ABCD"[each.answer_index]
        assert len(set(each.options)) == len(each.options) == 4
        if each.question_type == "presence":
            assert set(each.options) & present == set(each.references)


@given(LABELS, st.integers())
def test_lookalikes_are_every_combination_of_two_changes(label: str, seed: int) -> None:
    options = [label, *lookalikes(label, random.Random(seed))]
    assert len(set(options)) == 4 and {len(option) for option in options} == {len(label)}
    # At each place there is one character in all four, or two of them twice each: no option stands out.
    for characters in zip(*options, strict=True):
        assert sorted(Counter(characters).values()) in ([4], [2, 2])
        assert len({character.isdecimal() for character in characters}) == 1


def test_the_rank_of_the_right_number_reveals_nothing() -> None:
    ranks: Counter[int] = Counter()
    for seed in range(400):
        for each in make_questions(FOUR, random.Random(seed)):
            if each.references == ("17",):
                numbers = sorted(map(int, each.options))
                assert len({after - before for before, after in pairwise(numbers)}) == 1
                ranks[numbers.index(17)] += 1
    assert set(ranks) == {0, 1, 2, 3} and min(ranks.values()) > 70


def test_letters_are_even() -> None:
    task = ReferenceChoice("train")
    letters = Counter(task.questions_of(image)[0].answer for image in range(400))
    assert set(letters) == set("ABCD") and min(letters.values()) > 60
