"""Tiers, numbers of vision tokens, and what the model takes by itself."""

import pytest

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.interface import KnobLimits
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.token_units import TokenUnit
from experiment_core_utils.knobs.vision_tokens import (
    TIERS,
    VISION_TOKENS,
    CropRange,
    VisionFlags,
    fraction_target,
    named_tokens,
    own_target,
    target_of_value,
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


@pytest.mark.parametrize(
    ("fraction", "label", "value"),
    [(0.5, "frac-0.5", "0.5 of own"), (0.25, "frac-0.25", "0.25 of own"), (2, "frac-2", "2 of own"), (1, "own", "own")],
)
def test_a_fraction_is_named_by_what_it_is_of(fraction: float, label: str, value: str) -> None:
    target = fraction_target(fraction)
    assert (target.label, target.value) == (label, value)
    assert VISION_TOKENS.parsed(label) == target == target_of_value(value)


@pytest.mark.parametrize("label", ["frac-0", "frac-1", "frac-0.50", "frac-17", "frac-nan", "frac-", "frac-half", "0.5"])
def test_another_text_names_no_fraction(label: str) -> None:
    assert VISION_TOKENS.parsed(label) is None


def test_fractions_above_1_come_after_the_models_own() -> None:
    targets = [fraction_target(target) for target in (2.0, 0.5, 1.0, 1.5, 0.25)]
    assert [target.value for target in sorted(targets, key=lambda target: target.order)] == [
        "0.25 of own", "0.5 of own", "own", "1.5 of own", "2 of own"
    ]  # fmt: skip


def test_a_fraction_bounds_no_crops() -> None:
    half = fraction_target(0.5).bounds
    assert half is not None and not half.counts_crops and TIERS["low"].counts_crops
    assert token_target(256, TokenUnit(None)).fraction is None and not CropRange(1, 9, 256).counts_crops


def test_the_default_are_fractions_and_a_list_of_another_kind_takes_their_place() -> None:
    limits = KnobLimits(4, 4, 2)
    labels = [target.label for target in VisionFlags().targets_and_left_out(limits)[0]]
    assert labels == ["frac-0.25", "frac-0.5", "own"]
    low = VisionFlags(tier_list=("low",)).targets_and_left_out(limits)
    assert low == ((tier_target("low"),), ())
    targets = VisionFlags(vision_fraction_list=(0.5, 3)).targets_and_left_out(
        KnobLimits(4, 4, 2, fraction_reasons=(None, "its crops are few"))
    )
    assert targets == ((fraction_target(0.5),), ("3 of the model's own vision tokens: its crops are few",))
    with pytest.raises(ValueError, match="vision_fraction_list"):
        VisionFlags(vision_fraction_list=(17.0,))
