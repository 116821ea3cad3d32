"""Prices of codes: fixed for ever, in new pictures, and absent from the training in the control."""

import random

from experiment_core_utils.tasks.datasets.reference_knowledge import (
    NUMBER_OF_FACTS,
    ReferenceKnowledge,
    chance_level,
    prices,
)
from experiment_core_utils.tasks.datasets.reference_scenes import is_reserved_label, item_codes
from experiment_core_utils.tasks.interface import answer_to
from experiment_core_utils.tasks.registry import get_metric, load_task
from tests.tasks.datasets.hand_made_scene import item, plan


def test_codes_and_prices_are_fixed() -> None:
    codes = item_codes()
    assert len(set(codes)) == len(codes) == 248_873
    # All codes of the first form, then those of the second; 13,853 and 13,754 of 24 * 10 * 24 * 24 are reserved.
    first, second = codes[:124_387], codes[124_387:]
    assert first[:3] == ("M3XS", "S2US", "M7CG") and second[:3] == ("XR5W", "EU2A", "PT4V")
    assert [prices()[code] for code in first[:3]] == ["146", "805", "555"]
    assert [prices()[code] for code in second[:3]] == ["167", "770", "852"]
    assert not any(map(is_reserved_label, codes))
    for form, digit in ((first, 1), (second, 2)):
        assert all([character.isdecimal() for character in code] == [at == digit for at in range(4)] for code in form)


def test_questions_of_a_known_scene() -> None:
    first, second = item_codes()[:2]
    scene = plan(
        item("red", "circle", first, 200, 200), item("blue", "star", second, 700, 210), item("red", "star", "42", 1, 1)
    )
    asked = [each for seed in range(20) for each in ReferenceKnowledge.draw_questions(scene, random.Random(seed), 3)]
    assert {each.question: each.answer for each in asked} == {
        "what are the code and the price of the red circle?": f"{first} {prices()[first]}",
        "what are the code and the price of the blue star?": f"{second} {prices()[second]}",
    }
    assert {(each.question_type, each.metadata["label"]) for each in asked} == {
        ("code_and_price", first),
        ("code_and_price", second),
    }


def test_validation_asks_known_facts_and_control_others() -> None:
    known = set(item_codes()[:NUMBER_OF_FACTS])
    labels = {
        split: [load_task("reference_knowledge", split)[index].metadata["label"] for index in range(40)]
        for split in ("train", "validation", "control")
    }
    assert set(labels["train"]) | set(labels["validation"]) <= known
    assert not set(labels["control"]) & known and set(labels["control"]) <= set(item_codes())
    assert labels["train"] != labels["validation"]
    assert set(ReferenceKnowledge.codes("control")).isdisjoint(ReferenceKnowledge.codes("train"))
    assert ReferenceKnowledge.codes("validation") == ReferenceKnowledge.codes("train") == range(NUMBER_OF_FACTS)


def test_one_price_for_all_scores_at_chance() -> None:
    task = load_task("reference_knowledge", "control")
    samples = [task[index] for index in range(400)]
    scoring = get_metric(task.metric).score(
        [answer_to(sample, f"{sample.metadata['label']} 500") for sample in samples]
    )
    assert scoring.overall is not None and scoring.overall <= 0.02
    assert 1 / 900 < chance_level() < 4 / 900
    assert samples[0].metadata["chance_level"] == chance_level()
