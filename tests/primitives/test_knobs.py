import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.knobs import (
    CropRange,
    KnobLimits,
    KnobSetting,
    VisionTarget,
    named_tokens,
    own_target,
    reference_setting,
    select_active_blocks,
    target_of_value,
    tier_target,
    token_target,
    values_of_key,
)
from experiment_core_utils.primitives.vision_tokens import TokenUnit


def test_tiers_are_the_published_ranges() -> None:
    ranges = {name: tier_target(name).crops for name in ("low", "medium", "high")}
    assert ranges == {"low": CropRange(1, 3), "medium": CropRange(4, 8), "high": CropRange(9, 15)}


@pytest.mark.parametrize(("tokens", "crops"), [(432, 2), (720, 4), (1008, 6), (1440, 9), (288, 1), (431, 1)])
def test_a_token_target_means_exactly_so_many_crops(tokens: int, crops: int) -> None:
    assert token_target(tokens).crops == CropRange(crops, crops)


@pytest.mark.parametrize(
    ("target", "value"), [(tier_target("medium"), "medium"), (token_target(1008), "1008 tokens"), (own_target(), "own")]
)
@pytest.mark.parametrize("top_k", [8, None])
def test_a_key_and_a_value_are_read_back(target: VisionTarget, value: str, top_k: int | None) -> None:
    assert target.value == value
    # How many crops a number of tokens is depends on the model.
    named = named_tokens(1008) if target.tokens else target
    assert target_of_value(value) == named
    assert values_of_key(KnobSetting(target, top_k, (0, 2, 5)).key) == (named, top_k, 3)


def test_a_number_of_tokens_that_was_read_from_a_name_is_no_setting() -> None:
    """It would run as the model's own, which is requested without crops, too."""
    with pytest.raises(ValueError, match="tokens1008 was read from a name"):
        KnobSetting(named_tokens(1008), 8, (0,))
    assert KnobSetting(own_target(), 8, (0,)).key == "own_topk8_blocks1"


def test_targets_are_in_order_and_the_models_own_comes_last() -> None:
    given = [own_target(), tier_target("high"), token_target(1008), tier_target("low"), token_target(288)]
    assert [each.value for each in sorted(given, key=lambda each: each.order)] == [
        "288 tokens", "low", "1008 tokens", "high", "own"
    ]  # fmt: skip
    pixels = [token_target(tokens, TokenUnit(None)) for tokens in (1000, 70, 256)]
    assert [each.tokens for each in sorted(pixels, key=lambda each: each.order)] == [70, 256, 1000]


def test_the_reference_is_the_model_as_it_is() -> None:
    assert reference_setting(KnobLimits(4, 8, 3)) == KnobSetting(VisionTarget("own", None, None, None), 3, (0, 1, 2, 3))
    assert reference_setting(KnobLimits(2, None, None)).key == "own_topknone_blocks2"


@pytest.mark.parametrize("key", ["", "low", "tier-low_topk8", "tier-low_topkmany_blocks3", "own_topk1_blocks3 more"])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a key of a setting; give one such as tier-low_topk8_blocks16"):
        values_of_key(key)


def test_an_unknown_tier_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'huge'.*own, low, medium, high"):
        tier_target("huge")


def test_without_scores_the_first_blocks_run() -> None:
    assert select_active_blocks(3, 5) == (0, 1, 2)


def test_with_scores_block_0_stays_and_the_best_others_join_in_order() -> None:
    scores = {0: 0.0, 1: 0.1, 2: 0.9, 3: 0.5, 4: 0.7}
    assert select_active_blocks(3, 5, scores) == (0, 2, 4)
    assert select_active_blocks(1, 5, scores) == (0,)
    assert select_active_blocks(5, 5, scores) == (0, 1, 2, 3, 4)


def test_equal_scores_favour_the_earlier_block() -> None:
    assert select_active_blocks(3, 4, {1: 0.5, 2: 0.5, 3: 0.5}) == (0, 1, 2)


def test_scores_that_leave_out_a_block_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"leave out blocks \[2, 4\]"):
        select_active_blocks(3, 5, {1: 0.1, 3: 0.4})


def test_scores_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"name blocks \[5\], the model has blocks 0 to 4"):
        select_active_blocks(3, 5, dict.fromkeys(range(6), 0.1))


@pytest.mark.parametrize("count", [0, 6, -1])
def test_block_counts_that_the_model_does_not_have_are_refused(count: int) -> None:
    with pytest.raises(ConfigurationError, match="give 1 to 5"):
        select_active_blocks(count, 5)


def test_an_empty_range_of_crops_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="3-2"):
        CropRange(3, 2)
