"""Formulas against counted operations of tiny random models of every family, stage by stage and for whole answers."""

import itertools
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GPT2Config, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.models.costs.architecture import Architecture, UnknownArchitecture, architecture_of
from experiment_core_utils.models.costs.counters import count_flops
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.requests import RequestSize
from tests.conftest import tiny_config
from tests.models.tiny_families import (
    CROP_FAMILIES,
    HEAD_SIZE,
    IMAGE_TOKEN,
    PATCH_FAMILIES,
    TEXT_FAMILIES,
    VISION_END,
    VISION_START,
    VOCABULARY,
    build,
    crop_inputs,
    turn,
)

PROMPT = 13


def setting_of(top_k: int | None, blocks: tuple[int, ...] | None) -> Setting:
    return Setting.of(top_k=top_k, num_active_blocks=None if blocks is None else RunningBlocks.of(blocks))


# Experts per token, blocks that run, rows of the batch.
SETTINGS: list[tuple[int | None, tuple[int, ...] | None, int]] = [
    (None, None, 1),
    (1, None, 3),
    (5, (0, 1, 2, 3), 1),
    (2, (0, 3), 3),
    (None, (0, 1, 3), 1),
    (4, (1, 2), 3),
]
DENSE: list[tuple[int | None, tuple[int, ...] | None, int]] = [(None, None, 1), (None, (0, 3), 3), (None, (1,), 1)]
ALL_FAMILIES = {**TEXT_FAMILIES, **CROP_FAMILIES, **PATCH_FAMILIES}


def known(config: Any) -> Architecture:
    architecture = architecture_of(config)
    assert isinstance(architecture, Architecture)
    return architecture


def has_experts(name: str) -> bool:
    return any(part in name for part in ("moe", "mixtral", "experts", "gpt_oss", "deepseek", "aria"))


def cases() -> list[Any]:
    found = []
    for name in ALL_FAMILIES:
        settings = SETTINGS if has_experts(name) else DENSE
        # What a variant of a family differs in shows with two settings.
        chosen = settings[1::2] if "," in name else settings
        found += [pytest.param(name, *each, id=f"{name}-top{each[0]}-blocks{each[1]}") for each in chosen]
    return found


def assert_agrees(counted: int, formula: int, *positions: int) -> None:
    """Equal, except for rotary angles: some versions of transformers compute them as a product of positions
    (once, or for each row of a batch) and half a head's frequencies, for one or three coordinates, which is counted.
    """
    per_position = [head * coordinates for head in (10, HEAD_SIZE) for coordinates in (1, 3)]
    assert counted - formula in {0, *(each * number for each in per_position for number in positions)}
    assert counted == pytest.approx(formula, rel=1e-3)


@pytest.mark.parametrize(("name", "top_k", "active_blocks", "batch"), cases())
def test_prefill_and_decode_agree_with_counted_operations(
    name: str, top_k: int | None, active_blocks: tuple[int, ...] | None, batch: int
) -> None:
    config = ALL_FAMILIES[name]()
    architecture = known(config).at(setting_of(top_k, active_blocks))
    model = build(config)
    turn(model, top_k, active_blocks)
    cache = DynamicCache(config=model.config)
    prompt = torch.randint(10, VOCABULARY, (batch, PROMPT))
    prefill = count_flops(lambda: model(input_ids=prompt, past_key_values=cache, logits_to_keep=1))
    assert_agrees(prefill, batch * architecture.prefill_flops(PROMPT), PROMPT, batch * PROMPT)
    step = count_flops(lambda: model(input_ids=prompt[:, :1], past_key_values=cache, logits_to_keep=1))
    assert_agrees(step, batch * architecture.decoder.decode_flops(PROMPT + 1), 1, batch)


def generate(model: Any, output_tokens: int, prompt: torch.Tensor, **pictures: torch.Tensor) -> Any:
    lengths = {"max_new_tokens": output_tokens, "min_new_tokens": output_tokens}
    return model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **lengths, **pictures
    )


@pytest.mark.parametrize("output_tokens", [1, 4])
@pytest.mark.parametrize("name", ["llama", "mistral, window", "olmoe", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_whole_answer_agrees_with_what_generate_computes(name: str, output_tokens: int) -> None:
    """The head runs on the last position of the prompt and on each later token, and n tokens are n - 1 steps."""
    config = TEXT_FAMILIES[name]()
    flops = known(config).request_flops(RequestSize(PROMPT, output_tokens, requests=2))
    model = build(config)
    prompt = torch.randint(10, VOCABULARY, (2, PROMPT))
    counted = count_flops(lambda: generate(model, output_tokens, prompt))
    assert_agrees(counted, flops.total_flops, 2 * (PROMPT + output_tokens - 1))
    assert flops.stages.vision_flops is None
    assert flops.total_flops == flops.stages.prefill_flops + flops.decode_flops


@pytest.mark.parametrize("crops", [0, 2, 3])
@pytest.mark.parametrize("name", CROP_FAMILIES)
def test_answers_to_crops_agree_with_counted_operations(name: str, crops: int) -> None:
    config = CROP_FAMILIES[name]()
    model: Any = build(config)
    tokens, pixels = crop_inputs(name, crops) if crops else (0, {})
    prompt = torch.tensor([[10, *[IMAGE_TOKEN] * tokens, 11, 12]])
    features = tokens // crops if crops else None
    flops = known(config).request_flops(RequestSize(prompt.shape[1], 3, crops=crops, crop_features=features))
    if crops:
        encoded = count_flops(lambda: model.base_model.get_image_features(**pixels))
        assert encoded == flops.stages.vision_flops
    else:
        assert flops.stages.vision_flops is None
    counted = count_flops(lambda: generate(model, 3, prompt, **pixels))
    assert_agrees(counted, flops.total_flops, prompt.shape[1] + 2)


@pytest.mark.parametrize("grids", [[], [(4, 6)], [(4, 6), (2, 4), (2, 2)], [(10, 14)]])
@pytest.mark.parametrize("name", PATCH_FAMILIES)
def test_answers_to_pictures_of_any_size_agree_with_counted_operations(name: str, grids: list[tuple[int, int]]) -> None:
    config = PATCH_FAMILIES[name]()
    model: Any = build(config)
    patches = tuple(rows * columns for rows, columns in grids)
    parts = [[VISION_START, *[IMAGE_TOKEN] * (each // 4), VISION_END] for each in patches]  # 4 patches to a token
    prompt = torch.tensor([[*itertools.chain(*parts), 10, 11]])
    pixels = {}
    if grids:
        pixels = {
            "pixel_values": torch.rand(sum(patches), 3 * 2 * 4 * 4),  # channels, frames, 4 x 4 pixels
            "image_grid_thw": torch.tensor([(1, *grid) for grid in grids]),
        }
    flops = known(config).request_flops(RequestSize(prompt.shape[1], 3, patches=patches, grids=tuple(grids)))
    if grids:
        features = count_flops(lambda: model.base_model.get_image_features(**pixels))
        assert features == flops.stages.vision_flops
        pixels["mm_token_type_ids"] = (prompt == IMAGE_TOKEN).long()
    else:
        assert flops.stages.vision_flops is None
    counted = count_flops(lambda: generate(model, 3, prompt, **pixels))
    assert_agrees(counted, flops.total_flops, prompt.shape[1] + 2)


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen2_5_vl"])
def test_frame_pairs_of_a_video_are_pictures_of_their_own(name: str) -> None:
    config = PATCH_FAMILIES[name]()
    model: Any = build(config)
    pixels, grid = torch.rand(3 * 24, 3 * 2 * 4 * 4), torch.tensor([[3, 4, 6]])  # three pairs of 4 x 6 patches
    counted = count_flops(lambda: model.base_model.get_video_features(pixels, grid))
    assert counted == known(config).vision_flops(RequestSize(1, 1, patches=(24,) * 3, grids=((4, 6),) * 3))


def test_pictures_of_a_batch_are_a_multiple_of_one() -> None:
    config = CROP_FAMILIES["llava"]()
    model: Any = build(config)
    prompt = torch.tensor([[10, *[IMAGE_TOKEN] * 9, 11, 12]]).repeat(3, 1)
    flops = known(config).request_flops(RequestSize(prompt.shape[1], 2, crops=1, requests=3))
    counted = count_flops(lambda: generate(model, 2, prompt, pixel_values=torch.rand(3, 3, 24, 24)))
    assert_agrees(counted, flops.total_flops, 3 * (prompt.shape[1] + 1))


# --- MolmoE -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("top_k", "active_blocks"), [(None, None), (1, (0, 2)), (8, (0, 1, 3))])
def test_molmoe_agrees_with_counted_operations(top_k: int | None, active_blocks: tuple[int, ...] | None) -> None:
    model = MolmoeForConditionalGeneration(tiny_config()).eval()
    pixels, masks = torch.rand(1, 2, 3, 336, 336), torch.ones(1, 2, 576)
    places = torch.arange(2 * 144).view(1, 2, 144)
    prompt = torch.arange(300)[None]
    kept: list[Any] = []

    def answer() -> None:
        features = model.encode_image(pixels, masks, places)
        _, state = model.prefill(prompt, features, top_k=top_k, active_blocks=active_blocks)
        kept.append([model.decode_step(torch.tensor([[9]]), state) for _ in range(2)])

    architecture = known(tiny_config()).at(setting_of(top_k, active_blocks))
    by_formula = architecture.request_flops(RequestSize(300, 3, crops=2)).total_flops
    counted = count_flops(answer)
    assert counted == pytest.approx(by_formula, rel=1e-3)
    if counted != by_formula:
        # Rotary angles as products of 302 positions and half of 16 frequencies.
        assert counted - by_formula == 302 * 16


# --- knobs, published sizes, errors -------------------------------------------------------------------------------


def test_every_knob_moves_the_operations() -> None:
    architecture = known(TEXT_FAMILIES["olmoe"]())
    size = RequestSize(PROMPT, 5)
    one_expert = 6 * 40 * 96
    base = architecture.request_flops(size)
    fewer = architecture.at(Setting.of(top_k=2)).request_flops(size)
    # One of three experts less in three of four blocks.
    assert base.stages.prefill_flops - fewer.stages.prefill_flops == PROMPT * 3 * one_expert
    assert base.decode_flops - fewer.decode_flops == 4 * 3 * one_expert
    shorter = architecture.at(Setting.of(num_active_blocks=RunningBlocks.of((0, 1, 2)))).request_flops(size)
    assert base.total_flops > fewer.total_flops > shorter.stages.prefill_flops
    assert architecture.request_flops(RequestSize(PROMPT, 6)).total_flops > base.total_flops
    assert architecture.request_flops(RequestSize(PROMPT + 1, 5)).total_flops > base.total_flops
    assert architecture.request_flops(RequestSize(PROMPT, 5, requests=2)).total_flops == 2 * base.total_flops
    pictured = known(CROP_FAMILIES["llava"]())
    one, five = (pictured.vision_flops(RequestSize(PROMPT, 5, crops=crops)) for crops in (1, 5))
    assert five == 5 * (one or 0) > 0


def test_decode_per_token_is_the_mean_over_steps() -> None:
    architecture = known(TEXT_FAMILIES["llama"]())
    flops = architecture.request_flops(RequestSize(10, 4))
    steps = [architecture.decoder.decode_flops(context) for context in (11, 12, 13)]
    assert flops.decode_flops == sum(steps)
    assert flops.stages.decode_flops_per_token == sum(steps) / 3
    for output_tokens in (0, 1):
        short = architecture.request_flops(RequestSize(10, output_tokens))
        assert short.stages.decode_flops_per_token is None
        assert short.decode_flops == 0


@pytest.mark.parametrize(
    ("config", "active_parameters"),
    [
        # 32 blocks of (2 * 4096^2 + 2 * 4096 * 1024 + 3 * 4096 * 14336), and the head of 128256 rows.
        (
            LlamaConfig(
                vocab_size=128256,
                hidden_size=4096,
                intermediate_size=14336,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=8,
            ),
            32 * (41943040 + 176160768) + 525336576,
        ),
        # 32 blocks of the same attention, a router of 8 and 2 experts of 3 * 4096 * 14336, and the head of 32000 rows.
        (MixtralConfig(), 32 * (41943040 + 32768 + 2 * 176160768) + 131072000),
        # 48 blocks of (2 * 2048 * 4096 + 2 * 2048 * 512), a router of 128, 8 experts of 3 * 2048 * 768, the head.
        (
            Qwen3MoeConfig(
                hidden_size=2048,
                num_hidden_layers=48,
                num_attention_heads=32,
                num_key_value_heads=4,
                head_dim=128,
            ),
            48 * (18874368 + 262144 + 8 * 4718592) + 151936 * 2048,
        ),
    ],
)
def test_published_models_decode_with_twice_their_active_parameters(config: Any, active_parameters: int) -> None:
    """Llama-3.1-8B, Mixtral-8x7B and Qwen3-30B-A3B, without the embedding; one key costs 4 query widths a block."""
    keys = 4 * config.num_hidden_layers * 4096
    assert known(config).decoder.decode_flops(1) == 2 * active_parameters + keys


def test_an_architecture_without_formulas_has_a_reason() -> None:
    found = architecture_of(GPT2Config())
    assert isinstance(found, UnknownArchitecture) and "'gpt2'" in found.reason


@pytest.mark.parametrize(
    ("name", "size", "named"),
    [
        ("llama", RequestSize(5, 5, crops=1), "takes no pictures"),
        ("llava", RequestSize(5, 5, patches=(9,)), "no patches"),
        ("qwen3_vl", RequestSize(5, 5, crops=1), "no crops"),
        ("qwen3_vl", RequestSize(5, 5, patches=(6,)), "multiple of 4"),
        ("qwen2_5_vl", RequestSize(5, 5, patches=(24,)), "rows and columns"),
        ("aria", RequestSize(5, 5, crops=2), r"one of \[4, 6\] features each, not None"),
    ],
)
def test_pictures_that_the_model_cannot_take(name: str, size: RequestSize, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        known(ALL_FAMILIES[name]()).request_flops(size)


@pytest.mark.parametrize(
    "numbers",
    [(0, 5), (5, -1), (5, 5, -1), (5, 5, 0, (4, -4)), (5, 5, 0, (), 0)],
)
def test_sizes_that_are_not_possible(numbers: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigurationError, match="at least one prompt token"):
        RequestSize(*numbers)


@pytest.mark.parametrize("grids", [((4, 5),), ((4, 6), (2, 2)), ((-4, -6),) * 2])
def test_grids_that_are_not_those_of_the_patches(grids: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ConfigurationError, match="rows times columns"):
        RequestSize(5, 5, patches=(24,), grids=grids)
