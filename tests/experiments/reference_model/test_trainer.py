"""A training step: with the tags alone it leaves the decoder as it was; prices are drilled from their stage on."""

import random
from dataclasses import replace

import torch

from experiments.reference_model.batches import BatchSource
from experiments.reference_model.facts import FactTable
from experiments.reference_model.recipe import CURRICULUM, OptimiserRecipe
from experiments.reference_model.trainer import Trainer
from tests.experiments.reference_model.tiny import TOKENIZER, tiny_model, tiny_processor

RECIPE = replace(OptimiserRecipe(), fact_tokens=1, warmup_steps=1, block_dropout_share=0.0)
TAGS, ANSWERS, DRILLS = 0.0, CURRICULUM[0].until, CURRICULUM[1].until


def _changes(progress: float, drills: int) -> dict[str, torch.Tensor]:
    """By how much one step at this point of the curriculum changes each parameter, with a table of so many drills."""
    tables = [FactTable.of(TOKENIZER, torch.device("cpu"), number=drills)] if drills else []
    trainer = Trainer(tiny_model().train(), tiny_processor(), RECIPE, compile_blocks=False, facts=tables)
    batch = BatchSource(TOKENIZER, tiny_processor(), RECIPE, scale=0.02).draw(random.Random(1), progress)
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    result, norm = trainer.train_step(batch, progress)
    assert torch.isfinite(result.loss) and norm > 0
    return {name: value.detach() - before[name] for name, value in trainer.model.named_parameters()}


def test_the_tags_alone_train_the_vision_tower_and_the_connector() -> None:
    changed = {name for name, change in _changes(TAGS, drills=20).items() if change.any()}
    assert changed and all(".vision_tower." in name or ".connector." in name for name in changed)


def test_answers_train_the_decoder_too_and_prices_are_drilled_from_their_stage_on() -> None:
    def largest_effect(progress: float) -> float:
        without, drilled = _changes(progress, drills=0), _changes(progress, drills=20)
        assert all(change.any() for name, change in without.items() if ".self_attn." in name)
        return max(float((drilled[name] - without[name]).abs().max()) for name in without)

    # The same numbers in the same order, but for how threads share a sum; a drill changes steps by about their size.
    assert largest_effect(ANSWERS) < 1e-4 < 1e-3 < largest_effect(DRILLS)
