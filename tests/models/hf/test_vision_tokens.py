"""The number of vision tokens that each kind of processor is requested, from hand-computed grids."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AyaVisionConfig, Glm4vImageProcessorPil, GotOcr2ImageProcessorPil

from experiment_core_utils.knobs.vision_tokens import TIERS, CropRange, token_target
from experiment_core_utils.models.hf.knobs.patches import fields_in_force
from experiment_core_utils.models.hf.tilings import AspectTiles, LongestEdgeTiles, PinpointTiles, SplitTiles
from experiment_core_utils.models.hf.vision_tokens import PixelBudget, VisionOptions, vision_options_of
from experiment_core_utils.records.requests import VisionGeometry

# As published: LLaVA-NeXT with CLIP at 336 in patches of 14, Aria, InternVL3, SmolVLM2, Qwen2.5-VL, GLM-4.5V.
LLAVA_NEXT = PinpointTiles(336, 576)
ARIA = SplitTiles(128)
INTERNVL = AspectTiles((448, 448), 256)
SMOLVLM = LongestEdgeTiles(512, 64)
QWEN = PixelBudget(patch=14, merge=2, frames=1, widens_first=False)
GLM = PixelBudget(patch=14, merge=2, frames=2, widens_first=True)
PHOTO = (640, 480)


def tiles(rows: int, cols: int, side: int, features: int, has_overview: bool = True) -> VisionGeometry:
    return VisionGeometry(rows * cols, (rows, cols), (rows * side, cols * side), features, has_overview)


def whole(height: int, width: int, tokens: int) -> VisionGeometry:
    grid = (height // 14, width // 14)
    return VisionGeometry(0, None, (height, width), tokens, patches=4 * tokens, patch_grid=grid)


@pytest.mark.parametrize(
    ("options", "tier", "expected"),
    [
        # 336 x 672 keeps 448 x 336 pixels of the photo, 336 x 336 and 672 x 336 only 336 x 252; (2 + 1) * 576.
        (LLAVA_NEXT, "low", tiles(1, 2, 336, 1728)),
        # 672 x 672 keeps all, with the least padding; (4 + 1) * 576.
        (LLAVA_NEXT, "medium", tiles(2, 2, 336, 2880)),
        # 1008 x 1008 is the smallest that keeps all; (9 + 1) * 576.
        (LLAVA_NEXT, "high", tiles(3, 3, 336, 5760)),
        # 490 x 980 keeps all, 490 x 490 does not; 2 * 128 without a crop of the whole.
        (ARIA, "low", tiles(1, 2, 490, 256, has_overview=False)),
        (ARIA, "medium", tiles(2, 2, 490, 512, has_overview=False)),
        (ARIA, "high", tiles(3, 3, 490, 1152, has_overview=False)),
        # Aspect 4:3; 1:1 is off by 1/3, 2:1 by 2/3. One tile has no crop of the whole beside it.
        (INTERNVL, "low", tiles(1, 1, 448, 256, has_overview=False)),
        # 3:2 is off by 1/6, 1:1 by 1/3; (6 + 1) * 256.
        (INTERNVL, "medium", tiles(2, 3, 448, 1792)),
        # 4:3 exactly; (12 + 1) * 256.
        (INTERNVL, "high", tiles(3, 4, 448, 3328)),
        # 1024 x 768 would take 2 * 2 tiles, more than 3; 512 x 384 is not cut.
        (SMOLVLM, "low", VisionGeometry(0, None, (512, 512), 64)),
        # 1024 x 768 -> 2 * 2; 1536 x 1152 would take 3 * 3, more than 8; (4 + 1) * 64.
        (SMOLVLM, "medium", tiles(2, 2, 512, 320)),
        # 2048 x 1536 -> 3 * 4; 2560 x 1920 would take 4 * 5; (12 + 1) * 64.
        (SMOLVLM, "high", tiles(3, 4, 512, 832)),
        # 288 to 576 tokens of 28 pixels: round(17.14) * round(22.86) = 17 * 23 = 391 lies within.
        (QWEN, "low", whole(476, 644, 391)),
        # 720 to 1296: sqrt(720 / 391.8) = 1.3555, ceil(23.24) * ceil(30.98) = 24 * 31.
        (QWEN, "medium", whole(672, 868, 744)),
        # 1440 to 2304: sqrt(1440 / 391.8) = 1.9170, ceil(32.86) * ceil(43.82) = 33 * 44.
        (QWEN, "high", whole(924, 1232, 1452)),
        (GLM, "low", whole(476, 644, 391)),
        (GLM, "medium", whole(672, 868, 744)),
        (GLM, "high", whole(924, 1232, 1452)),
    ],
)
def test_what_the_tiers_make_of_a_photo(options: VisionOptions, tier: str, expected: VisionGeometry) -> None:
    assert options.geometry_for(TIERS[tier], *PHOTO) == expected


def test_an_exact_target_is_not_exceeded() -> None:
    # 6 tiles and the whole are 1008 tokens. Scaled up to 1008, the photo would take 28 * 37 = 1036; the next smaller
    # grid of its shape is 27 * 36 = 972.
    assert QWEN.geometry_for(CropRange(6, 6), *PHOTO).pooled_features == 972
    # A picture of 2800 x 2100 pixels has 100 * 75 tokens; sqrt(7500 / 1008) = 2.7277, floor(27.496) * floor(36.66).
    assert QWEN.geometry_for(CropRange(6, 6), 2800, 2100).pooled_features == 27 * 36


# --- the model's own ----------------------------------------------------------------------------------------------

A4_SCAN, ICON = (1700, 2200), (120, 90)
# The published bounds of Qwen2.5-VL: 4 and 16,384 tokens of 28 x 28 pixels.
OWN_QWEN = replace(QWEN, own_bounds=(3136, 12845056))
OWN_LLAVA_NEXT = replace(LLAVA_NEXT, own_canvases=((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)))


@pytest.mark.parametrize(
    ("options", "picture", "expected"),
    [
        (OWN_QWEN, PHOTO, whole(476, 644, 391)),
        # round(2200 / 28) = 79, round(1700 / 28) = 61; round(3.2) = 3, round(4.3) = 4.
        (OWN_QWEN, A4_SCAN, whole(2212, 1708, 4819)),
        (OWN_QWEN, ICON, whole(84, 112, 12)),
        # At most 256 tokens: sqrt(391.8 / 256) = 1.2372, floor(17.14 / 1.2372) * floor(22.86 / 1.2372).
        (replace(QWEN, own_bounds=(3136, 200704)), PHOTO, whole(13 * 28, 18 * 28, 234)),
        (replace(QWEN, own_bounds=(3136, 200704)), ICON, whole(84, 112, 12)),
        # Both frames of a still picture count: 512 pixels of a token's two frames are 256 tokens.
        (replace(GLM, own_bounds=(25088, 2 * 200704)), PHOTO, whole(13 * 28, 18 * 28, 234)),
        (OWN_LLAVA_NEXT, PHOTO, tiles(2, 2, 336, 2880)),
        (OWN_LLAVA_NEXT, (1500, 400), tiles(1, 3, 336, 2304)),
        # 4:3 exactly, of at most 12 tiles.
        (replace(INTERNVL, own_crops=CropRange(1, 12)), PHOTO, tiles(3, 4, 448, 3328)),
        # 2048 x 1536.
        (replace(SMOLVLM, own_edge=2048), PHOTO, tiles(3, 4, 512, 832)),
        # 1456 is no multiple of 384: 1456 x 1092, then 1536 x 1152.
        (LongestEdgeTiles(384, 81, 1456), PHOTO, tiles(3, 4, 384, 1053)),
        (LongestEdgeTiles(384, 81, 300), PHOTO, VisionGeometry(0, None, (384, 384), 81)),
        # What is not known before is counted in the request.
        (ARIA, PHOTO, None),
        (SMOLVLM, PHOTO, None),
        (INTERNVL, PHOTO, None),
        (QWEN, PHOTO, None),
        (replace(LLAVA_NEXT, own_canvases=((400, 400),)), PHOTO, None),
    ],
)
def test_what_a_checkpoint_makes_of_a_picture_by_itself(
    options: VisionOptions, picture: tuple[int, int], expected: VisionGeometry | None
) -> None:
    assert options.own_geometry(*picture) == expected


@pytest.mark.parametrize(
    ("options", "tokens", "picture", "expected"),
    [
        # Scaled up to 256 tokens an icon would take 14 * 19; the next smaller grid of its shape is 14 * 18.
        (QWEN, 256, ICON, 252),
        (QWEN, 256, PHOTO, 234),
        (QWEN, 1000, PHOTO, 27 * 36),
        # A strip of 40 tokens in a row cannot be made shorter: one row stays.
        (QWEN, 4, (1120, 28), 12),
        (LLAVA_NEXT, 1152, PHOTO, 1152),
        (LLAVA_NEXT, 2900, PHOTO, 2880),
        (INTERNVL, 256, PHOTO, 256),
        (INTERNVL, 768, PHOTO, 768),
        (SMOLVLM, 64, PHOTO, 64),
        (SMOLVLM, 320, PHOTO, 320),
        (ARIA, 512, PHOTO, 512),
    ],
)
def test_a_number_of_tokens_is_in_the_familys_own_unit(
    options: VisionOptions, tokens: int, picture: tuple[int, int], expected: int
) -> None:
    crops = token_target(tokens, options.unit).crops
    assert crops is not None
    assert options.geometry_for(crops, *picture).pooled_features == expected


def test_the_options_of_a_call() -> None:
    low = TIERS["low"]
    canvases = [[336, 336], [336, 672], [672, 336], [336, 1008], [1008, 336]]
    assert LLAVA_NEXT.options_for(low, *PHOTO) == {"image_grid_pinpoints": canvases}
    assert ARIA.options_for(CropRange(1, 2), *PHOTO) == {
        "split_image": True,
        "max_image_size": 490,
        "split_resolutions": [[490, 490], [490, 980], [980, 490]],
    }
    assert INTERNVL.options_for(low, *PHOTO) == {"crop_to_patches": True, "min_patches": 1, "max_patches": 3}
    assert SMOLVLM.options_for(TIERS["high"], *PHOTO) == {"do_image_splitting": True, "size": {"longest_edge": 2048}}
    # 288 and 576 tokens of 784 pixels; GLM counts both of a patch's two frames.
    assert QWEN.options_for(low, *PHOTO) == {"size": {"shortest_edge": 225792, "longest_edge": 451584}}
    assert GLM.options_for(low, *PHOTO) == {"size": {"shortest_edge": 451584, "longest_edge": 903168}}


def test_only_llava_next_needs_its_config_changed() -> None:
    low = TIERS["low"]
    assert LLAVA_NEXT.config_for(low) == LLAVA_NEXT.options_for(low, *PHOTO)
    assert not any(options.config_for(low) for options in (ARIA, INTERNVL, SMOLVLM, QWEN, GLM))


def test_a_wide_strip_is_one_row() -> None:
    # 3000 x 200: 12:1 and 15:1 are off by 3 and 0 from 15:1.
    assert INTERNVL.geometry_for(TIERS["high"], 3000, 200).tiling == (1, 15)
    # 8 tiles along, the most that 4096 pixels hold, are 4096 x 273, one row.
    assert SMOLVLM.geometry_for(TIERS["high"], 3000, 200).tiling == (1, 8)
    assert SMOLVLM.geometry_for(TIERS["high"], 200, 3000).tiling == (8, 1)


SIDES = st.integers(1, 4000)
RANGES = st.tuples(st.integers(1, 15), st.integers(0, 15)).map(lambda pair: CropRange(pair[0], pair[0] + pair[1]))


def within_aspect(sides: tuple[int, int]) -> bool:
    return max(sides) <= 200 * min(sides)


PICTURES = st.tuples(SIDES, SIDES).filter(within_aspect)


@given(PICTURES, RANGES, st.sampled_from([LLAVA_NEXT, ARIA, INTERNVL]))
def test_tiles_stay_within_the_range(picture: tuple[int, int], crops: CropRange, options: VisionOptions) -> None:
    geometry = options.geometry_for(crops, *picture)
    assert crops.min_crops <= geometry.num_crops <= crops.max_crops


@given(PICTURES, RANGES)
def test_scaled_tiles_stay_below_the_upper_bound(picture: tuple[int, int], crops: CropRange) -> None:
    assert SMOLVLM.geometry_for(crops, *picture).num_crops <= crops.max_crops


@given(PICTURES, RANGES, st.sampled_from([QWEN, GLM]))
def test_tokens_stay_below_the_upper_bound(picture: tuple[int, int], crops: CropRange, options: VisionOptions) -> None:
    tokens = options.geometry_for(crops, *picture).pooled_features
    assert 1 <= tokens <= (crops.max_crops + 1) * 144


@given(PICTURES, st.sampled_from([QWEN, GLM]))
def test_tokens_reach_the_lower_bound_of_a_wide_range(picture: tuple[int, int], options: VisionOptions) -> None:
    # Twice as many tokens are allowed as are requested; rounding both sides up takes less than that, except for
    # strips of few rows.
    tokens = options.geometry_for(CropRange(15, 31), *picture).pooled_features
    assert tokens >= 16 * 144 or max(picture) > 20 * min(picture)


def test_fields_are_put_back() -> None:
    owner = SimpleNamespace(image_grid_pinpoints=[[1, 2]], other=3)
    with pytest.raises(KeyError, match="4, 4"), fields_in_force(owner, {"image_grid_pinpoints": [[4, 4]]}):
        raise KeyError(owner.image_grid_pinpoints)
    assert owner == SimpleNamespace(image_grid_pinpoints=[[1, 2]], other=3)


def foretold(rule: VisionOptions, crops: CropRange, size: tuple[int, int]) -> VisionGeometry:
    return rule.geometry_for(crops, *size)


def test_another_familys_image_processor_without_its_fields_has_no_rule() -> None:
    """Aya Vision cuts pictures with the processor of GOT-OCR 2, and its config has no `image_seq_length`."""
    processor = SimpleNamespace(image_processor=GotOcr2ImageProcessorPil())
    assert vision_options_of(processor, AyaVisionConfig(), foretold) is None


def test_a_rule_is_taken_by_what_it_foretells() -> None:
    """Both have the fields of both rules; GLM's processor counts each pixel twice, once for each frame."""
    processor = SimpleNamespace(image_processor=Glm4vImageProcessorPil())
    qwen, glm = replace(QWEN, own_bounds=(12544, 11760000)), replace(GLM, own_bounds=(12544, 11760000))
    assert vision_options_of(processor, None, foretold) == qwen

    def made(rule: VisionOptions, crops: CropRange, size: tuple[int, int]) -> VisionGeometry:
        geometry = rule.geometry_for(crops, *size)
        return geometry if rule == glm else replace(geometry, patches=4 * geometry.pooled_features + 4)

    assert vision_options_of(processor, None, made) == glm

    def fewer(rule: VisionOptions, crops: CropRange, size: tuple[int, int]) -> VisionGeometry:
        geometry = rule.geometry_for(crops, *size)
        return replace(geometry, pooled_features=geometry.pooled_features - 1)

    assert vision_options_of(processor, None, fewer) is None
