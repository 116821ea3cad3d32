"""The prefill in two parts against the whole one, on a tiny random model in float32."""

from collections.abc import Iterator

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, BatchFeature

from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration, MolmoeImageProcessor, MolmoeProcessor
from experiment_core_utils.models.molmoe.eager.paused_prefill import (
    PausedPrefill,
    begin_prefill,
    finish_prefill,
    trace_prefill,
)
from experiment_core_utils.models.molmoe.modeling_molmoe import DecodeState
from experiment_core_utils.models.molmoe.processing_molmoe import ImageTokens
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from tests.conftest import tiny_config
from tests.same_floats import assert_same_floats

WIDTH = 32
STEPS = 6


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> MolmoeForConditionalGeneration:
    torch.manual_seed(3)
    return MolmoeForConditionalGeneration(tiny_config()).eval()


@pytest.fixture(scope="module")
def inputs(model: MolmoeForConditionalGeneration) -> BatchFeature:
    """A prompt with a picture of two tiles, the left half red."""
    processor = MolmoeProcessor(
        MolmoeImageProcessor(), AutoTokenizer.from_pretrained(EMBEDDED_MODEL), ImageTokens.from_config(model.config)
    )
    picture = Image.new("RGB", (600, 300), "white")
    picture.paste((200, 30, 30), (0, 0, 300, 300))
    return processor("What is on the left?", picture, CropRange(2, 2))


def whole(
    model: MolmoeForConditionalGeneration, inputs: BatchFeature, top_k: int, blocks: tuple[int, ...]
) -> tuple[torch.Tensor, DecodeState]:
    return model.prefill(inputs["input_ids"], features_of(model, inputs), top_k=top_k, active_blocks=blocks)


def paused(
    model: MolmoeForConditionalGeneration, inputs: BatchFeature, blocks_run: int, rows: torch.Tensor | None = None
) -> PausedPrefill:
    return begin_prefill(model, inputs["input_ids"], features_of(model, inputs), blocks_run, rows)


def features_of(model: MolmoeForConditionalGeneration, inputs: BatchFeature):  # type: ignore[no-untyped-def]
    return model.encode_image(inputs["pixel_values"], inputs["image_masks"], inputs["image_input_idx"])


def greedy(model: MolmoeForConditionalGeneration, logits: torch.Tensor, state: DecodeState) -> list[int]:
    tokens = [int(logits.argmax())]
    for _ in range(STEPS):
        tokens.append(int(model.decode_step(torch.tensor([tokens[-1:]]), state).argmax()))
    return tokens


@pytest.mark.parametrize(
    ("blocks_run", "top_k", "blocks"),
    [
        # Behind block 0 alone, any top-k is still the plain one: block 0 keeps its own 4 experts whatever is chosen.
        (1, 4, (0, 1, 2, 3)),
        (1, 2, (0, 1, 3)),
        (1, 1, (0, 2)),
        # Behind more blocks it is where their top-k is the model's own.
        (2, 4, (0, 1, 3)),
        (3, 4, (0, 1, 2)),
        (4, 4, (0, 1, 2, 3)),
    ],
)
def test_the_two_parts_are_the_whole(
    model: MolmoeForConditionalGeneration, inputs: BatchFeature, blocks_run: int, top_k: int, blocks: tuple[int, ...]
) -> None:
    logits, state = whole(model, inputs, top_k, blocks)
    found, its_state = finish_prefill(model, paused(model, inputs, blocks_run), top_k, blocks)
    assert_same_floats(found, logits)
    assert len(its_state.past_key_values.layers) == len(blocks)
    for ours, plain in zip(its_state.past_key_values.layers, state.past_key_values.layers, strict=True):
        assert_same_floats(ours.keys, plain.keys)
        assert_same_floats(ours.values, plain.values)
    assert greedy(model, found, its_state) == greedy(model, logits, state)


def test_appended_rows_leave_no_trace(model: MolmoeForConditionalGeneration, inputs: BatchFeature) -> None:
    top_k, blocks = 2, (0, 1, 3)
    length = inputs["input_ids"].shape[1]
    logits, state = whole(model, inputs, top_k, blocks)
    torch.manual_seed(0)
    # Ten times as large as an embedding: were they seen, it would show.
    rows = 10 * torch.randn(1, 2, WIDTH)
    pause = paused(model, inputs, 1, rows)
    assert pause.states.shape == (1, length, WIDTH) and pause.appended.shape == (1, 2, WIDTH)
    assert [layer.get_seq_length() for layer in pause.cache.layers] == [length, 0, 0, 0]
    found, its_state = finish_prefill(model, pause, top_k, blocks)
    # Products over more rows are summed in another order.
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
    assert [layer.get_seq_length() for layer in its_state.past_key_values.layers] == [length] * 3
    assert greedy(model, found, its_state) == greedy(model, logits, state)


def test_appended_rows_see_the_prompt_and_what_stands_before_them(
    model: MolmoeForConditionalGeneration, inputs: BatchFeature
) -> None:
    row, other = torch.ones(1, 1, WIDTH), torch.full((1, 1, WIDTH), -1.0)
    alone = paused(model, inputs, 2, row).appended[0, 0]
    first, second = paused(model, inputs, 2, torch.cat([row, other], dim=1)).appended[0]
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(second, paused(model, inputs, 2, other).appended[0, 0], atol=1e-3)
    changed = BatchFeature({**inputs, "input_ids": inputs["input_ids"].clone()})
    changed["input_ids"][0, -1] += 1
    assert not torch.allclose(paused(model, changed, 2, row).appended[0, 0], alone, atol=1e-3)


def test_a_trace_is_what_a_pause_behind_each_block_would_give(
    model: MolmoeForConditionalGeneration, inputs: BatchFeature
) -> None:
    torch.manual_seed(1)
    rows = torch.randn(3, WIDTH)
    traced = trace_prefill(model, inputs["input_ids"], features_of(model, inputs), 3, rows)
    assert traced.last.shape == (3, WIDTH) and traced.appended.shape == (3, 3, WIDTH)
    for blocks_run in (1, 2, 3):
        for place, row in enumerate(rows):
            pause = paused(model, inputs, blocks_run, row[None, None])
            torch.testing.assert_close(traced.last[blocks_run - 1], pause.states[0, -1], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                traced.appended[blocks_run - 1, place], pause.appended[0, 0], rtol=1e-4, atol=1e-5
            )


def test_blocks_that_ran_before_the_pause_keep_the_models_own_experts_in_the_prefill_only(
    model: MolmoeForConditionalGeneration, inputs: BatchFeature
) -> None:
    logits, state = finish_prefill(model, paused(model, inputs, 3), 1, (0, 1, 2, 3))
    token = torch.tensor([[int(logits.argmax())]])
    step = model.decode_step(token, state)
    # The same by hand: the router of block 3 alone is turned, then those of blocks 1 and 2 too.
    model.reset_knobs()
    model.all_blocks[3].mlp.gate.top_k = 1
    by_hand, hand_state = model.prefill(inputs["input_ids"], features_of(model, inputs))
    hand_state.knobs = hand_state.knobs._replace(top_k=1)
    hand_step = model.decode_step(token, hand_state)
    assert [block.mlp.gate.top_k for block in model.all_blocks] == [4, 1, 1, 1]
    assert_same_floats(logits, by_hand)
    assert_same_floats(step, hand_step)


def test_what_cannot_be_is_refused(model: MolmoeForConditionalGeneration, inputs: BatchFeature) -> None:
    for blocks_run in (0, 5):
        with pytest.raises(ConfigurationError, match="give 1 to 4 blocks"):
            paused(model, inputs, blocks_run)
    with pytest.raises(ConfigurationError, match="leave out one of the first 3, which have run"):
        finish_prefill(model, paused(model, inputs, 3), 4, (0, 1, 3))
