"""Ids in marked memory become the experts of each block; too few, repeated or unknown experts are refused."""

import pytest
import torch

from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.expert_trace import (
    NOT_WRITTEN,
    ExpertRecord,
    count_experts,
)
from experiment_core_utils.engines.weights import DecoderWeights
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.fused_weights import fuse_decoder_weights
from experiment_core_utils.primitives.errors import KnobDidNotAct
from tests.conftest import tiny_config

TOP_2 = EngineKnobs(2, (0, 2))
FOUR = torch.tensor([[0, 1, 2, 3], [7, 6, 5, 4]])


@pytest.fixture(scope="module")
def decoder() -> DecoderWeights:
    """4 blocks of 8 experts, 4 for each token of block 0."""
    return fuse_decoder_weights(MolmoeForConditionalGeneration(tiny_config()).eval())


def test_blocks_that_wrote_nothing_are_not_there(decoder: DecoderWeights) -> None:
    record = ExpertRecord.allocate(decoder, 10)
    assert record.of_tokens(2) == {}
    record.ids[0, :8] = torch.tensor([0, 1, 2, 3, 7, 6, 5, 4])
    record.ids[2, :4] = torch.tensor([5, 1, 8, 8])
    found = record.of_tokens(2)
    assert {block: ids.tolist() for block, ids in found.items()} == {0: FOUR.tolist(), 2: [[5, 1], [8, 8]]}
    record.forget()
    assert record.of_tokens(2) == {}


def test_one_block_may_have_run_for_one_token_alone(decoder: DecoderWeights) -> None:
    record = ExpertRecord.allocate(decoder, 10)
    record.ids[0, :8] = FOUR.flatten()
    record.ids[2, :2] = torch.tensor([6, 3])
    found = record.of_tokens(2, alone=2)
    assert {block: ids.tolist() for block, ids in found.items()} == {0: FOUR.tolist(), 2: [[6, 3]]}


def test_what_was_left_out_stays_visible(decoder: DecoderWeights) -> None:
    """Of two tokens' three experts each, the third of both and all of the last: 4 ids reach over 2 a token."""
    record = ExpertRecord.allocate(decoder, 9)
    record.ids[1, :5] = torch.tensor([4, 2, NOT_WRITTEN, 1, 3])
    assert record.of_tokens(2)[1].tolist() == [[4, 2, NOT_WRITTEN], [1, 3, NOT_WRITTEN]]


def test_experts_are_counted_by_block(decoder: DecoderWeights) -> None:
    used = {0: FOUR, 2: torch.tensor([[3, 0], [1, 2]])}
    assert count_experts("prefill", used, decoder, TOP_2) == (4, 2)
    assert count_experts("decode", {2: torch.tensor([[0, 7]])}, decoder, TOP_2) == (2,)


@pytest.mark.parametrize(
    ("ids", "seen"),
    [
        ([[3, 0], [1, 1]], "block 2 used 1 experts, not 2, for 1 of 2 tokens in the decode"),
        ([[3, 0], [1, NOT_WRITTEN]], "block 2 used 1 experts, not 2, for 1 of 2 tokens in the decode"),
        ([[3, 0], [1, 8]], "block 2 used 1 experts, not 2, for 1 of 2 tokens in the decode"),
        ([[3, 0, 1], [1, 2, 3]], "block 2 used 3 experts, not 2, for 2 of 2 tokens in the decode"),
    ],
)
def test_more_or_fewer_experts_than_requested(decoder: DecoderWeights, ids: list[list[int]], seen: str) -> None:
    with pytest.raises(KnobDidNotAct, match=f"^{seen}$"):
        count_experts("decode", {0: FOUR, 2: torch.tensor(ids)}, decoder, TOP_2)
