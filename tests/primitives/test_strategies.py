import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.knobs import tier_target
from experiment_core_utils.primitives.strategies import plan_settings, thin

TARGETS = [tier_target("low"), tier_target("high")]


def test_full_is_every_combination_once() -> None:
    settings = plan_settings("full", TARGETS, [2, 4, 6, 8, 10], [1, 2], 2, None)
    assert len(settings) == len({setting.key for setting in settings}) == 2 * 5 * 2
    assert settings[0].key == "tier-low_topk2_blocks1"


def test_balanced_is_full_up_to_four_values_a_knob() -> None:
    arguments = (TARGETS, [8, 4], [1, 2], 2, None)
    assert {s.key for s in plan_settings("balanced", *arguments)} == {s.key for s in plan_settings("full", *arguments)}


def test_balanced_thins_longer_lists_evenly() -> None:
    settings = plan_settings("balanced", TARGETS[:1], [7, 1, 2, 3, 4, 5, 6], [16], 16, None)
    assert [setting.top_k for setting in settings] == [1, 3, 5, 7]


def test_thinning_keeps_both_ends() -> None:
    assert thin((0, 1, 2, 3, 4)) == (0, 1, 3, 4)
    assert thin((0, 1, 2)) == (0, 1, 2)


def test_another_strategy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'lhs'"):
        plan_settings("lhs", TARGETS, [1], [1], 1, None)
