"""Packed questions: the layout by hand, and that each gets the logits that it would get alone."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.molmoe.processing_molmoe import ImageTokens, MolmoeProcessor
from experiments.reference_model.batches import TrainingBatch
from experiments.reference_model.packing import IGNORED, Slot, pack_slots, slot_block_mask, slot_mask, slot_positions
from experiments.reference_model.recipe import OptimiserRecipe
from experiments.reference_model.trainer import Trainer, dense_experts
from tests.experiments.reference_model.tiny import TOKENIZER, tiny_model, tiny_processor


def test_slots_lie_side_by_side_with_labels_one_ahead() -> None:
    scenes = [[Slot([10, 11], [20, 0]), Slot([12], [21, 22, 0], weight=0.5)], [Slot([13], [23, 0]), Slot([14], [0])]]
    packed = pack_slots(scenes, pad_id=1, multiple=4)
    assert packed.widths == (4, 4)
    assert packed.input_ids.tolist() == [[10, 11, 20, 1, 12, 21, 22, 1], [13, 23, 1, 1, 14, 1, 1, 1]]
    n = IGNORED
    assert packed.labels.tolist() == [[n, 20, 0, n, 21, 22, 0, n], [23, 0, n, n, 0, n, n, n]]
    assert packed.weights[0].tolist() == [0, 1, 1, 0, 0.5, 0.5, 0.5, 0]


def test_positions_count_on_from_the_prefix_in_each_slot() -> None:
    assert slot_positions(3, [2, 3], 10).tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 0, 0]


def test_mask_keeps_slots_apart() -> None:
    """Prefix 0-1, slots 2-3 and 4-5, padding 6."""
    seen = [[column for column in range(7) if row[column]] for row in slot_mask(2, [2, 2], 7)[0, 0].tolist()]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 4, 5], [6]]


def test_the_mask_is_on_the_device_that_is_asked_for() -> None:
    assert slot_mask(2, [1, 1], 4, "meta").device.type == "meta"


def test_the_block_mask_is_the_same_mask() -> None:
    """Prefix of 150, slots to 250 and 290, padding to 300, in blocks of 128: those above the diagonal are empty."""
    block_mask = slot_block_mask(150, [100, 40], 300, torch.device("cpu"))
    dense = create_mask(block_mask.mask_mod, 1, 1, 300, 300, device="cpu")
    assert torch.equal(dense, slot_mask(150, [100, 40], 300))
    assert block_mask.to_dense()[0, 0].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    # A prefix of 10, slots to 256 and 384: the second slot sees nothing of the first one's last block.
    apart = slot_block_mask(10, [246, 128], 384, torch.device("cpu"))
    assert apart.to_dense()[0, 0].tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize("crops", [CropRange(1, 1), CropRange(2, 4)])
def test_packed_logits_are_those_of_each_question_alone(crops: CropRange) -> None:
    model, processor = tiny_model(), tiny_processor()
    trainer = Trainer(model, processor, OptimiserRecipe(), compile_blocks=False)
    image = torch.randint(0, 256, (90, 130, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    prompts = ["what is written?", "how many red shapes are there?"]
    slots = [Slot(TOKENIZER(prompt, add_special_tokens=False)["input_ids"], [5, 0]) for prompt in prompts]
    packed = pack_slots([slots], TOKENIZER.pad_token_id)
    tiling = processor.tiling_for(90, 130, crops)
    logits = []
    model.lm_head.register_forward_hook(lambda module, given, output: logits.append(output))
    whole = MolmoeProcessor(processor, TOKENIZER, ImageTokens.from_config(model.config))
    with torch.no_grad():
        trainer.forward(TrainingBatch("low", image[None], tiling, packed, torch.zeros(1, 2), None))
        start = 0
        for prompt, slot, width in zip(prompts, slots, packed.widths, strict=True):
            alone = model(**whole(prompt, image.numpy(), crops)).logits[0, -len(slot.prompt) :]
            torch.testing.assert_close(logits[0][0, start : start + len(slot.prompt)], alone, atol=2e-5, rtol=1e-4)
            start += width


def test_dense_experts_compute_what_the_router_chooses() -> None:
    block = tiny_model().model.language_model.layers[1].mlp
    states = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        dense, _ = dense_experts(block, states.flatten(0, 1))
        torch.testing.assert_close(dense.view(2, 7, 32), block(states), atol=1e-5, rtol=1e-4)
        block.gate.top_k = 2
        fewer, _ = dense_experts(block, states.flatten(0, 1))
        routed = block(states)
        block.gate.top_k = 4
        kept, _ = dense_experts(block, states.flatten(0, 1), torch.tensor([1.0, 1.0, 0.0, 0.0]))
    torch.testing.assert_close(fewer.view(2, 7, 32), routed, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(kept, fewer, atol=1e-5, rtol=1e-4)


def test_the_routers_losses_by_hand() -> None:
    block = tiny_model().model.language_model.layers[1].mlp
    block.gate.top_k = 1
    with torch.no_grad():
        block.gate.weight.zero_()
        block.gate.weight[0, 0] = math.log(9)
        # Two tokens whose first number is 1 and 1/2: the logits are (log 9, 0, ...) and (log 3, 0, ...).
        states = torch.zeros(2, 32)
        states[:, 0] = torch.tensor([1.0, 0.5])
        _, (balance, router_z, negative_entropy) = dense_experts(block, states)
    # Probabilities: 9/16 and seven times 1/16; 3/10 and seven times 1/10. Both tokens go to the first expert.
    assert float(balance) == pytest.approx(8 * (9 / 16 + 3 / 10) / 2)
    assert float(router_z) == pytest.approx((math.log(16) ** 2 + math.log(10) ** 2) / 2)
    one, other = 9 / 16 * math.log(9 / 16) + 7 / 16 * math.log(1 / 16), 0.3 * math.log(0.3) + 0.7 * math.log(0.1)
    assert float(negative_entropy) == pytest.approx((one + other) / 2)
