"""In: a model and the validation split; out: the share of answers that are right token for token, by tier and type.

A quick look during training, teacher-forced: an answer counts when every one of its tokens is the most likely one,
which is when greedy decoding gives it. The model card's figures do not come from here but from the pipeline itself.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from experiment_core_utils.primitives.knobs import TIERS
from experiment_core_utils.tasks.datasets.reference_vqa import QUESTION_TYPES, QUESTIONS_PER_IMAGE, ReferenceVQA
from experiments.reference_model.batches import TrainingBatch
from experiments.reference_model.packing import make_slot, pack_slots
from experiments.reference_model.trainer import Trainer


@dataclass(frozen=True)
class QuickScores:
    """Accuracy overall, and by question type."""

    overall: float
    by_type: dict[str, float]


def draw_validation(tokenizer: PreTrainedTokenizerBase, pictures: int) -> list[tuple[TrainingBatch, list[str]]]:
    """The first pictures of the validation split, each with its questions as one batch, and their types.

    The tiling is set for each tier when the batch is used.
    """
    task = ReferenceVQA("validation")
    drawn = []
    for picture in range(pictures):
        first = picture * QUESTIONS_PER_IMAGE
        samples = [task[index] for index in range(first, first + QUESTIONS_PER_IMAGE)]
        slots = [make_slot(tokenizer, task.prompt(sample), sample.metadata["answer"]) for sample in samples]
        image = torch.from_numpy(np.array(samples[0].image))[None]
        types = torch.tensor([[QUESTION_TYPES.index(sample.question_type) for sample in samples]])
        batch = TrainingBatch("", image, (1, 1), pack_slots([slots], tokenizer.pad_token_id), types, None)
        drawn.append((batch, [sample.question_type for sample in samples]))
    return drawn


@torch.no_grad()
def quick_scores(
    trainer: Trainer,
    drawn: Sequence[tuple[TrainingBatch, list[str]]],
    tier: str,
    top_k: int | None = None,
    active_blocks: Sequence[int] | None = None,
) -> QuickScores:
    """Scores at one setting of the knobs."""
    hits: dict[str, list[float]] = defaultdict(list)
    with trainer.model.knobs(top_k, active_blocks):
        for batch, types in drawn:
            height, width = batch.images.shape[1:3]
            tiling = trainer.processor.tiling_for(height, width, TIERS[tier])
            exact = trainer.forward(replace(batch, tier=tier, tiling=tiling)).exact[0]
            for kind, value in zip(types, exact.tolist(), strict=True):
                hits[kind].append(value)
    everything = [value for values in hits.values() for value in values]
    return QuickScores(
        overall=round(float(np.mean(everything)), 4),
        by_type={kind: round(float(np.mean(values)), 4) for kind, values in sorted(hits.items())},
    )
