"""Tiers, numbers of vision tokens, and what the model takes by itself."""

import pytest

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.token_units import TokenUnit
from experiment_core_utils.knobs.vision_tokens import (
    CropRange,
    named_tokens,
    own_target,
    tier_target,
    token_target,
    vision_of,
)
from experiment_core_utils.primitives.errors import ConfigurationError


def test_tiers_are_the_published_ranges() -> None:
    ranges = {name: tier_target(name).crops for name in ("low", "medium", "high")}
    assert ranges == {"low": CropRange(1, 3), "medium": CropRange(4, 8), "high": CropRange(9, 15)}


@pytest.mark.parametrize(("tokens", "crops"), [(432, 2), (720, 4), (1008, 6), (1440, 9), (288, 1), (431, 1)])
def test_a_token_target_means_exactly_so_many_crops(tokens: int, crops: int) -> None:
    assert token_target(tokens).crops == CropRange(crops, crops)


def test_targets_are_in_order_and_the_models_own_comes_last() -> None:
    given = [own_target(), tier_target("high"), token_target(1008), tier_target("low"), token_target(288)]
    assert [each.value for each in sorted(given, key=lambda each: each.order)] == [
        "288 tokens", "low", "1008 tokens", "high", "own"
    ]  # fmt: skip
    pixels = [token_target(tokens, TokenUnit(None)) for tokens in (1000, 70, 256)]
    assert [each.tokens for each in sorted(pixels, key=lambda each: each.order)] == [70, 256, 1000]


def test_an_unknown_tier_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'huge'.*own, low, medium, high"):
        tier_target("huge")


def test_an_empty_range_of_crops_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="3-2"):
        CropRange(3, 2)


def test_a_number_of_tokens_that_was_read_from_a_name_is_no_setting() -> None:
    """It would run as the model's own, which is requested without crops, too."""
    with pytest.raises(ValueError, match="tokens1008 was read from a name"):
        _ = vision_of(Setting.of(vision=named_tokens(1008), top_k=8, num_active_blocks=RunningBlocks.of((0,)))).bounds
    assert Setting.of(vision=own_target(), top_k=8, num_active_blocks=RunningBlocks.of((0,))).key == "own_topk8_blocks1"
