"""Training batches: the same again from the same seed, one tiling for all, text as large as the curriculum says."""

import random

import pytest
import torch

from experiment_core_utils.models.molmoe import MolmoeImageProcessor
from experiment_core_utils.tasks.datasets.reference_choice import ReferenceChoice
from experiment_core_utils.tasks.datasets.reference_scenes import MIN_TEXT_HEIGHT_PX
from experiment_core_utils.tasks.datasets.reference_task import QuestionAnswer
from experiments.reference_model.batches import (
    LARGEST_TEXT_HEIGHT,
    QUESTION_NAMES,
    BatchSource,
    TrainingBatch,
    name_index,
    slot_of,
    stage_at,
)
from experiments.reference_model.recipe import (
    CURRICULUM,
    QUESTIONS_PER_SCENE,
    RECALLS_PER_SCENE,
    OptimiserRecipe,
    crops_of,
)
from tests.experiments.reference_model.tiny import TOKENIZER


def _source() -> BatchSource:
    return BatchSource(TOKENIZER, MolmoeImageProcessor(), OptimiserRecipe(), scale=0.02)


def _draw(seed: int, progress: float) -> TrainingBatch:
    return _source().draw(random.Random(seed), progress)


def test_the_same_seed_draws_the_same_batch() -> None:
    first, second, other = _draw(1, 0.1), _draw(1, 0.1), _draw(2, 0.1)
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.slots.input_ids, second.slots.input_ids)
    assert torch.equal(first.types, second.types)
    assert first.tags is not None and second.tags is not None
    assert torch.equal(first.tags.names, second.tags.names)
    assert first.images.shape != other.images.shape or not torch.equal(first.images, other.images)


@pytest.mark.parametrize("seed", range(6))
def test_all_pictures_of_a_batch_are_cut_alike(seed: int) -> None:
    batch = _draw(seed, 0.6)
    height, width = batch.images.shape[1:3]
    crops = crops_of(batch.tier)
    assert batch.tiling == MolmoeImageProcessor().tiling_for(height, width, crops)
    assert crops.min_crops <= batch.tiling[0] * batch.tiling[1] <= crops.max_crops
    assert len(batch.images) == len(batch.slots.input_ids) == len(batch.types) >= 2
    assert batch.types.shape[1] == len(batch.slots.widths)
    # Each slot keeps its family, whatever the type of its question, so that long answers pad only each other.
    families = [QUESTION_NAMES[index].split("/")[0] for index in batch.types[0]]
    with_prices = [task.name for task, (count, _) in QUESTIONS_PER_SCENE.items() for _ in range(count)]
    assert families[-RECALLS_PER_SCENE:] == ["recall"] * RECALLS_PER_SCENE
    del families[-RECALLS_PER_SCENE:]
    assert families in (with_prices, [name for name in with_prices if name != "reference_knowledge"])
    kept = batch.types[:, : len(families)].tolist()
    assert all([QUESTION_NAMES[index].split("/")[0] for index in row] == families for row in kept)


def test_a_slot_holds_what_its_task_asks_and_expects() -> None:
    pair = QuestionAnswer("which one?", "B", "place", options=("red star", "blue star"), answer_index=1)
    slot = slot_of(TOKENIZER, pair, weight=2.0)
    assert TOKENIZER.decode(slot.prompt) == " User: which one?\nA: red star\nB: blue star\n Assistant:"
    assert TOKENIZER.decode(slot.answer[:-1]) == " B" and slot.answer[-1] == TOKENIZER.eos_token_id
    assert slot.weight == 2.0
    assert QUESTION_NAMES[name_index(ReferenceChoice, pair)] == "reference_choice/place"


@pytest.mark.parametrize("progress", [0.05, 0.25, 0.8])
def test_text_heights_stay_in_range(progress: float) -> None:
    for seed in range(3):
        batch = _draw(seed, progress)
        assert batch.tags is not None
        heights = batch.tags.text_px[batch.tags.text_px > 0]
        mean_side = (batch.images.shape[1] * batch.images.shape[2]) ** 0.5
        assert heights.min() >= MIN_TEXT_HEIGHT_PX
        assert heights.max() <= max(LARGEST_TEXT_HEIGHT * mean_side + 1, MIN_TEXT_HEIGHT_PX)
        assert (batch.tags.text_px > 0).sum(dim=1).max() <= max(stage_at(progress)[0].items)


def test_the_first_stage_has_tags_without_questions_and_the_second_questions_without_prices_to_recall() -> None:
    first, second, third = (_draw(1, progress) for progress in (0.0, CURRICULUM[0].until, CURRICULUM[1].until))
    assert first.tags is not None and first.slots.widths == ()
    assert first.types.shape == first.slots.input_ids.shape == (len(first.images), 0)
    recall = QUESTION_NAMES.index("recall/after_a_picture")
    assert second.slots.widths and not (second.types == recall).any()
    assert (third.types == recall).sum(dim=1).tolist() == [RECALLS_PER_SCENE] * len(third.images)


def test_stages_follow_one_another() -> None:
    assert stage_at(0.0) == (CURRICULUM[0], 0.0)
    assert stage_at(CURRICULUM[0].until) == (CURRICULUM[1], 0.0)
    assert stage_at(1.0) == (CURRICULUM[-1], 1.0)
