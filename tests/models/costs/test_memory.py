"""Caches and weights by formula, against real caches and by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from experiment_core_utils.models.costs.active_shapes import architecture_in_force
from experiment_core_utils.models.costs.decoder import BlockShape, ExpertsShape, LatentShape, MlpShape
from experiment_core_utils.models.costs.memory import (
    ModelBytes,
    RoutedBytes,
    activation_elements,
    cache_elements,
    read_elements,
    step_weights,
)
from tests.models.tiny_families import TEXT_FAMILIES, VOCABULARY, build, turn
from tests.tiny_models.tiny_causal_models import causal_model, llama_config, olmoe_config


def block(kv_width: int, window: int | None = None) -> BlockShape:
    return BlockShape(query_width=8, kv_width=kv_width, window=window, mlp=MlpShape(4))


def test_a_cache_by_hand() -> None:
    # Keys and values of width 4 at 10 positions, and of width 6 at the last 4 of a window of 5.
    assert cache_elements([block(4), block(6, window=5)], 10) == 2 * 10 * 4 + 2 * 4 * 6
    assert cache_elements([block(6, window=5)], 3) == 2 * 3 * 6


def test_keys_that_steps_read_by_hand() -> None:
    # Steps over 4, 5 and 6 keys; the window lets 4, 5 and 5 through.
    assert read_elements([block(4), block(6, window=5)], range(4, 7)) == 2 * 15 * 4 + 2 * 14 * 6


def test_the_largest_activations_by_hand() -> None:
    """Of 7 tokens, hidden width 5: 3 x 5 and the widest part of any block."""
    plain = BlockShape(query_width=8, kv_width=4, window=3, mlp=MlpShape(11, is_gated=False))
    # Attention 2 x 8 + 2 x 4 is wider than 2 x 11; gated 3 x 11 is wider than attention.
    assert activation_elements(5, [plain], 7) == 7 * (15 + 24)
    gated = replace(plain, mlp=MlpShape(11))
    assert activation_elements(5, [gated, plain], 7) == activation_elements(5, [plain, gated], 7) == 7 * (15 + 33)
    # 2 experts of 2 x 5 + 3 x 6, and a shared one of 3 x 9.
    routed = replace(plain, mlp=ExpertsShape(num_experts=8, top_k=2, width=6, shared_width=9))
    assert activation_elements(5, [gated, routed, plain], 7) == 7 * (15 + 2 * 28 + 27)
    assert activation_elements(5, [routed.with_top_k(1), plain], 7) == 7 * (15 + 28 + 27)
    # Latent attention: queries 8, expanded keys and values 30, the rotary part 2, the result 12.
    latent = LatentShape(query_rank=None, kv_rank=6, rotary_width=2, expanded_width=30, value_width=12)
    assert activation_elements(5, [replace(gated, latent=latent)], 7) == 7 * (15 + 52)


def test_bytes_of_activations_need_the_hidden_width() -> None:
    known = ModelBytes(100, 30.0, (block(4),), element_bytes=2, hidden=5)
    assert known.activation_bytes(7) == 2 * 7 * (15 + 2 * 8 + 2 * 4)
    assert replace(known, hidden=None).activation_bytes(7) is None


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("tokens", [5, 13])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama, wide heads",
        "mistral, window",
        "qwen2, window in two blocks",
        "olmoe",
        "qwen3_moe",
        "gpt_oss",
        "deepseek_v3",
    ],
)
def test_a_cache_is_as_large_as_a_real_one(name: str, tokens: int, steps: int) -> None:
    model: Any = build(TEXT_FAMILIES[name]())
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.randint(10, VOCABULARY, (3, tokens)), past_key_values=cache)
        for _ in range(steps):
            model(input_ids=torch.full((3, 1), 11), past_key_values=cache)
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    architecture: Any = architecture_in_force(model)
    assert held == 3 * cache_elements(architecture.decoder.blocks, tokens + steps)


def test_a_turned_model_has_the_cache_of_its_blocks() -> None:
    model: Any = build(TEXT_FAMILIES["olmoe"]())
    turn(model, None, (0, 3))
    architecture: Any = architecture_in_force(model)
    # Two blocks, 2 key-value heads of 40 / 4.
    assert cache_elements(architecture.decoder.blocks, 7) == 2 * 2 * 7 * 20


def test_experts_that_rows_read() -> None:
    experts = RoutedBytes(stored=6400, num_experts=8, top_k=2)
    assert experts.read(rows=1) == 1600.0
    # Two rows: 2 of 8, and of the other 6 a quarter: 3.5 of 8.
    assert experts.read(rows=2) == 6400 * 3.5 / 8
    assert experts.read(rows=1000) == pytest.approx(6400)


def test_the_weights_of_a_step_by_hand() -> None:
    llama: Any = causal_model(llama_config())
    weights = step_weights(list(llama.model.layers), llama.lm_head, [None, None])
    # Four bytes each; in a block query and output, key and value, three products of the MLP, two norms; the head.
    dense = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32 * 64
    assert (weights.always, weights.routed, weights.read(7)) == (4 * dense, (), 4 * dense)


def test_the_weights_of_a_step_with_experts_by_hand() -> None:
    olmoe: Any = causal_model(olmoe_config())
    weights = step_weights(list(olmoe.model.layers), olmoe.lm_head, [(8, 4), (8, 1)])
    # In a block four products of attention with norms of queries and keys, the router, two norms; 8 experts of three
    # products of 32 x 16.
    rest = 2 * (4 * 32 * 32 + 2 * 32 + 32 * 8 + 2 * 32) + 32 * 64
    experts = 4 * 8 * 3 * 32 * 16
    assert weights.always == 4 * rest
    assert weights.read(rows=1) == 4 * rest + experts * 4 / 8 + experts * 1 / 8


def test_shared_experts_are_read_always() -> None:
    model: Any = build(TEXT_FAMILIES["qwen2_moe"]())
    weights = step_weights(list(model.model.layers), model.lm_head, [(6, 3)] * 4)
    # 6 experts of three products of 40 x 24.
    assert [each.stored for each in weights.routed] == [4 * 6 * 3 * 40 * 24] * 4
