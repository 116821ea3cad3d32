"""The decoder's knobs, padded batches and the three stages of a tiny random MolmoE in float32."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import BatchFeature

from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration, MolmoeImageProcessor, MolmoeProcessor
from experiment_core_utils.models.molmoe.processing_molmoe import ImageTokens
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.conftest import tiny_config
from tests.same_floats import assert_same_floats

LAYERS = "model.language_model.layers."
PROMPT = torch.tensor([[7, 20, 33, 46, 59, 72, 85, 98]])
NEW_TOKENS = 6


@pytest.fixture(scope="module", autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def original() -> MolmoeForConditionalGeneration:
    torch.manual_seed(7)
    return MolmoeForConditionalGeneration(tiny_config()).eval()


@pytest.fixture
def model(original: MolmoeForConditionalGeneration) -> Iterator[MolmoeForConditionalGeneration]:
    yield original
    original.reset_knobs()


def built_with_blocks(original: MolmoeForConditionalGeneration, kept: Sequence[int]) -> MolmoeForConditionalGeneration:
    """A model whose config has `len(kept)` blocks, with the weights of the kept ones renumbered 0, 1, ..."""
    config = tiny_config()
    config.text_config.num_hidden_layers = len(kept)
    weights = {}
    for name, tensor in original.state_dict().items():
        if name.startswith(LAYERS):
            block, rest = name.removeprefix(LAYERS).split(".", 1)
            if int(block) in kept:
                weights[f"{LAYERS}{kept.index(int(block))}.{rest}"] = tensor
        else:
            weights[name] = tensor
    built = MolmoeForConditionalGeneration(config).eval()
    built.load_state_dict(weights, strict=True)
    return built


def built_with_top_k(original: MolmoeForConditionalGeneration, top_k: int) -> MolmoeForConditionalGeneration:
    """A model whose config says `top_k` experts a token, except that block 0 keeps the original's four."""
    config = tiny_config()
    config.text_config.num_experts_per_tok = top_k
    built = MolmoeForConditionalGeneration(config).eval()
    built.load_state_dict(original.state_dict(), strict=True)
    built.model.language_model.layers[0].mlp.gate.top_k = 4
    return built


def greedy(model: MolmoeForConditionalGeneration, inputs: BatchFeature, steps: int = NEW_TOKENS) -> torch.Tensor:
    """[B, steps] tokens by the three stages, under the setting in force."""
    mask = inputs.get("attention_mask")
    top_k, blocks = model.active_setting
    features = None
    if "pixel_values" in inputs:
        features = model.encode_image(inputs["pixel_values"], inputs["image_masks"], inputs["image_input_idx"])
    logits, state = model.prefill(inputs["input_ids"], features, attention_mask=mask, top_k=top_k, active_blocks=blocks)
    tokens = [logits.argmax(dim=-1, keepdim=True)]
    while len(tokens) < steps:
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
        logits = model.decode_step(tokens[-1], state, attention_mask=mask)
        tokens.append(logits.argmax(dim=-1, keepdim=True))
    return torch.cat(tokens, dim=1)


def generated(model: MolmoeForConditionalGeneration, inputs: BatchFeature, steps: int = NEW_TOKENS) -> torch.Tensor:
    output = model.generate(**inputs, max_new_tokens=steps, do_sample=False, eos_token_id=None)
    return output[:, inputs["input_ids"].shape[1] :]


def left_padded(rows: Sequence[BatchFeature], pad_token: int) -> BatchFeature:
    """One batch: prompts padded on the left, pictures with crops of -1 behind, places moved by the padding."""
    length = max(row["input_ids"].shape[1] for row in rows)
    shifts = [length - row["input_ids"].shape[1] for row in rows]
    pad = torch.nn.functional.pad
    pairs = list(zip(rows, shifts, strict=True))
    ids = torch.cat([pad(row["input_ids"], (shift, 0), value=pad_token) for row, shift in pairs])
    mask = torch.cat([pad(torch.ones_like(row["input_ids"]), (shift, 0)) for row, shift in pairs])
    batch = BatchFeature({"input_ids": ids, "attention_mask": mask})
    if "pixel_values" in rows[0]:
        crops = max(row["pixel_values"].shape[1] for row in rows)
        missing = [crops - row["pixel_values"].shape[1] for row in rows]
        places = [torch.where(row["image_input_idx"] < 0, -100, row["image_input_idx"] + shift) for row, shift in pairs]
        for name, values, tail, value in (
            ("pixel_values", [row["pixel_values"] for row in rows], (0,) * 6, -1.0),
            ("image_masks", [row["image_masks"] for row in rows], (0,) * 2, -1.0),
            ("image_input_idx", places, (0,) * 2, -100),
        ):
            batch[name] = torch.cat(
                [pad(v, (*tail, 0, lack), value=value) for v, lack in zip(values, missing, strict=True)]
            )
    return batch


@pytest.fixture(scope="module")
def pictures() -> list[BatchFeature]:
    """Two requests with pictures: 1 x 1 tiles (2 crops) and 2 x 1 tiles (3 crops), prompts of other lengths."""
    processor = MolmoeProcessor(MolmoeImageProcessor(), None, ImageTokens.from_config(tiny_config()))
    noise = torch.Generator().manual_seed(3)
    made = []
    for height, width, tiles, prompt in ((300, 320, 1, [11, 12, 13]), (500, 260, 2, [11, 12, 13, 14, 15])):
        pixels = torch.randint(0, 256, (height, width, 3), generator=noise, dtype=torch.uint8).numpy()
        image = processor.image_processor.preprocess(Image.fromarray(pixels), CropRange(tiles, tiles))
        made.append(processor.assemble(prompt, image))
    assert [row["pixel_values"].shape[1] for row in made] == [2, 3]
    return made


# --- which blocks run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [(0,), (0, 2), (0, 1, 3), (0, 1, 2, 3)])
def test_skipping_blocks_equals_a_model_built_without_them(
    model: MolmoeForConditionalGeneration, kept: tuple[int, ...]
) -> None:
    smaller = built_with_blocks(model, kept)
    inputs = BatchFeature({"input_ids": PROMPT})
    with model.knobs(active_blocks=kept):
        assert_same_floats(model(input_ids=PROMPT).logits, smaller(input_ids=PROMPT).logits)
        assert torch.equal(greedy(model, inputs), greedy(smaller, inputs))
        assert torch.equal(generated(model, inputs), generated(smaller, inputs))
        assert torch.equal(generated(model, inputs), greedy(model, inputs))


def test_a_skipped_block_is_not_run_and_has_no_cache_entry(model: MolmoeForConditionalGeneration) -> None:
    ran: list[int] = []
    hooks = [
        block.register_forward_hook(lambda *_, index=index: ran.append(index))
        for index, block in enumerate(model.all_blocks)
    ]
    try:
        logits, state = model.prefill(PROMPT, active_blocks=(0, 3))
        assert ran == [0, 3]
        model.decode_step(logits.argmax(dim=-1, keepdim=True), state)
        assert ran == [0, 3, 0, 3]
    finally:
        for hook in hooks:
            hook.remove()
    # 8 prompt positions and 1 decode step, in 2 layers and no third.
    assert [layer.get_seq_length() for layer in state.past_key_values.layers] == [9, 9]


def test_a_decode_step_returns_to_the_setting_of_its_prefill(model: MolmoeForConditionalGeneration) -> None:
    token = torch.tensor([[5]])
    _, state = model.prefill(PROMPT, top_k=1, active_blocks=(0, 2))
    expected = model.decode_step(token, state)
    _, again = model.prefill(PROMPT, top_k=1, active_blocks=(0, 2))
    model.prefill(PROMPT)  # another request at another setting in between
    assert_same_floats(model.decode_step(token, again), expected)
    assert model.active_setting == (1, (0, 2))


# --- experts per token ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_top_k_equals_a_model_built_with_it_where_block_0_keeps_its_own(
    model: MolmoeForConditionalGeneration, top_k: int
) -> None:
    built = built_with_top_k(model, top_k)
    inputs = BatchFeature({"input_ids": PROMPT})
    plain = model(input_ids=PROMPT).logits
    with model.knobs(top_k=top_k):
        assert [block.mlp.gate.top_k for block in model.all_blocks] == [4, top_k, top_k, top_k]
        knobbed = model(input_ids=PROMPT).logits
        assert_same_floats(knobbed, built(input_ids=PROMPT).logits)
        assert torch.equal(generated(model, inputs), generated(built, inputs))
    assert not torch.allclose(knobbed, plain, atol=1e-4)


def test_both_knobs_together(model: MolmoeForConditionalGeneration) -> None:
    built = built_with_blocks(model, (0, 1, 3))
    for layer in built.model.language_model.layers[1:]:
        layer.mlp.gate.top_k = 2
    with model.knobs(top_k=2, active_blocks=(0, 1, 3)):
        assert_same_floats(model(input_ids=PROMPT).logits, built(input_ids=PROMPT).logits)


# --- setting and restoring --------------------------------------------------------------------------------------


def test_knobs_come_back_after_the_block_and_after_an_error(model: MolmoeForConditionalGeneration) -> None:
    plain = model(input_ids=PROMPT).logits
    model.set_knobs(top_k=3, active_blocks=(0, 1))

    def fail_inside() -> None:
        with model.knobs(top_k=1, active_blocks=(0, 2, 3)):
            assert model.active_setting == (1, (0, 2, 3))
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert model.active_setting == (3, (0, 1))
    assert [block.mlp.gate.top_k for block in model.all_blocks] == [4, 3, 3, 3]
    model.reset_knobs()
    assert model.active_setting == (4, (0, 1, 2, 3))
    assert [block.self_attn.layer_idx for block in model.all_blocks] == [0, 1, 2, 3]
    assert model.config.text_config.num_hidden_layers == 4
    assert_same_floats(model(input_ids=PROMPT).logits, plain)


@pytest.mark.parametrize(
    ("top_k", "blocks", "message"),
    [
        (0, None, "top_k 0 is not possible: the model has 8 experts"),
        (9, None, "top_k 9 is not possible"),
        (None, (), r"active blocks \[\]"),
        (None, (1, 2), r"\[1, 2\].*begin with block 0"),
        (None, (0, 2, 1), r"\[0, 2, 1\].*ascending"),
        (None, (0, 1, 1), r"\[0, 1, 1\]"),
        (None, (0, 4), r"\[0, 4\].*below 4"),
        (None, (0, -1), r"\[0, -1\]"),
    ],
)
def test_an_impossible_setting_is_refused_and_changes_nothing(
    model: MolmoeForConditionalGeneration, top_k: int | None, blocks: tuple[int, ...] | None, message: str
) -> None:
    model.set_knobs(2, (0, 3))
    with pytest.raises(ConfigurationError, match=message):
        model.set_knobs(top_k, blocks)
    assert model.active_setting == (2, (0, 3))
    assert len(model.model.language_model.layers) == 2


def test_a_copy_turns_its_own_knobs(model: MolmoeForConditionalGeneration) -> None:
    model.set_knobs(2, (0, 2))
    duplicate = copy.deepcopy(model)
    model.reset_knobs()
    assert duplicate.active_setting == (2, (0, 2))
    assert duplicate.num_total_blocks == 4
    assert not {id(block) for block in duplicate.all_blocks} & {id(block) for block in model.all_blocks}
    plain = model(input_ids=PROMPT).logits
    duplicate.reset_knobs()
    assert_same_floats(duplicate(input_ids=PROMPT).logits, plain)
    for parameter in duplicate.parameters():
        parameter.mul_(0.5)
    halved = duplicate(input_ids=PROMPT).logits
    with duplicate.knobs(top_k=1, active_blocks=(0, 1)):
        assert model.active_setting == (4, (0, 1, 2, 3))
    assert_same_floats(duplicate(input_ids=PROMPT).logits, halved)
    assert_same_floats(model(input_ids=PROMPT).logits, plain)


def test_saving_while_knobs_are_turned_saves_every_block(model: MolmoeForConditionalGeneration, tmp_path: Path) -> None:
    plain = model(input_ids=PROMPT).logits
    with model.knobs(top_k=1, active_blocks=(0, 2)):
        model.save_pretrained(tmp_path)
        assert model.active_setting == (1, (0, 2))
    loaded = MolmoeForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert loaded.num_total_blocks == 4
    assert loaded.default_top_k == 4
    assert_same_floats(loaded(input_ids=PROMPT).logits, plain)


def test_a_change_of_dtype_while_knobs_are_turned_reaches_every_block(model: MolmoeForConditionalGeneration) -> None:
    duplicate = copy.deepcopy(model)
    duplicate.set_knobs(2, (0, 2))
    duplicate.to(torch.bfloat16)
    assert duplicate.active_setting == (2, (0, 2))
    duplicate.reset_knobs()
    assert {parameter.dtype for parameter in duplicate.parameters()} == {torch.bfloat16}
    assert duplicate(input_ids=PROMPT).logits.dtype == torch.bfloat16


# --- batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("top_k", "blocks"), [(4, (0, 1, 2, 3)), (2, (0, 3))])
def test_left_padded_prompts_give_the_tokens_of_each_alone(
    model: MolmoeForConditionalGeneration, top_k: int, blocks: tuple[int, ...]
) -> None:
    rows = [BatchFeature({"input_ids": PROMPT}), BatchFeature({"input_ids": PROMPT[:, :3] + 1})]
    batch = left_padded(rows, pad_token=model.config.pad_token_id)
    assert batch["attention_mask"].tolist() == [[1] * 8, [0] * 5 + [1] * 3]
    with model.knobs(top_k, blocks):
        alone = torch.cat([greedy(model, row) for row in rows])
        assert torch.equal(greedy(model, batch), alone)
        assert torch.equal(generated(model, batch), alone)


def test_positions_count_real_tokens_only(model: MolmoeForConditionalGeneration) -> None:
    seen: list[list[list[int]]] = []
    hook = model.model.language_model.rotary_emb.register_forward_pre_hook(
        lambda _module, args, kwargs: seen.append((kwargs["position_ids"] if kwargs else args[1]).tolist()),
        with_kwargs=True,
    )
    rows = [BatchFeature({"input_ids": PROMPT[:, :4]}), BatchFeature({"input_ids": PROMPT[:, :2]})]
    try:
        greedy(model, left_padded(rows, pad_token=1), steps=2)
    finally:
        hook.remove()
    assert seen == [[[0, 1, 2, 3], [0, 0, 0, 1]], [[4], [2]]]


def test_pictures_of_unlike_size_give_the_tokens_of_each_alone(
    model: MolmoeForConditionalGeneration, pictures: list[BatchFeature]
) -> None:
    batch = left_padded(pictures, pad_token=model.config.pad_token_id)
    assert batch["pixel_values"].shape[:2] == (2, 3)
    assert (batch["pixel_values"][0, 2] == -1).all()  # the padding crop
    alone = torch.cat([greedy(model, row) for row in pictures])
    assert torch.equal(greedy(model, batch), alone)
    assert torch.equal(generated(model, batch), alone)
    features = model.encode_image(batch["pixel_values"], batch["image_masks"], batch["image_input_idx"])
    assert features.pooler_output.shape == (2, 3 * 144, 32)


def test_generate_with_a_picture_equals_the_three_stages(
    model: MolmoeForConditionalGeneration, pictures: list[BatchFeature]
) -> None:
    for row in pictures:
        assert torch.equal(generated(model, row), greedy(model, row))
    with model.knobs(2, (0, 1, 3)):
        assert torch.equal(generated(model, pictures[1]), greedy(model, pictures[1]))


def test_features_are_added_at_their_places_and_dropped_ones_nowhere(
    model: MolmoeForConditionalGeneration, pictures: list[BatchFeature]
) -> None:
    row = pictures[1]
    features = model.encode_image(row["pixel_values"], row["image_masks"], row["image_input_idx"])
    embedded = model.model.embed(row["input_ids"], features)
    expected = model.model.embed(row["input_ids"], None).clone()
    for place, feature in zip(row["image_input_idx"].flatten().tolist(), features.pooler_output[0], strict=True):
        if place >= 0:
            expected[0, place] += feature
    torch.testing.assert_close(embedded, expected)


def test_bfloat16_runs_and_stays_near_float32(
    model: MolmoeForConditionalGeneration, pictures: list[BatchFeature]
) -> None:
    half = copy.deepcopy(model).to(torch.bfloat16)
    row = pictures[0]
    features = half.encode_image(row["pixel_values"], row["image_masks"], row["image_input_idx"])
    logits, state = half.prefill(row["input_ids"], features, top_k=2, active_blocks=(0, 1, 2))
    step = half.decode_step(logits.argmax(dim=-1, keepdim=True), state)
    assert features.pooler_output.dtype == logits.dtype == step.dtype == torch.bfloat16
    assert torch.isfinite(step).all()
    half.reset_knobs()
    rounded, exact = (each(input_ids=PROMPT).logits.float() for each in (half, model))
    assert float(torch.nn.functional.cosine_similarity(rounded, exact, dim=-1).min()) > 0.95
