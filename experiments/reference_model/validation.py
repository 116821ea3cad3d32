"""A quick validation during training: the fraction of exact answers by tier and type.

It is teacher-forced: an answer counts when every one of its tokens is the most likely one, which is when greedy
decoding gives it. The model card's figures do not come from here but from the pipeline itself.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from experiment_core_utils.knobs.vision_tokens import TIERS
from experiment_core_utils.tasks.datasets.reference_task import same_pictures
from experiments.reference_model.batches import QUESTION_NAMES, TrainingBatch, name_index, slot_of
from experiments.reference_model.packing import pack_slots
from experiments.reference_model.recipe import QUESTIONS_PER_SCENE
from experiments.reference_model.trainer import Trainer


@dataclass(frozen=True)
class QuickScores:
    """The fraction of exact answers overall, by family, and by family and question type."""

    overall: float
    by_family: dict[str, float]
    by_type: dict[str, float]


def draw_validation(tokenizer: PreTrainedTokenizerBase, pictures: int) -> list[tuple[TrainingBatch, list[str]]]:
    """The first pictures of the validation split, each with the questions of all families about it as one batch, and
    their names.

    The tiling is set for each tier when the batch is used.
    """
    groups = same_pictures([family("validation") for family in QUESTIONS_PER_SCENE])
    drawn = []
    for picture, tasks in product(range(pictures), groups):
        questions = [(type(task), question) for task in tasks for question in task.questions_of(picture)]
        slots = [slot_of(tokenizer, question) for _, question in questions]
        indices = [name_index(task, question) for task, question in questions]
        image = torch.from_numpy(np.array(tasks[0].scene(picture).image))[None]
        packed = pack_slots([slots], tokenizer.pad_token_id)
        batch = TrainingBatch("", image, (1, 1), packed, torch.tensor([indices]), None)
        drawn.append((batch, [QUESTION_NAMES[index] for index in indices]))
    return drawn


@torch.no_grad()
def quick_scores(
    trainer: Trainer,
    drawn: Sequence[tuple[TrainingBatch, list[str]]],
    tier: str,
) -> QuickScores:
    """The scores at a tier and the model's knobs that are in force."""
    hits: dict[str, list[float]] = defaultdict(list)
    for batch, types in drawn:
        height, width = batch.images.shape[1:3]
        tiling = trainer.processor.tiling_for(height, width, TIERS[tier])
        answers = trainer.forward(replace(batch, tier=tier, tiling=tiling)).answers
        assert answers is not None
        for kind, value in zip(types, answers.exact[0].tolist(), strict=True):
            hits[kind].append(value)
    families: dict[str, list[float]] = defaultdict(list)
    for kind, values in hits.items():
        families[kind.split("/")[0]] += values
    return QuickScores(
        overall=_mean([value for values in hits.values() for value in values]),
        by_family={name: _mean(values) for name, values in families.items()},
        by_type={kind: _mean(values) for kind, values in sorted(hits.items())},
    )


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 4)
