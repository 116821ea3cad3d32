"""The formulas against counted operations of a tiny model, against a sum by hand, and MolmoE-1B's published values."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.models.costs.architecture import Architecture, architecture_of
from experiment_core_utils.models.costs.decoder import DecoderShape
from experiment_core_utils.models.costs.decoder_table import decoder_of
from experiment_core_utils.models.costs.memory import cache_elements
from experiment_core_utils.models.costs.vision_table import molmoe_vision
from experiment_core_utils.models.molmoe import MolmoeConfig, MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.costs import activation_elements, parameter_count
from tests.conftest import tiny_config

AGREEMENT = 1e-3


def vision_flops(config: MolmoeConfig, crops: int) -> int:
    return crops * molmoe_vision(config).flops_per_crop


def running(config: MolmoeConfig, experts_by_block: list[int]) -> DecoderShape:
    """The decoder with so many experts per token in each of its blocks."""
    decoder = decoder_of(config.text_config, head_rows=config.head_vocab_size)
    blocks = [decoder.blocks[0].with_top_k(experts) for experts in experts_by_block]
    return DecoderShape.of_blocks(decoder.hidden, blocks, decoder.head_rows)


@pytest.fixture(scope="module", autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> MolmoeForConditionalGeneration:
    torch.manual_seed(0)
    return MolmoeForConditionalGeneration(tiny_config()).eval()


def grouped_gemm_flops(rows: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    """[rows, in] by one of [E, in, out]: each row meets one expert."""
    return 2 * rows[0] * rows[1] * weight[2]


def attention_flops(query: torch.Size, key: torch.Size, *_: Any, **__: Any) -> int:
    """[B, heads, S, d] over [B, heads, T, d]: scores and values."""
    batch, heads, new, head_dim = query
    return 2 * 2 * batch * heads * new * key[2] * head_dim


def counted(act: Callable[[], Any]) -> int:
    counter = FlopCounterMode(
        display=False,
        custom_mapping={
            torch.ops.aten._grouped_mm: grouped_gemm_flops,
            torch.ops.transformers.grouped_mm_fallback: grouped_gemm_flops,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
        },
    )
    with counter:
        act()
    return counter.get_total_flops()


@pytest.mark.parametrize("blocks", [(0,), (0, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
def test_prefill_and_decode_agree_with_counted_operations(
    model: MolmoeForConditionalGeneration, top_k: int, blocks: tuple[int, ...]
) -> None:
    prompt = torch.arange(5, 42)[None]  # 37 tokens
    kept: list[Any] = []
    experts = [4 if block == 0 else top_k for block in blocks]
    prefill = counted(lambda: kept.append(model.prefill(prompt, top_k=top_k, active_blocks=blocks)))
    assert prefill == pytest.approx(running(model.config, experts).prefill_flops(37), rel=AGREEMENT)
    state = kept[0][1]
    steps = [counted(lambda: model.decode_step(torch.tensor([[9]]), state)) for _ in range(3)]
    for index, step in enumerate(steps):
        assert step == pytest.approx(running(model.config, experts).decode_flops(38 + index), rel=AGREEMENT)
    assert sum(steps) == pytest.approx(running(model.config, experts).decode_flops(38, 3), rel=AGREEMENT)


def config_with_unused_blocks(keep: bool) -> MolmoeConfig:
    config = tiny_config()
    config.vision_config.num_hidden_layers = 4
    config.vision_feature_layers = (-2, -3)  # blocks 2 and 1 of 0..3: block 3 is not used
    config.keep_unused_vision_blocks = keep
    return config


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("crops", [1, 3])
def test_vision_agrees_with_counted_operations(keep: bool, crops: int) -> None:
    config = config_with_unused_blocks(keep)
    model = MolmoeForConditionalGeneration(config).eval()
    pixels, masks = torch.rand(1, crops, 3, 336, 336), torch.ones(1, crops, 576)
    places = torch.arange(crops * 144).view(1, crops, 144)
    found = counted(lambda: model.encode_image(pixels, masks, places))
    assert found == pytest.approx(vision_flops(config, crops), rel=AGREEMENT)


def test_unused_vision_blocks_cost_what_a_block_costs() -> None:
    # One block on 577 tokens, width 16, MLP 32: 2 * 577 * (4 * 16^2 + 2 * 16 * 32) + 4 * 577^2 * 16.
    block = 2 * 577 * (1024 + 1024) + 4 * 332929 * 16
    kept, dropped = (vision_flops(config_with_unused_blocks(keep), 2) for keep in (True, False))
    assert kept - dropped == 2 * block


def test_a_decode_step_by_hand() -> None:
    """Width 32, 2 heads, 8 experts of width 16; one token that sees 10 keys, in two blocks with 4 and 2 experts."""
    config = tiny_config()
    projections = 8 * 32 * 32  # query, key, value, output: 2 * 32 * 32 each -> 8192
    attention = 4 * 10 * 32  # scores and values -> 1280
    router = 2 * 32 * 8  # -> 512
    expert = 6 * 32 * 16  # gate, up, down: 2 * 32 * 16 each -> 3072
    head = 2 * 32 * config.head_vocab_size
    by_hand = 2 * (8192 + 1280 + 512) + (4 + 2) * 3072 + head
    assert (projections, attention, router, expert) == (8192, 1280, 512, 3072)
    assert running(config, [4, 2]).decode_flops(10) == by_hand == 38400 + head


def test_a_crop_by_hand() -> None:
    """Two vision blocks of width 16, MLP 32; 576 patches of 14 x 14 and the class token; projector 16, text 32."""
    embedding = 2 * 576 * (3 * 14 * 14) * 16
    block = 2 * 577 * (4 * 16 * 16 + 2 * 16 * 32) + 4 * 577 * 577 * 16
    query = 2 * 144 * 32 * 16
    keys_and_values = 2 * (2 * 576 * 32 * 16)
    pooling = 4 * 144 * 4 * 16
    output = 2 * 144 * 16 * 16
    projector = 2 * 144 * (2 * 16 * 16 + 16 * 32)
    connector = query + keys_and_values + pooling + output + projector
    assert vision_flops(tiny_config(), 3) == 3 * (embedding + 2 * block + connector)


# --- MolmoE-1B ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def molmoe_1b() -> MolmoeConfig:
    return MolmoeConfig()


def test_molmoe_1b_vision_per_crop(molmoe_1b: MolmoeConfig) -> None:
    connector = 6.9
    assert vision_flops(molmoe_1b, 1) / 1e9 == pytest.approx(350.1 + connector, abs=0.1)
    whole = MolmoeConfig(keep_unused_vision_blocks=True)
    assert vision_flops(whole, 1) / 1e9 == pytest.approx(366.0 + connector, abs=0.1)
    assert (vision_flops(whole, 1) - vision_flops(molmoe_1b, 1)) / 1e9 == pytest.approx(15.88, abs=0.005)


def test_molmoe_1b_per_token_and_block(molmoe_1b: MolmoeConfig) -> None:
    head = 2 * 2048 * 50304 if molmoe_1b.head_vocab_size == 50304 else 2 * 2048 * 50432
    one, two = (running(molmoe_1b, [k]).decode_flops(1) for k in (1, 2))
    assert two - one == 6 * 2048 * 1024  # 12.6 MFLOP an expert
    # Projections 33.6, router 0.26, one expert 12.6, one key 0.008 MFLOP.
    assert (one - head) / 1e6 == pytest.approx(33.55 + 0.262 + 12.58 + 0.008, abs=0.01)
    assert running(molmoe_1b, [1]).decode_flops(2) - one == 8192
    assert head / 1e6 == pytest.approx(206, abs=1)


@pytest.mark.parametrize(
    ("crops", "prompt", "vision", "prefill", "twelve_blocks", "decode"),
    [
        (2, 348, 0.75, (0.76, 0.48, 0.27), 0.57, (2.40, 1.60, 0.99)),
        (5, 612, 1.86, (1.37, 0.87, 0.50), 1.02, (2.44, 1.63, 1.03)),
        (13, 1228, 4.85, (2.84, 1.85, 1.11), 2.13, (2.52, 1.71, 1.11)),
    ],
)
def test_molmoe_1b_at_three_sizes(
    molmoe_1b: MolmoeConfig,
    crops: int,
    prompt: int,
    vision: float,
    prefill: tuple[float, ...],
    twelve_blocks: float,
    decode: tuple[float, ...],
) -> None:
    whole = MolmoeConfig(keep_unused_vision_blocks=True)
    assert vision_flops(whole, crops) / 1e12 == pytest.approx(vision, abs=0.0051)
    for k, prefill_tera, decode_giga in zip((8, 4, 1), prefill, decode, strict=True):
        assert running(molmoe_1b, [k] * 16).prefill_flops(prompt) / 1e12 == pytest.approx(prefill_tera, abs=0.0051)
        assert running(molmoe_1b, [k] * 16).decode_flops(prompt) / 1e9 == pytest.approx(decode_giga, abs=0.0051)
    assert running(molmoe_1b, [8] * 12).prefill_flops(prompt) / 1e12 == pytest.approx(twelve_blocks, abs=0.0051)


def test_molmoe_1b_decode_agrees_with_its_active_parameters(molmoe_1b: MolmoeConfig) -> None:
    """Twice the 1.179 G active text parameters, and 8192 * 16 for each key."""
    without_keys = running(molmoe_1b, [8] * 16).decode_flops(0)
    assert math.isclose(without_keys, 2 * 1.179e9, rel_tol=2e-3)


def test_parameters_and_cache_are_those_of_a_real_model() -> None:
    config = tiny_config()
    model = MolmoeForConditionalGeneration(config).eval()
    assert parameter_count(config) == sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        _, state = model.prefill(torch.arange(5, 15)[None], None, top_k=2, active_blocks=(0, 1, 3))
    held = sum(
        layer.keys.numel() + layer.values.numel() for layer in state.past_key_values.layers if layer.is_initialized
    )
    # Keys and values of 10 positions, 3 blocks, width 32.
    architecture = architecture_of(tiny_config())
    assert isinstance(architecture, Architecture)
    blocks = architecture.at(Setting.of(num_active_blocks=RunningBlocks.of((0, 1, 3)))).decoder.blocks
    assert cache_elements(blocks, 10) == 2 * 10 * 3 * 32 == held


def test_the_vision_stage_by_hand() -> None:
    # A crop: 3 * 336^2 pixels; 576 patches kept from 2 blocks of width 16; an MLP of 577 * (2 * 16 + 2 * 32), which is
    # wider than the pooling, 2 * 18432 + 2 * 576 * 16 = 55296.
    crop = 338_688 + 18_432 + 55_392
    assert activation_elements(tiny_config(), 3, 100, 4) == 3 * crop


def test_the_prefill_by_hand() -> None:
    # 100 tokens: 3 * 32 of the residual, and 4 experts' rows of 2 * 32 + 3 * 16, which is wider than 4 * 32.
    assert activation_elements(tiny_config(), 0, 100, 4) == 100 * (96 + 448)
    # With one expert (112) attention's 4 * 32 is the wider.
    assert activation_elements(tiny_config(), 0, 100, 1) == 100 * (96 + 128)
