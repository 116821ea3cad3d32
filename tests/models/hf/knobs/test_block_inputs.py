"""What blocks are given, compared: masks exactly, positions to rounding, the cache's layers by kind and window."""

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from experiment_core_utils.models.hf.knobs.block_inputs import BlockInputs, inputs_seen, layer_kind, other_inputs

MASK = torch.tensor([[True, False], [True, True]])
FULL = ("DynamicLayer", None)


class Block(nn.Module):
    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor
    ) -> torch.Tensor:
        return hidden_states


def test_what_is_about_places_is_seen_by_name_and_hidden_states_are_not() -> None:
    block, places = Block(), torch.arange(2)
    with inputs_seen([Block(), block]) as seen:
        block(torch.ones(1, 2), MASK, position_ids=places)
        block(torch.ones(1, 1), None, position_ids=places)
    assert list(seen) == [1]
    assert [set(run) for run in seen[1]] == [{"attention_mask", "position_ids"}] * 2
    assert seen[1][0]["attention_mask"] is MASK and seen[1][1]["attention_mask"] is None
    assert not block._forward_pre_hooks


@pytest.mark.parametrize(
    ("mask", "positions", "layer", "other"),
    [
        (MASK, torch.tensor([0.5, 1.0]), FULL, None),
        (MASK, torch.tensor([0.5, 1.0 + 1e-7]), FULL, None),
        (~MASK, torch.tensor([0.5, 1.0]), FULL, "mask"),
        (None, torch.tensor([0.5, 1.0]), FULL, "mask"),
        (MASK[:1], torch.tensor([0.5, 1.0]), FULL, "mask"),
        (MASK, torch.tensor([0.5, 1.1]), FULL, "positions"),
        (
            MASK,
            torch.tensor([0.5, 1.0]),
            ("DynamicSlidingWindowLayer", 4),
            "layer of the cache (DynamicSlidingWindowLayer of 4, not DynamicLayer)",
        ),
    ],
)
def test_the_first_difference_is_named(
    mask: torch.Tensor | None, positions: torch.Tensor, layer: tuple[str, int | None], other: str | None
) -> None:
    expected = BlockInputs([{"mask": MASK, "positions": torch.tensor([0.5, 1.0])}], FULL)
    assert other_inputs(BlockInputs([{"mask": mask, "positions": positions}], layer), expected) == other


def test_an_input_that_only_one_of_them_has_is_a_difference() -> None:
    mask, both = {"mask": MASK}, {"mask": MASK, "positions": torch.tensor([0.5, 1.0])}
    for mine, theirs in ((mask, both), (both, mask), ({}, mask)):
        # In the second of their runs.
        found = other_inputs(BlockInputs([both, mine], FULL), BlockInputs([both, theirs], FULL))
        assert found == ("mask" if not mine else "positions")
    # None is a mask that is not needed, whether it is given or left out.
    assert other_inputs(BlockInputs([{**mask, "positions": None}], FULL), BlockInputs([mask], FULL)) is None


def test_a_layer_of_the_cache_is_known_by_kind_and_window() -> None:
    assert layer_kind(DynamicLayer()) == FULL
    assert layer_kind(DynamicSlidingWindowLayer(sliding_window=4)) == ("DynamicSlidingWindowLayer", 4)
    assert layer_kind(None) is None
