"""Settings: their keys, what is read back from them, their order, and labels that cannot be used."""

import pytest

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.interface import KnobLimits, Level
from experiment_core_utils.knobs.setting import Setting, check_label, reference_setting
from experiment_core_utils.knobs.top_k import TopK
from experiment_core_utils.knobs.vision_tokens import (
    VisionTarget,
    named_tokens,
    own_target,
    target_of_value,
    tier_target,
    token_target,
)
from experiment_core_utils.primitives.errors import ConfigurationError


@pytest.mark.parametrize(
    ("target", "value"), [(tier_target("medium"), "medium"), (token_target(1008), "1008 tokens"), (own_target(), "own")]
)
@pytest.mark.parametrize("top_k", [8, None])
def test_a_key_and_a_value_are_read_back(target: VisionTarget, value: str, top_k: int | None) -> None:
    assert target.value == value
    # How many crops a number of tokens is depends on the model.
    named = named_tokens(1008) if target.tokens else target
    assert target_of_value(value) == named
    key = Setting.of(vision=target, top_k=top_k, num_active_blocks=RunningBlocks.of((0, 2, 5))).key
    assert Setting.named(key) == Setting.of(vision=named, top_k=top_k, num_active_blocks=RunningBlocks(3))


def test_the_reference_is_the_model_as_it_is() -> None:
    assert reference_setting(KnobLimits(4, 8, 3)) == Setting.of(
        vision=VisionTarget("own", None, None, None), top_k=3, num_active_blocks=RunningBlocks.of((0, 1, 2, 3))
    )
    assert reference_setting(KnobLimits(2, None, None)).key == "own_blocks2"


@pytest.mark.parametrize(
    "key", ["", "low", "tier-low_topk8_topk9", "tier-low_topkmany_blocks3", "own_topk1_blocks3 more"]
)
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a key of a setting; give one such as tier-low_topk8_blocks16"):
        Setting.named(key)


def test_a_knob_at_rest_and_one_that_the_model_lacks_are_in_no_key() -> None:
    setting = Setting.of(vision=own_target(), top_k=None, num_active_blocks=RunningBlocks(4))
    assert setting.levels == {"vision": "own", "num_active_blocks": 4}
    assert (setting.key, setting.level("top_k")) == ("own_blocks4", None)


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("tier-low_topk8_blocks3", ("low", None, None, 8, 3)),
        ("tokens1008_keep0.5_blocks4", (None, 1008, None, None, 4)),
        ("own_topk2_mass0.5_blocks1", (None, None, None, 2, 1)),
        ("frac-0.5_blocks1", (None, None, 0.5, None, 1)),
    ],
)
def test_the_published_fields_of_a_setting(key: str, fields: tuple[Level | None, ...]) -> None:
    names = ("tier", "vision_tokens_target", "vision_fraction", "top_k", "num_active_blocks")
    assert Setting.named(key).published_fields == dict(zip(names, fields, strict=True))


def test_settings_are_in_order_of_cost() -> None:
    keys = [
        "own_topk2_blocks1",
        "tier-low_topk8_blocks4",
        "own_blocks4",
        "tier-low_topk8_blocks3",
        "tier-low_topk1_blocks4",
    ]
    assert [each.key for each in sorted(map(Setting.named, keys), key=lambda each: each.order)] == [
        "tier-low_topk1_blocks4", "tier-low_topk8_blocks3", "tier-low_topk8_blocks4", "own_blocks4", "own_topk2_blocks1"
    ]  # fmt: skip


class WronglyLabelled(TopK):
    """Labels that no file name can have, or that name no value."""

    def label(self, value: int) -> str:
        return {1: "k 1", 2: "topk3", 3: "experts3", 5: "topk5.rank1"}.get(value, f"topk{value}")


@pytest.mark.parametrize(("value", "label"), [(1, "'k 1'"), (2, "'topk3'"), (3, "'experts3'"), (5, "'topk5.rank1'")])
def test_a_label_that_names_nothing_is_refused(value: int, label: str) -> None:
    check_label(WronglyLabelled(), 4)
    with pytest.raises(ConfigurationError, match=f"knob top_k: its label of {value} is {label}; write one"):
        check_label(WronglyLabelled(), value)


def test_a_label_of_another_knob_is_refused() -> None:
    other = type("Other", (TopK,), {"name": "other"})()
    with pytest.raises(ConfigurationError, match="knob other: its label of 4, topk4, is one of top_k; write"):
        check_label(other, 4)
