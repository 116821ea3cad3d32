"""Decoder formulas against sums by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.models.costs.decoder import BlockShape, DecoderShape, ExpertsShape, LatentShape, MlpShape
from experiment_core_utils.primitives.errors import ConfigurationError

EXPERTS = ExpertsShape(num_experts=8, top_k=2, width=5)
SHARED = ExpertsShape(num_experts=8, top_k=2, width=5, shared_width=7, has_shared_gate=True)


def block(mlp: MlpShape | ExpertsShape, window: int | None = None) -> BlockShape:
    """4 heads and 1 key-value head of size 3."""
    return BlockShape(query_width=12, kv_width=3, window=window, mlp=mlp)


def decoder(*mlps: MlpShape | ExpertsShape, window: int | None = None) -> DecoderShape:
    return DecoderShape.of_blocks(10, [block(mlp, window) for mlp in mlps], head_rows=100)


def at(top_k: int | None = None, blocks: tuple[int, ...] | None = None) -> Setting:
    return Setting.of(top_k=top_k, num_active_blocks=None if blocks is None else RunningBlocks.of(blocks))


def test_a_gated_and_a_plain_block_by_hand() -> None:
    projections = 2 * (10 * 12 + 10 * 3 + 10 * 3 + 12 * 10)  # query, key, value, output -> 600
    head = 2 * 10 * 100  # -> 2000
    gated, plain = 2 * 3 * 10 * 6, 2 * 2 * 10 * 6  # -> 360, 240
    # 7 positions: 7 * 7 scores, and as many weights times values, over a query width of 12.
    assert decoder(MlpShape(6)).prefill_flops(7) == 7 * (projections + gated) + 4 * 49 * 12 + head == 11072
    assert decoder(MlpShape(6, is_gated=False)).prefill_flops(7) == 11072 - 7 * (gated - plain)
    # A `forward` has logits of the other 6 positions, too.
    assert decoder(MlpShape(6)).forward_flops(7) == 11072 + 6 * head
    # One token that sees 9 keys.
    assert decoder(MlpShape(6)).decode_flops(9) == projections + gated + 4 * 9 * 12 + head == 3392


def test_latent_attention_by_hand() -> None:
    """4 heads; queries and keys of 2 + 1, values of 2; queries compressed to 5, keys and values to 6."""
    latent = LatentShape(query_rank=5, kv_rank=6, rotary_width=1, expanded_width=4 * (2 + 2), value_width=8)
    block = BlockShape(query_width=12, kv_width=12, window=None, mlp=MlpShape(0), latent=latent)
    shape = DecoderShape.of_blocks(10, [block], head_rows=100)
    token = 2 * (10 * 5 + 5 * 12 + 10 * (6 + 1) + 8 * 10)  # queries twice, keys and values down, output -> 520
    key = 2 * 6 * 16  # every key up again -> 192
    pair = 2 * (12 + 8)  # score and value -> 40
    assert shape.decode_flops(9) == token + 9 * (key + pair) + 2000 == 4608
    assert shape.prefill_flops(7) == 7 * (token + key) + 49 * pair + 2000 == 8944
    assert block.weights(10) == (token + key) // 2
    assert block.cache_width == 6 + 1
    whole = BlockShape(12, 12, None, MlpShape(0), LatentShape(None, 6, 1, 16, 8))
    assert block.weights(10) - whole.weights(10) == 10 * 5 + 5 * 12 - 10 * 12


def test_experts_by_hand() -> None:
    """Router over 8 experts, 2 of width 5 run; a shared MLP of width 7 with its gate, and 4 of 8 experts."""
    dense = decoder(MlpShape(0)).decode_flops(9)
    assert decoder(EXPERTS).decode_flops(9) - dense == 2 * 10 * 8 + 2 * 2 * 3 * 10 * 5 == 760
    assert decoder(SHARED).decode_flops(9) - dense == 760 + 2 * 10 * 1 + 2 * 3 * 10 * 7 == 1200
    # Prefill of 4 tokens routes each token by itself.
    assert decoder(EXPERTS).prefill_flops(4) - decoder(MlpShape(0)).prefill_flops(4) == 4 * 760


def test_top_k_leaves_the_first_block_with_experts_alone() -> None:
    one_expert = 2 * 3 * 10 * 5
    shape = decoder(MlpShape(6), EXPERTS, EXPERTS, EXPERTS)
    for top_k in (1, 2, 8):
        turned = shape.at(at(top_k))
        assert turned.decode_flops(9) - shape.decode_flops(9) == 2 * (top_k - 2) * one_expert
    # Also where that block is skipped: the next one is not the first of the model.
    skipped, own = (shape.at(at(top_k, (0, 2))).decode_flops(9) for top_k in (8, None))
    assert skipped - own == (8 - 2) * one_expert
    kept, own = (shape.at(at(top_k, (0, 1))).decode_flops(9) for top_k in (8, None))
    assert kept == own


def test_skipped_blocks_cost_nothing() -> None:
    shape = decoder(MlpShape(6), EXPERTS, SHARED)
    head = 2 * 10 * 100
    alone = [shape.at(at(None, (index,))).prefill_flops(5) - head for index in range(3)]
    assert len(set(alone)) == 3
    assert shape.prefill_flops(5) == sum(alone) + head
    assert shape.at(at(None, (0, 2))).prefill_flops(5) == alone[0] + alone[2] + head


@pytest.mark.parametrize("top_k", [0, 9])
def test_more_experts_than_there_are(top_k: int) -> None:
    with pytest.raises(ConfigurationError, match=f"top-k {top_k} is not possible; give 1 to 8, the experts of a block"):
        decoder(EXPERTS, EXPERTS).at(at(top_k))


def test_experts_of_a_dense_model() -> None:
    with pytest.raises(ConfigurationError, match="no experts"):
        decoder(MlpShape(6)).at(at(2))


@pytest.mark.parametrize("blocks", [(), (1, 0), (0, 0), (0, 2), (-1, 0)])
def test_blocks_that_are_not_there(blocks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="from 0 to 1"):
        decoder(MlpShape(6), MlpShape(6)).at(at(None, blocks))


@given(first=st.integers(1, 40), steps=st.integers(1, 40), window=st.none() | st.integers(1, 60))
def test_a_generation_is_the_sum_of_its_steps(first: int, steps: int, window: int | None) -> None:
    shape = decoder(EXPERTS, MlpShape(6), window=window)
    by_step = sum(shape.decode_flops(context) for context in range(first, first + steps))
    assert shape.decode_flops(first, steps) == by_step


def test_a_window_by_hand() -> None:
    # Contexts 6, 7, 8, 9 with a window of 7: 6 + 7 + 7 + 7 keys; prefill computes the whole rectangle.
    wide, narrow = decoder(MlpShape(6)), decoder(MlpShape(6), window=7)
    assert wide.decode_flops(6, 4) - narrow.decode_flops(6, 4) == 4 * 12 * (30 - 27)
    assert wide.prefill_flops(20) == narrow.prefill_flops(20)
