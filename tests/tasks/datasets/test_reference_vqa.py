"""The generated question task: questions agree with their scene, splits stay apart, samples stand alone."""

import random
import re
from collections import Counter

import pytest

from experiment_core_utils.tasks.datasets.reference_scenes import (
    Background,
    Item,
    ItemStyle,
    ScenePlan,
    is_reserved_label,
    plan_scene,
)
from experiment_core_utils.tasks.datasets.reference_task import plural
from experiment_core_utils.tasks.datasets.reference_vqa import (
    QUESTION_TYPES,
    TYPE_WEIGHTS,
    ReferenceVQA,
    annotate,
    chance_levels,
    choose_questions,
    make_questions,
)
from experiment_core_utils.tasks.scoring.vqa_score import vqa_score

PLAIN = ItemStyle(fill=(0, 0, 0), text=(0, 0, 0), plate=None, font="DejaVuSans.ttf", angle_degrees=0.0)


def _item(colour: str, kind: str, label: str, x: float, y: float) -> Item:
    box = (int(x) - 20, int(y) - 20, int(x) + 20, int(y) + 40)
    return Item(kind, colour, label, 12, 0.012, box, (x, y), 40, PLAIN)


# A row of two above a lone third; the star is the only one of its kind, red occurs twice.
HAND_MADE = ScenePlan(
    width=1000,
    height=1000,
    items=(
        _item("red", "circle", "K7Q", 500, 110),
        _item("blue", "star", "42", 100, 100),
        _item("red", "square", "CAT", 520, 800),
    ),
    background=Background((255, 255, 255), "plain", 0, 0),
)


def _answers(plan: ScenePlan, seed: int = 0) -> dict[str, str]:
    return {item.question: item.answer for item in make_questions(plan, random.Random(seed))}


def test_questions_about_a_hand_made_scene() -> None:
    answers = _answers(HAND_MADE)
    expected = {
        "what is written on the red circle?": "K7Q",
        "what is written on the leftmost shape?": "42",
        "what is written on the bottommost shape?": "CAT",
        "which colour is the shape with the text K7Q?": "red",
        "which colour is the star?": "blue",
        "which shape has the text CAT?": "square",
        "how many shapes are there?": "3",
        "how many circles are there?": "1",
        "how many red shapes are there?": "2",
        "is there a red circle?": "yes",
    }
    assert expected.items() <= answers.items()
    # Neither leads by 8 % of the side: 520 against 500 to the right, 100 against 110 at the top.
    assert "what is written on the rightmost shape?" not in answers
    assert "what is written on the topmost shape?" not in answers


def test_no_questions_ask_for_what_occurs_apart() -> None:
    refused = {question for question, answer in _answers(HAND_MADE).items() if answer == "no"}
    assert refused == {"is there a red star?", "is there a blue circle?", "is there a blue square?"}


def test_plural() -> None:
    assert [plural("circle"), plural("cross")] == ["circles", "crosses"]


def _solve(question: str, plan: ScenePlan) -> str:
    """Answer from the items alone, by another route than the generator's."""
    items = plan.items
    if found := re.fullmatch(r"what is written on the (left|right|top|bottom)most shape\?", question):
        axis = 0 if found[1] in ("left", "right") else 1
        pick = min if found[1] in ("left", "top") else max
        return pick(items, key=lambda item: item.centre[axis]).label
    if found := re.fullmatch(r"what is written on the (\w+) (\w+)\?", question):
        (label,) = [item.label for item in items if (item.colour, item.kind) == (found[1], found[2])]
        return label
    if found := re.fullmatch(r"which colour is the shape with the text (\w+)\?", question):
        (colour,) = [item.colour for item in items if item.label == found[1]]
        return colour
    if found := re.fullmatch(r"which colour is the (\w+)\?", question):
        (colour,) = [item.colour for item in items if item.kind == found[1]]
        return colour
    if found := re.fullmatch(r"which shape has the text (\w+)\?", question):
        (kind,) = [item.kind for item in items if item.label == found[1]]
        return kind
    if found := re.fullmatch(r"how many (\w+) are there\?", question):
        return str(sum(found[1] in ("shapes", plural(item.kind)) for item in items))
    if found := re.fullmatch(r"how many (\w+) shapes are there\?", question):
        return str(sum(item.colour == found[1] for item in items))
    if found := re.fullmatch(r"is there an? (\w+) (\w+)\?", question):
        return "yes" if any((item.colour, item.kind) == (found[1], found[2]) for item in items) else "no"
    raise AssertionError(f"not a known question: {question}")


def test_answers_agree_with_the_scene_by_brute_force() -> None:
    for seed in range(60):
        plan = plan_scene(seed)
        questions = make_questions(plan, random.Random(seed))
        assert len({item.question for item in questions}) == len(questions)
        for item in questions:
            assert item.answer == _solve(item.question, plan), item.question
        answers = Counter(item.answer for item in questions if item.question_type == "yes_no")
        assert answers["yes"] == answers["no"] == len(plan.items)


def test_mix_of_question_types() -> None:
    chosen = [item for seed in range(400) for item in choose_questions(plan_scene(seed), random.Random(seed), 4)]
    for name in QUESTION_TYPES:
        share = sum(item.question_type == name for item in chosen) / len(chosen)
        assert share == pytest.approx(TYPE_WEIGHTS[name], abs=0.04)


def test_ten_references_with_variants() -> None:
    rng = random.Random(0)
    lists = [annotate("gray", "colour", rng) for _ in range(200)] + [annotate("3", "count", rng) for _ in range(200)]
    for references in lists:
        assert len(references) == 10
        canonical, count = Counter(references).most_common(1)[0]
        assert count >= 7
        assert vqa_score(canonical, references) == 1.0
    everything = {answer for references in lists for answer in references}
    assert {"gray", "grey", "3", "three"} <= everything


def test_a_sample_needs_no_other_and_is_reproducible() -> None:
    one, other = ReferenceVQA("validation"), ReferenceVQA("validation")
    last = one[1999]
    for index in range(8):
        assert one[index].image is not None
    again = other[1999]
    assert (again.question, again.answers, again.image_id) == (last.question, last.answers, last.image_id)
    assert again.image is not None and last.image is not None
    assert again.image.tobytes() == last.image.tobytes()
    assert dict(again.metadata) == dict(last.metadata)


def test_four_questions_share_a_picture() -> None:
    task = ReferenceVQA("train")
    samples = [task[index] for index in range(8)]
    assert [sample.image_id for sample in samples[:4]] == [samples[0].image_id] * 4
    assert samples[0].image is samples[3].image
    assert samples[4].image_id != samples[0].image_id
    assert len({sample.question for sample in samples[:4]}) == 4


def test_task_face() -> None:
    task = ReferenceVQA()
    assert (task.name, task.metric, task.max_new_tokens, task.split) == ("reference_vqa", "vqa_score", 16, "validation")
    assert len(task) == 2000
    sample = task[0]
    assert task.prompt(sample) == f" User: {sample.question} Assistant:"
    assert vqa_score(sample.metadata["answer"], sample.answers) == 1.0
    assert {"answer", "text_height_px", "h_rel", "num_items", "canvas_width", "chance_level"} <= set(sample.metadata)
    for index in (-1, 2000):
        with pytest.raises(IndexError, match="samples 0 to 1999"):
            task[index]


def test_splits_share_no_picture_and_no_reserved_label() -> None:
    one, other = ReferenceVQA("train")[0].image, ReferenceVQA("validation")[0].image
    assert one is not None and other is not None and one.tobytes() != other.tobytes()
    labels = [ReferenceVQA("train")[index].metadata["label"] for index in range(0, 120, 3)]
    assert not any(is_reserved_label(label) for label in labels if label is not None)


def test_chance_levels() -> None:
    assert set(chance_levels()) == set(QUESTION_TYPES)
    assert chance_levels()["yes_no"] == pytest.approx(0.5, abs=0.06)
    assert 1 / 8 <= chance_levels()["colour"] < 0.22
    assert 1 / 6 <= chance_levels()["shape"] < 0.26
    assert 0.15 < chance_levels()["count"] < 0.4
    assert chance_levels()["reading"] < 0.03
