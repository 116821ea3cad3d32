"""The card's evaluation answers as the pipeline does, and its intervals know that questions share pictures."""

from pathlib import Path

import pytest
import torch

from experiment_core_utils.e_inference import run_staged
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration, MolmoeProcessor
from experiment_core_utils.models.molmoe.staged import MolmoeStagedModel
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.knobs import KnobSetting, tier_target
from experiment_core_utils.tasks.datasets.reference_vqa import ReferenceVQA
from experiment_core_utils.tasks.registry import get_metric
from experiments.reference_model.card import (
    BEGIN,
    END,
    CardSetting,
    knob_table,
    settings_of_card,
    type_table,
    write_into_card,
)
from experiments.reference_model.evaluation import ScoredAnswer, accuracy_by_type, accuracy_of, answer_samples


def scored(image: int, kind: str, score: float) -> ScoredAnswer:
    return ScoredAnswer(0, f"image-{image}", kind, "", score)


@pytest.mark.parametrize(("top_k", "blocks"), [(4, (0, 1, 2, 3)), (2, (0, 1, 3))])
def test_sharing_a_picture_does_not_change_the_answers(
    tiny_checkpoint: Path, top_k: int, blocks: tuple[int, ...]
) -> None:
    model = MolmoeForConditionalGeneration.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()
    processor = MolmoeProcessor.from_pretrained(tiny_checkpoint)
    task, setting = ReferenceVQA(), KnobSetting(tier_target("low"), top_k, blocks)
    shared = list(answer_samples(model, processor, task, get_metric("vqa_score"), range(2, 6), setting))
    staged = MolmoeStagedModel("tiny", model, processor)
    staged.apply(setting)
    for answer in shared:
        sample = task[answer.sample_id]
        request = staged.prepare(sample, task.prompt(sample), setting.vision.crops)
        run = run_staged(staged, staged.to_device(request.inputs), task.max_new_tokens)
        assert answer.prediction == staged.decode_text(run.token_ids)
    assert len({answer.image_id for answer in shared}) == 2


def test_the_mean_is_over_answers_and_the_interval_over_pictures() -> None:
    alike = [scored(image, "reading", float(image % 2)) for image in range(40) for _ in range(4)]
    apart = [scored(index, "reading", float(index % 2)) for index in range(160)]
    assert accuracy_of(alike).mean == accuracy_of(apart).mean == 0.5
    # 40 independent pictures against 160: the interval is twice as wide, sqrt(160 / 40).
    ratio = (accuracy_of(alike).high - accuracy_of(alike).low) / (accuracy_of(apart).high - accuracy_of(apart).low)
    assert ratio == pytest.approx(2.0, rel=0.15)


def test_types_are_apart_and_no_answers_are_an_error() -> None:
    by_type = accuracy_by_type([scored(0, "count", 1.0), scored(1, "reading", 0.0), scored(2, "reading", 0.6)])
    assert (by_type["count"].mean, by_type["reading"].mean, by_type["reading"].n) == (1.0, 0.3, 2)
    with pytest.raises(ValueError, match="no answers"):
        accuracy_of([])


def test_the_card_turns_each_knob_alone_and_both() -> None:
    settings = settings_of_card(8, 16)
    assert len(set(settings)) == len(settings) == 12
    assert {plan.top_k for plan in settings if plan.blocks == 16} == {8, 4, 2, 1}
    assert {plan.blocks for plan in settings if plan.top_k == 8} == {16, 15, 14, 13, 12}


def test_the_tables_and_their_place_in_the_card(tmp_path: Path) -> None:
    answers = [scored(index, kind, 1.0) for index, kind in enumerate(["count", "reading", "reading"])]
    rows = {CardSetting("high", 8, 16): answers, CardSetting("high", 4, 12): answers}
    assert "| high, top-4, 12 blocks | 1.000 [1.000, 1.000] | 1.000 | 1.000 |" in knob_table(rows)
    table = type_table(rows, {"count": 0.25, "reading": 0.01})
    assert "| reading (n = 2) | 0.010 | 1.000 [1.000, 1.000] |" in table
    card = tmp_path / "README.md"
    card.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_into_card(card, table)
    assert card.read_text() == f"before\n{BEGIN}\n\n{table}\n{END}\nafter\n"
    card.write_text("no marks")
    with pytest.raises(ResultsError, match="no place"):
        write_into_card(card, table)
