"""The card's evaluation answers as the pipeline does, and its intervals know that questions share pictures."""

import re
from pathlib import Path

import pytest
import torch

from experiment_core_utils.knobs.active_blocks import RunningBlocks, num_blocks_of
from experiment_core_utils.knobs.interface import KnobLimits
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.top_k import experts_of
from experiment_core_utils.knobs.vision_tokens import tier_target, vision_of
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration, MolmoeProcessor
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.tasks.datasets.reference_captions import ReferenceCaptions
from experiment_core_utils.tasks.interface import Answer
from experiment_core_utils.tasks.registry import REFERENCE_TASKS, get_metric
from experiments.reference_model.card import (
    BEGIN,
    END,
    knob_table,
    settings_of_card,
    type_table,
    write_into_card,
)
from experiments.reference_model.evaluation import (
    Answered,
    accuracy_by_type,
    accuracy_of,
    answer_pictures,
    best_constant,
    is_picture_model,
)
from tests.scripted.opaque_model import OpaqueModel

EM = get_metric("em")
ANY_SETTING = Setting.of(vision=tier_target("high"), top_k=8, num_active_blocks=RunningBlocks.of(tuple(range(16))))


def output(image: int, kind: str, prediction: str, reference: str = "1") -> Answer:
    return Answer(prediction, (reference,), question_type=kind, image_id=f"image-{image}")


def test_sharing_a_picture_and_drafting_do_not_change_the_answers(tiny_checkpoint: Path) -> None:
    model = MolmoeForConditionalGeneration.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()
    processor = MolmoeProcessor.from_pretrained(tiny_checkpoint)
    tasks = [family("validation") for family in REFERENCE_TASKS]
    settings = [
        Setting.of(vision=tier_target("low"), top_k=top_k, num_active_blocks=RunningBlocks.of(blocks))
        for top_k, blocks in [(4, (0, 1, 2, 3)), (2, (0, 1, 3))]
    ]
    staged = MolmoeStagedModel("tiny", model, processor)
    shared = list(answer_pictures(staged, tasks, [2], settings))
    assert len(shared) == len(settings) * sum(task.questions_per_image for task in tasks)
    by_name = {task.name: task for task in tasks}
    for answered in shared:
        task = by_name[answered.task]
        staged.apply(answered.setting)
        sample = task[answered.sample_id]
        request = staged.prepare(sample, task.prompt(sample), vision_of(answered.setting).crops)
        run = run_staged(staged, staged.to_device(request.inputs), task.max_new_tokens)
        assert answered.answer.prediction == staged.decode_text(run.token_ids)
        assert answered.answer.image_id == f"{task.pictures}validation-0-000002"


def test_engines_and_models_without_a_processor_are_refused(tiny_checkpoint: Path) -> None:
    model = MolmoeForConditionalGeneration.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()
    processor = MolmoeProcessor.from_pretrained(tiny_checkpoint)
    staged = MolmoeStagedModel("tiny", model, processor, "graph")
    assert is_picture_model(staged) and not is_picture_model(OpaqueModel())
    with pytest.raises(ConfigurationError, match="by its .* engine, .* load the model with --execution eager"):
        next(answer_pictures(staged, [], [0], []))


def test_a_good_draft_gives_the_same_answer_as_a_bad_one() -> None:
    """The shipped model: most of what it says is in its draft, and the rest is not."""
    path = Path(__file__).parents[3] / "checkpoints" / "molmoe_tiny"
    model = MolmoeForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    processor = MolmoeProcessor.from_pretrained(path)
    staged = MolmoeStagedModel("shipped", model, processor)
    captions = ReferenceCaptions("validation")
    setting = Setting.of(vision=tier_target("low"), top_k=8, num_active_blocks=RunningBlocks.of(tuple(range(16))))
    agreements = []
    for answered in answer_pictures(staged, [captions], [0, 1], [setting]):
        staged.apply(setting)
        sample = captions[answered.sample_id]
        request = staged.prepare(sample, captions.prompt(sample), vision_of(setting).bounds)
        run = run_staged(staged, staged.to_device(request.inputs), captions.max_new_tokens)
        assert answered.answer.prediction == staged.decode_text(run.token_ids)
        agreements.append(answered.answer.prediction == answered.expected)
    assert not all(agreements)


def test_the_mean_is_over_answers_and_the_interval_over_pictures() -> None:
    alike = [output(image, "reading", str(image % 2)) for image in range(40) for _ in range(4)]
    apart = [output(index, "reading", str(index % 2)) for index in range(160)]
    one, other = accuracy_of(alike, EM), accuracy_of(apart, EM)
    assert (one.mean, one.n, other.mean) == (0.5, 160, 0.5)
    # 40 independent pictures against 160: the interval is twice as wide, sqrt(160 / 40).
    assert (one.high - one.low) / (other.high - other.low) == pytest.approx(2.0, rel=0.15)


def test_types_are_apart_and_no_answers_are_an_error() -> None:
    by_type = accuracy_by_type([output(0, "count", "1"), output(1, "reading", "0"), output(2, "reading", "1")], EM)
    assert (by_type["count"].mean, by_type["reading"].mean, by_type["reading"].n) == (1.0, 0.5, 2)
    with pytest.raises(ValueError, match="no answers"):
        accuracy_of([], EM)
    with pytest.raises(ValueError, match="cider_score has no score for these 1 answers: give it more pictures"):
        accuracy_of([output(0, "caption", "a star", "a star")], get_metric("cider_score"))


def test_the_best_constant_answer() -> None:
    references = ["1", "1", "1", "2", "0"]
    answered = [
        Answered("task", ANY_SETTING, index, reference, output(index, "count", "9", reference))
        for index, reference in enumerate(references)
    ]
    assert best_constant(answered, EM) == {"count": pytest.approx(3 / 5)}


def test_the_card_turns_each_knob_alone_and_both() -> None:
    settings = settings_of_card(KnobLimits(16, 64, 8))
    assert len(set(settings)) == len(settings) == 14
    assert settings[0].key == "own_topk8_blocks16"
    assert [each.key for each in settings[-2:]] == ["tier-high_topk4_blocks12", "tier-low_topk4_blocks12"]
    assert {experts_of(each) for each in settings if num_blocks_of(each) == 16} == {8, 6, 4, 2, 1}
    assert {num_blocks_of(each) for each in settings if experts_of(each) == 8} == {16, 15, 14, 13, 12}


def test_the_tables_and_their_place_in_the_card(tmp_path: Path) -> None:
    def family(predictions: str) -> list[Answered]:
        return [
            Answered("counting", ANY_SETTING, at, "1", output(at, "count" if at else "reading", prediction))
            for at, prediction in enumerate(predictions)
        ]

    plans = {
        "tier-high_topk8_blocks16": "111",
        "tier-low_topk8_blocks16": "011",
        "tier-high_topk8_blocks12": "001",
        "tier-high_topk4_blocks12": "000",
    }
    rows = {Setting.named(key): {"counting": family(predictions)} for key, predictions in plans.items()}
    table = knob_table(rows, {"counting": EM})
    assert "| setting | counting, em (n = 3) |" in table
    assert re.search(r"\| low, top-8, 16 blocks \| 0\.667 \[0\.\d{3}, 0\.\d{3}\] \|", table)
    types = type_table(rows, {"counting": EM}).splitlines()
    assert types[0] == "| family | question type | n | best constant | high | low | high, 12 blocks |"
    assert types[2] == "| counting | count | 2 | 1.000 | 1.000 | 1.000 | 0.500 |"
    assert types[3] == "| counting | reading | 1 | 1.000 | 1.000 | 0.000 | 0.000 |"
    card = tmp_path / "README.md"
    card.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_into_card(card, table)
    assert card.read_text() == f"before\n{BEGIN}\n\n{table}\n{END}\nafter\n"
    card.write_text("no marks")
    with pytest.raises(ResultsError, match="no place"):
        write_into_card(card, table)
