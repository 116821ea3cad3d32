"""Choice of a tiling, pictures of any mode and orientation, and where the features of the crops go."""

import io
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from experiment_core_utils.knobs.vision_tokens import TIERS, CropRange, fraction_target
from experiment_core_utils.models.molmoe.image_processing_molmoe import (
    PATCH_DROPPED,
    MolmoeImageProcessor,
    select_least_distorting_tiling,
    select_tiling,
    tilings_within,
)
from experiment_core_utils.models.molmoe.processing_molmoe import ImageTokens, MolmoeProcessor
from tests.same_floats import assert_same_floats

WINDOW, MARGIN = 224, 112
EXIF_ORIENTATION = 0x0112

sides = st.integers(1, 6000)
ranges = st.tuples(st.integers(1, 15), st.integers(1, 15)).map(lambda ends: CropRange(min(ends), max(ends)))


# --- which tilings there are -------------------------------------------------------------------------------------


def test_tilings_come_by_product_and_then_rows() -> None:
    assert tilings_within(CropRange(1, 4)) == [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1)]
    assert tilings_within(CropRange(6, 6)) == [(1, 6), (2, 3), (3, 2), (6, 1)]
    assert tilings_within(CropRange(7, 7)) == [(1, 7), (7, 1)]


@given(ranges)
def test_every_tiling_of_a_range_is_there_once(crops: CropRange) -> None:
    found = tilings_within(crops)
    # As many tilings as the numbers of the range have divisors.
    divisors = sum(n % d == 0 for n in range(crops.min_crops, crops.max_crops + 1) for d in range(1, n + 1))
    assert len(found) == len(set(found)) == divisors
    assert all(crops.min_crops <= rows * cols <= crops.max_crops for rows, cols in found)


# --- the official rule -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("height", "width", "max_crops", "expected"),
    [
        # 224 / 224 = 1 needs no scaling at all.
        (224, 224, 12, (1, 1)),
        # One pixel more makes (1, 1) shrink; (2, 2) is the first that does not: 448 / 225 = 1.99.
        (225, 225, 12, (2, 2)),
        # 3 x 4: min(672 / 600, 896 / 800) = 1.12; 4 x 3: min(1.49, 0.84) shrinks.
        (600, 800, 12, (3, 4)),
        # All shrink; the largest is 3 x 4 again: min(672 / 3000, 896 / 4000) = 0.224.
        (3000, 4000, 12, (3, 4)),
        # One row, 12 columns: min(224 / 100, 2688 / 2688) = 1.
        (100, 2688, 12, (1, 12)),
        (1000, 1000, 1, (1, 1)),
    ],
)
def test_official_rule(height: int, width: int, max_crops: int, expected: tuple[int, int]) -> None:
    assert select_tiling(height, width, WINDOW, max_crops) == expected


@pytest.mark.parametrize(
    ("height", "width"),
    # The sides that count are less the margin: 112 leaves 0 (an infinite scale), less leaves a negative number.
    [(112, 112), (1, 1), (50, 80), (112, 60), (40, 2000), (2000, 40)],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_tiny_picture_gets_one_tile(height: int, width: int) -> None:
    assert MolmoeImageProcessor().tiling_for(height, width) == (1, 1)


@given(sides, sides, st.integers(1, 15))
def test_official_rule_is_the_least_upscaling_or_else_the_least_downscaling(height: int, width: int, most: int) -> None:
    rows, cols = select_tiling(height, width, WINDOW, most)

    def scale(tiling: tuple[int, int]) -> np.float32:
        return min(
            np.float32(tiling[0] * WINDOW) / np.float32(height), np.float32(tiling[1] * WINDOW) / np.float32(width)
        )

    scales = [scale(tiling) for tiling in tilings_within(CropRange(1, most))]
    enough = [value for value in scales if value >= 1]
    assert scale((rows, cols)) == (min(enough) if enough else max(scales))


# --- the least distorting tiling inside a range -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("height", "width", "tier", "expected"),
    [
        # Canvases are 224 r + 112 by 224 c + 112. Square pictures take square canvases where there are any.
        (640, 640, "low", (1, 1)),
        (640, 640, "medium", (2, 2)),
        (640, 640, "high", (3, 3)),
        # 1 : 2, log = -0.69. Low: 336/560 = 0.60 (log -0.51, off 0.18), 336/784 = 0.43 (-0.85, off 0.15).
        (500, 1000, "low", (1, 3)),
        # Medium: 560/1008 = 0.56 (-0.59, off 0.11); next 560/784 = 0.71 and 336/1008 = 0.33 (off 0.36, 0.41).
        (500, 1000, "medium", (2, 4)),
        # High: 560/1232 = 0.45 (-0.79, off 0.10); next 784/1232 = 0.64 and 560/1456 = 0.38 (off 0.24, 0.26).
        (500, 1000, "high", (2, 5)),
        # 3 : 1, log = 1.10. Low: 784/336 = 2.33; medium: 1008/336 = 3 exactly; high: 1680/560 = 3 exactly.
        (1500, 500, "low", (3, 1)),
        (1500, 500, "medium", (4, 1)),
        (1500, 500, "high", (7, 2)),
    ],
)
def test_least_distorting_tiling(height: int, width: int, tier: str, expected: tuple[int, int]) -> None:
    assert select_least_distorting_tiling(height, width, WINDOW, MARGIN, TIERS[tier]) == expected


@pytest.mark.parametrize(
    ("height", "width", "fraction", "target", "expected"),
    [
        # By itself 2 x 3 crops: 144 + 20 * 28 = 704. One crop and the whole are 144 + 12 * 12 = 288, two are 384.
        (480, 640, 0.5, 352, (1, 1)),
        # Fewer than one crop's features are not possible.
        (480, 640, 0.25, 176, (1, 1)),
        # By itself 3 x 4: 144 + 28 * 36 = 1152. Of at most 576 features 1 x 3 (480) shows the picture largest:
        # min(336 / 1080, 784 / 1920) = 0.31; 1 x 2 and 2 x 2 are as wide, 560 / 1920 = 0.29.
        (1080, 1920, 0.5, 576, (1, 3)),
        # 3 x 3 of 928 by itself; a square is as large on 1 x 2 (384) as on 1 x 1, which has fewer.
        (600, 600, 0.5, 464, (1, 1)),
        # 12 x 1 of 144 + 100 * 12 = 1344; 5 x 1 are 144 + 44 * 12 = 672 exactly.
        (3000, 200, 0.5, 672, (5, 1)),
        # Twice 704: of 3 x 4 (1152) min(784 / 480, 1008 / 640) = 1.58, of 3 x 5 (144 + 28 * 44 = 1376) 1.63.
        (480, 640, 2, 1408, (3, 5)),
    ],
)
def test_a_fraction_of_the_official_rules_features(
    height: int, width: int, fraction: float, target: int, expected: tuple[int, int]
) -> None:
    processor, crops = MolmoeImageProcessor(), fraction_target(fraction).crops
    assert processor.target_features(height, width, crops) == target
    assert processor.tiling_for(height, width, crops) == expected
    assert processor.target_features(height, width, None) is None


@given(sides, sides, st.sampled_from([0.1, 0.5, 0.9, 1.5]))
def test_no_tiling_within_a_fraction_shows_the_picture_larger(height: int, width: int, fraction: float) -> None:
    processor, crops = MolmoeImageProcessor(), fraction_target(fraction).crops
    target, chosen_tiling = (
        processor.target_features(height, width, crops) or 0,
        processor.tiling_for(height, width, crops),
    )

    def scale(tiling: tuple[int, int]) -> float:
        rows, cols = processor.canvas_size(tiling)
        return min(rows / height, cols / width)

    fitting = [tiling for tiling in tilings_within(CropRange(1, 30)) if processor.kept_features(tiling) <= target]
    assert chosen_tiling in fitting or (fitting, chosen_tiling) == ([], (1, 1))
    assert all(scale(tiling) <= scale(chosen_tiling) for tiling in fitting)


def test_equal_distances_take_the_tiling_with_more_crops() -> None:
    # Both (1, 1) and (2, 2) and (3, 3) are square.
    assert select_least_distorting_tiling(70, 70, WINDOW, MARGIN, CropRange(1, 9)) == (3, 3)
    assert select_least_distorting_tiling(70, 70, WINDOW, MARGIN, CropRange(1, 8)) == (2, 2)


@given(sides, sides, ranges)
def test_no_other_tiling_of_the_range_is_nearer(height: int, width: int, crops: CropRange) -> None:
    chosen = select_least_distorting_tiling(height, width, WINDOW, MARGIN, crops)

    def distance(tiling: tuple[int, int]) -> float:
        rows, cols = tiling
        return abs(math.log((rows * 224 + 112) * width / ((cols * 224 + 112) * height)))

    every = [
        (rows, cols)
        for rows, cols in itertools.product(range(1, 16), repeat=2)
        if crops.min_crops <= rows * cols <= crops.max_crops
    ]
    assert chosen in every
    assert distance(chosen) <= min(map(distance, every)) + 1e-8


# --- pictures ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processor() -> MolmoeImageProcessor:
    return MolmoeImageProcessor()


def noise(height: int, width: int, *channels: int) -> np.ndarray:
    return np.random.RandomState(5).randint(0, 256, (height, width, *channels)).astype(np.uint8)


def crops_of(processor: MolmoeImageProcessor, image: Image.Image) -> torch.Tensor:
    return processor.preprocess(image, CropRange(1, 3)).pixel_values


# What a camera stores for a picture that is seen upright, by EXIF orientation.
STORED = {
    1: lambda seen: seen,
    3: lambda seen: np.rot90(seen, 2),
    6: lambda seen: np.rot90(seen, 1),
    8: lambda seen: np.rot90(seen, 3),
}


@pytest.mark.parametrize("orientation", STORED)
def test_exif_orientation_is_applied(processor: MolmoeImageProcessor, orientation: int) -> None:
    seen = noise(200, 500, 3)
    file = io.BytesIO()
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](seen)))
    exif = stored.getexif()
    exif[EXIF_ORIENTATION] = orientation
    stored.save(file, format="PNG", exif=exif)
    found = processor.preprocess(Image.open(file), CropRange(1, 3))
    expected = processor.preprocess(seen, CropRange(1, 3))
    assert found.tiling == expected.tiling == (1, 3)
    assert_same_floats(found.pixel_values, expected.pixel_values)


def test_any_mode_becomes_rgb(processor: MolmoeImageProcessor) -> None:
    gray = noise(60, 90)
    as_rgb = crops_of(processor, Image.fromarray(np.repeat(gray[..., None], 3, axis=2)))
    assert_same_floats(crops_of(processor, Image.fromarray(gray, "L")), as_rgb)
    palette = Image.fromarray(gray, "P")
    palette.putpalette([value for value in range(256) for _ in range(3)])
    assert_same_floats(crops_of(processor, palette), as_rgb)
    colours = noise(60, 90, 3)
    with_alpha = np.concatenate([colours, np.full((60, 90, 1), 255, np.uint8)], axis=2)
    assert_same_floats(
        crops_of(processor, Image.fromarray(with_alpha, "RGBA")), crops_of(processor, Image.fromarray(colours))
    )


@pytest.mark.parametrize(
    "array", [np.zeros((8, 8), np.uint8), np.zeros((8, 8, 4), np.uint8), np.zeros((8, 8, 3), np.float32)]
)
def test_an_array_that_is_no_rgb_picture_is_refused(processor: MolmoeImageProcessor, array: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"uint8 \[H, W, 3\]"):
        processor.preprocess(array)


def test_a_picture_is_normalised_centred_and_padded_with_black(processor: MolmoeImageProcessor) -> None:
    # 100 x 200 on a canvas of 336 x 560: scale min(3.36, 2.8) = 2.8 -> 280 x 560, 28 rows of padding above and below.
    white = np.full((100, 200, 3), 255, np.uint8)
    found = processor.preprocess(white, CropRange(2, 2))
    assert (found.tiling, found.canvas_size) == ((1, 2), (336, 560))
    tile = found.pixel_values[1]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (processor.image_mean, processor.image_std))
    torch.testing.assert_close(tile[:, 28:308], ((1 - mean) / std).expand(3, 280, 336))
    torch.testing.assert_close(tile[:, :28], (-mean / std).expand(3, 28, 336))
    torch.testing.assert_close(tile[:, 308:], (-mean / std).expand(3, 28, 336))
    # Patches of 14 rows: two rows of them are padding above, two below, and the last mask is the official -1.
    masks = found.image_masks.view(3, 24, 24)
    assert masks[0].mean(dim=1).tolist() == [0.0] * 2 + [1.0] * 20 + [0.0] * 2
    assert (masks[2] == -1).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 900), st.integers(1, 900), st.sampled_from(list(TIERS.values())))
def test_any_size_gives_the_promised_shapes(height: int, width: int, crops: CropRange) -> None:
    found = MolmoeImageProcessor().preprocess(np.zeros((height, width, 3), np.uint8), crops)
    rows, cols = found.tiling
    assert crops.min_crops <= rows * cols <= crops.max_crops
    assert found.pixel_values.shape == (rows * cols + 1, 3, 336, 336)
    assert found.image_masks.shape == (rows * cols + 1, 576)
    assert found.feature_rows.shape == (rows * cols + 1, 144)
    assert torch.isfinite(found.pixel_values).all()


# --- where features go ---------------------------------------------------------------------------------------------


@given(
    st.tuples(st.integers(1, 15), st.integers(1, 15)).filter(lambda rc: rc[0] * rc[1] <= 15),
    st.sampled_from([(4, 4), (2, 2), (2, 4), (0, 0)]),
)
def test_every_place_is_filled_by_exactly_one_feature(tiling: tuple[int, int], margins: tuple[int, int]) -> None:
    processor = MolmoeImageProcessor(overlap_margins=margins)
    places = processor.feature_rows(tiling)
    grid_rows, grid_cols = processor.stitched_features(tiling)
    assert places[0].tolist() == list(range(144))
    kept = places[places != PATCH_DROPPED]
    assert sorted(kept.tolist()) == list(range(144 + grid_rows * grid_cols))
    assert kept.min() >= 0


def test_places_of_two_tiles_side_by_side() -> None:
    # 12 x 20 stitched features. The left tile keeps its columns 0-9, the right one its columns 2-11 as 10-19.
    left, right = MolmoeImageProcessor().feature_rows((1, 2))[1:].view(2, 12, 12)
    assert left[0].tolist() == [*range(144, 154), -100, -100]
    assert right[0].tolist() == [-100, -100, *range(154, 164)]
    assert left[1].tolist() == [*range(164, 174), -100, -100]
    assert right[11, 11] == 144 + 12 * 20 - 1


@pytest.mark.parametrize(
    ("tiling", "crops", "pooled", "patches", "image_tokens"),
    [
        ((1, 1), 2, 288, 288, 316),
        ((1, 2), 3, 432, 384, 412),
        ((2, 2), 5, 720, 544, 580),
        ((2, 3), 7, 1008, 704, 740),
        ((3, 3), 10, 1440, 928, 972),
        ((3, 4), 13, 1872, 1152, 1196),
        ((1, 12), 13, 1872, 1344, 1372),
    ],
)
def test_token_counts(tiling: tuple[int, int], crops: int, pooled: int, patches: int, image_tokens: int) -> None:
    rows, cols = tiling
    images = MolmoeImageProcessor()
    tokens = ImageTokens(bos=50279, start=50280, end=50281, patch=50282, column=50283)
    # A picture whose shape is the canvas itself is cut into just these tiles.
    height, width = images.canvas_size(tiling)
    picture = images.preprocess(np.zeros((height, width, 3), np.uint8), CropRange(rows * cols, rows * cols))
    assert picture.tiling == tiling
    inputs = MolmoeProcessor(images, None, tokens).assemble([1, 2, 3], picture)
    ids = inputs["input_ids"][0]
    assert inputs["pixel_values"].shape[1] == crops
    assert inputs["image_input_idx"].numel() == pooled
    assert int((ids == tokens.patch).sum()) == patches == 144 + (8 * rows + 4) * (8 * cols + 4)
    assert len(ids) - 1 - 3 == image_tokens
    places = inputs["image_input_idx"]
    assert sorted(places[places >= 0].tolist()) == (ids == tokens.patch).nonzero().flatten().tolist()
    assert ids[0] == tokens.bos and ids[1] == tokens.start and ids[-4] == tokens.end
