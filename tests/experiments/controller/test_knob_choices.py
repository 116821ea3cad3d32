"""What a controller may choose, and what a choice becomes, against hand-made values."""

import pytest

from experiment_core_utils.knobs.active_blocks import RunningBlocks, blocks_of, num_blocks_of
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.knobs.interface import KnobLimits
from experiment_core_utils.knobs.top_k import experts_of
from experiment_core_utils.knobs.vision_tokens import CropRange, vision_of
from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.controller.knob_choices import choice_of, published_space

LIMITS = KnobLimits(num_total_blocks=16, num_experts=64, default_top_k=8)


def test_the_published_space_of_16_blocks_and_8_experts():
    space = published_space(LIMITS)
    assert space.tiers == ("low", "medium", "high")
    assert space.top_ks == (4, 5, 6, 7, 8)
    assert space.block_counts == (12, 13, 14, 15, 16)
    assert space.first_top_k == 8
    choices = space.choices()
    assert len(set(choices)) == 3 * 5 * 5
    assert choices[0] == choice_of("low", 4, 12)
    assert choices[1] == choice_of("low", 4, 13)
    assert choices[5] == choice_of("low", 5, 12)
    assert choices[-1] == space.full == choice_of("high", 8, 16)
    assert space.lowest == choices[0] and space.at(1, 0, -1) == choice_of("medium", 4, 16)


def test_another_model_has_its_own_number_of_blocks_and_experts():
    space = published_space(KnobLimits(num_total_blocks=24, num_experts=32, default_top_k=6))
    assert space.block_counts == (20, 21, 22, 23, 24)
    assert space.top_ks == (4, 5, 6)


@pytest.mark.parametrize(
    "limits",
    [
        KnobLimits(16, None, None),
        KnobLimits(16, 64, 8, unsupported={"vision": "its pictures are not cut"}),
        KnobLimits(4, 64, 8),
        KnobLimits(16, 64, 2),
    ],
)
def test_a_model_without_these_knobs_is_refused(limits):
    with pytest.raises(ConfigurationError):
        published_space(limits)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (choice_of("own", 8, 16), "vision 'own' cannot be chosen; choose among low, medium, high"),
        (choice_of("low", 3, 16), "top_k 3 cannot be chosen; choose among 4, 5, 6, 7, 8"),
        (choice_of("low", 8, 11), "num_active_blocks 11 cannot be chosen; choose among 12, 13, 14, 15, 16"),
        (choice_of("low", 8, 17), "num_active_blocks 17"),
    ],
)
def test_a_choice_outside_the_space_says_what_is_allowed(choice, message):
    with pytest.raises(ConfigurationError, match=message):
        published_space(LIMITS).setting(choice, BlockChoice())


def test_block_0_runs_and_the_others_by_importance():
    # Block 0 has the lowest score and runs all the same; of the others 3, 7, 9 and 14 are the least important.
    scores = dict.fromkeys(range(16), 1.0) | {0: -5.0, 3: 0.1, 7: 0.2, 9: 0.3, 14: 0.4}
    space = published_space(LIMITS)
    choice = choice_of("medium", 5, 12)
    setting = space.setting(choice, BlockChoice(scores=scores))
    assert blocks_of(setting) == (0, 1, 2, 4, 5, 6, 8, 10, 11, 12, 13, 15)
    assert num_blocks_of(setting) == 12
    assert experts_of(setting) == 5
    assert vision_of(setting).bounds == CropRange(4, 8)
    assert setting.key == choice.key == "tier-medium_topk5_blocks12"
    # One more block: the most important of those left out.
    more = space.setting(choice.replaced(num_active_blocks=RunningBlocks(13)), BlockChoice(scores=scores))
    assert set(blocks_of(more)) - set(blocks_of(setting)) == {14}


def test_without_scores_the_first_blocks_run():
    setting = published_space(LIMITS).setting(choice_of("low", 8, 13), BlockChoice())
    assert blocks_of(setting) == tuple(range(13))
