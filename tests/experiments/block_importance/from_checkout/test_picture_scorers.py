"""Likelihoods of packed answers against the stages, one question and one token at a time."""

from pathlib import Path

import pytest
import torch

from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration, MolmoeProcessor
from experiment_core_utils.tasks.datasets.reference_captions import ReferenceCaptions
from experiment_core_utils.tasks.datasets.reference_counting import ReferenceCounting
from experiments.block_importance.from_checkout.picture_scorers import PackedPictureScorer
from experiments.block_importance.importance import passed_through

ONE = CropRange(1, 1)


@torch.inference_mode()
def test_each_answer_is_as_likely_as_alone(tiny_checkpoint: Path) -> None:
    model = MolmoeForConditionalGeneration.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()
    processor = MolmoeProcessor.from_pretrained(tiny_checkpoint)
    tasks = [ReferenceCounting("validation"), ReferenceCaptions("validation")]
    scorer = PackedPictureScorer(model, processor, tasks, [3, 5], ONE)
    sets = [(0, 2, 3), (0, 1, 2, 3), (0, 1), (1, 2, 3)]
    found = scorer.measured(sets)

    def alone(index: int, blocks: tuple[int, ...]) -> float:
        sample = tasks[0][index]
        inputs = processor(tasks[0].prompt(sample), sample.image, ONE)
        answer = processor.tokenizer(f" {sample.metadata['answer']}", add_special_tokens=False)["input_ids"]
        features = model.encode_image(inputs["pixel_values"], inputs["image_masks"], inputs["image_input_idx"])
        logits, state = model.prefill(inputs["input_ids"], features, active_blocks=blocks)
        values = []
        for token in [*answer, processor.tokenizer.eos_token_id]:
            values.append(float(logits.log_softmax(dim=-1)[0, token]))
            logits = model.decode_step(torch.tensor([[token]]), state)
        return sum(values) / len(values)

    for blocks, measured in zip(sets[:3], found[:3], strict=True):
        expected = [alone(index, blocks) for index in (6, 7, 10, 11)]  # two questions a picture
        assert measured["reference_counting"].values == pytest.approx(expected, abs=1e-4)
    with passed_through(model.all_blocks[0]):
        without_first = [alone(index, (0, 1, 2, 3)) for index in (6, 7, 10, 11)]
    assert found[3]["reference_counting"].values == pytest.approx(without_first, abs=1e-4)
    assert found[0]["reference_counting"].image_ids == tuple(tasks[0][index].image_id for index in (6, 7, 10, 11))
    assert len(found[0]["reference_captions"].values) == 2
