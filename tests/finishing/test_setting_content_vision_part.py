"""Crops and vision tokens of a setting: each mean over those samples that have what is counted."""

from dataclasses import replace

from experiment_core_utils.finishing.setting_content import typical_geometry, vision_part
from experiment_core_utils.knobs.token_units import TokenUnit
from experiment_core_utils.knobs.vision_tokens import fraction_target, own_target, tier_target, token_target
from experiment_core_utils.records.requests import VisionGeometry
from tests.hand_made_records import measured_sample, one_by_two

UNCUT = VisionGeometry(None, None, (336, 336), 100)
THREE_BY_ONE = VisionGeometry(3, (3, 1), (784, 336), 576)

# 2 and 3 crops of 432 and 576 features, one picture that is not cut with 100, one question without a picture.
SAMPLES = [
    measured_sample(0),
    measured_sample(1, geometry=THREE_BY_ONE),
    measured_sample(2, geometry=UNCUT),
    measured_sample(3, has_picture=False),
]


def test_each_mean_is_over_those_that_have_it() -> None:
    entries = vision_part(tier_target("low"), SAMPLES)
    assert entries.tier == "low" and entries.vision_tokens_target is None
    assert entries.selected_crops_mean == (2 + 3) / 2
    assert entries.selected_crops_distribution == {"2": 1, "3": 1}
    assert entries.target_vision_tokens_mean == (432 + 576 + 100) / 3
    assert entries.actual_vision_tokens_mean == (384 + 384 + 384 + 0) / 4


def test_a_token_target_is_its_own_mean() -> None:
    entries = vision_part(token_target(1008), SAMPLES)
    assert (entries.tier, entries.vision_tokens_target) == (None, 1008)
    assert entries.target_vision_tokens_mean == 1008
    # 1008 features are 7 crops with the whole picture: 6 tiles.
    assert ((entries.tier_range or {})["max_crops"], entries.max_crops) == (6, 6)


def test_nothing_bounds_the_models_own_crops() -> None:
    entries = vision_part(own_target(), SAMPLES)
    assert (entries.tier, entries.tier_range, entries.max_crops, entries.vision_tokens_target) == (None,) * 4
    assert (entries.selected_crops_mean, entries.target_vision_tokens_mean) == (2.5, (432 + 576 + 100) / 3)


def test_a_token_target_of_pictures_in_their_own_shape_is_no_number_of_crops() -> None:
    entries = vision_part(token_target(256, TokenUnit(None)), SAMPLES[2:])
    assert (entries.tier_range, entries.max_crops, entries.vision_tokens_target) == (None, None, 256)


def test_a_fraction_has_the_targets_of_its_samples() -> None:
    """Of 384 features that the model takes by itself half are 192, of 100 they are 50."""
    samples = [
        replace(each, shape=replace(each.shape, target_tokens=target))
        for each, target in zip(SAMPLES, (192, 192, 50, None), strict=True)
    ]
    entries = vision_part(fraction_target(0.5), samples)
    assert (entries.tier, entries.tier_range, entries.vision_tokens_target, entries.max_crops) == (None,) * 4
    assert (entries.vision_fraction, entries.target_vision_tokens_mean) == (0.5, (192 + 192 + 50) / 3)


def test_no_picture_is_no_number() -> None:
    entries = vision_part(tier_target("low"), SAMPLES[3:])
    assert entries.selected_crops_mean is None
    assert (entries.selected_crops_distribution, entries.target_vision_tokens_mean) == ({}, None)
    assert entries.actual_vision_tokens_mean == 0
    assert vision_part(tier_target("low"), []).actual_vision_tokens_mean is None


def test_the_typical_geometry_is_the_most_frequent_of_several_the_first() -> None:
    assert typical_geometry([SAMPLES[1], SAMPLES[0], SAMPLES[0], SAMPLES[3]]) == one_by_two()
    assert typical_geometry([SAMPLES[1], SAMPLES[0], SAMPLES[3]]) == THREE_BY_ONE
    assert typical_geometry(SAMPLES[3:]) is None
