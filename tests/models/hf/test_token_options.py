"""Options that move the number of image tokens: found by trial in tiny processors of many families, counted by hand."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from experiment_core_utils.knobs.vision_tokens import TIERS, fraction_target, token_target
from experiment_core_utils.models.hf.processor import load_hf_processor
from experiment_core_utils.models.hf.requests import HFRequests
from experiment_core_utils.models.hf.token_options import TRIAL_SIZES, WHOLE, Sizes, TokenOption
from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.interface import Sample
from tests.models.tiny_checkpoints import TRIED_FAMILIES, VISION_FAMILIES, write_checkpoint

Made = Callable[[str], tuple[Path, HFRequests]]
# What takes tokens away and what adds some; nothing where a trial found nothing.
PIXELS, TILES = "size.longest_edge", "max_patches"
FOUND = {
    "qwen2_5_vl": (PIXELS, PIXELS),
    "qwen3_vl_moe": (PIXELS, PIXELS),
    "glm4v_moe": (PIXELS, PIXELS),
    "smolvlm": (PIXELS, PIXELS),
    "idefics3": (PIXELS, PIXELS),
    "internvl": (TILES, TILES),
    "aya_vision": (TILES, TILES),
    "ovis2": (TILES, TILES),
    "aria": ("max_image_size", None),
    "gemma4": ("max_soft_tokens", "max_soft_tokens"),
    # Its own is one picture of the whole; pan and scan adds crops.
    "gemma3": (None, "pan_and_scan_max_num_crops"),
    # The canvases are fixed, and a smaller picture takes a smaller one.
    "llava_next": ("the size of the picture", None),
    "llava_onevision": ("the size of the picture", None),
    "llava": (None, None),
}


def sample(*sizes: tuple[int, int]) -> Sample:
    images = tuple(Image.radial_gradient("L").convert("RGB").resize(size) for size in sizes)
    return Sample(7, "picture", "What is it?", ("a cat",), images[0], "what", further_images=images[1:])


@pytest.fixture(scope="module")
def made_of(tmp_path_factory: pytest.TempPathFactory) -> Made:
    @cache
    def made(family: str) -> tuple[Path, HFRequests]:
        folder = write_checkpoint(family, tmp_path_factory.mktemp(family))
        return folder, HFRequests(load_hf_processor(folder), AutoConfig.from_pretrained(folder), family)

    return made


def test_every_tiny_family_is_tried() -> None:
    assert {*FOUND} == {*VISION_FAMILIES, *TRIED_FAMILIES}


@pytest.mark.parametrize("family", FOUND)
def test_a_trial_finds_what_moves_the_tokens(made_of: Made, family: str) -> None:
    _, requests = made_of(family)
    expected = {name: option for name, option in zip(("fewer", "more"), FOUND[family], strict=True) if option}
    assert requests.vision_options == expected
    assert [reason is None for reason in requests.fraction_reasons] == [option is not None for option in FOUND[family]]


# --- counts -------------------------------------------------------------------------------------------------------

# Family, picture, fraction -> tokens of the model as it is, the target, and what came of it.
COUNTED: dict[tuple[str, tuple[int, int], float], tuple[int, int, int]] = {
    # 10 x 7.5 tokens of 8 x 8 pixels, round(7.5) = 8, 80 in all; at most 40: rows of 5, 7 in each.
    ("qwen2_5_vl", (80, 60), 0.5): (80, 40, 35),
    # 4 rows of 5 are 20.
    ("qwen2_5_vl", (80, 60), 0.25): (80, 20, 20),
    # 4:3 as 3 x 4 tiles and the whole of 4 tokens each; at most 6 tiles and the whole: 2 x 2 is the nearest of 1 to 5.
    ("internvl", (80, 60), 0.5): (52, 26, 20),
    # A tile alone has no whole beside it, and two tiles would have one.
    ("internvl", (80, 60), 0.25): (52, 13, 4),
    # 128 x 96 pixels, 3 x 4 tiles of 32 and the whole; 96 x 72 would be 3 x 3, 64 x 48 are 2 x 2.
    ("smolvlm", (80, 60), 0.5): (52, 26, 20),
    # A crop of 980 pixels or one of 490, whose tokens its projector's queries count.
    ("aria", (80, 60), 0.5): (256, 128, 128),
    ("aria", (80, 60), 0.25): (256, 64, 128),
    # 280 tokens of 8 x 8 pixels: sqrt(280 * 64 / 4800) = 1.932, floor(14.49) * floor(19.32); 140: 10 * 13, 70: 7 * 9.
    ("gemma4", (80, 60), 0.5): (266, 133, 130),
    ("gemma4", (80, 60), 0.25): (266, 67, 63),
    # Twice as many would be 560: 20 * 27 = 540 are more than 532, and no number between is taken.
    ("gemma4", (80, 60), 2): (266, 532, 266),
    # 3 x 3 tiles of 16 cover 0.9 of it, with the whole 10 times 4 tokens; 4 tiles and the whole are 20.
    ("ovis2", (80, 60), 0.5): (40, 20, 20),
    ("aya_vision", (80, 60), 0.5): (52, 26, 20),
    # One crop beside the whole, both of 4 tokens.
    ("gemma3", (300, 1100), 2): (4, 8, 8),
    # round(1100 / 300) = 4 crops of 300 x 275 pixels.
    ("gemma3", (300, 1100), 5): (4, 20, 20),
    # 4:3 is less than 2 crops of 256 pixels: pan and scan leaves it whole.
    ("gemma3", (80, 60), 5): (4, 20, 4),
}  # fmt: skip


@pytest.mark.parametrize(("family", "size", "fraction"), COUNTED)
def test_a_fraction_is_counted(made_of: Made, family: str, size: tuple[int, int], fraction: float) -> None:
    own, target, actual = COUNTED[family, size, fraction]
    requests = made_of(family)[1]
    alone = requests.make(sample(size), "Why?", None).shape
    shape = requests.make(sample(size), "Why?", fraction_target(fraction).crops).shape
    assert (alone.vision_tokens, alone.target_tokens) == (own, None)
    assert (shape.target_tokens, shape.vision_tokens) == (target, actual)
    assert shape.actual is not None and shape.actual.pooled_features == actual == shape.prompt_tokens - (
        (shape.text_tokens or 0) + (shape.image_marker_tokens or 0)
    )


@pytest.mark.parametrize("family", [each for each in FOUND if FOUND[each][0] is not None])
@pytest.mark.parametrize("size", [(90, 60), (61, 203)])
def test_fewer_tokens_never_exceed_a_target_that_can_be_reached(
    made_of: Made, family: str, size: tuple[int, int]
) -> None:
    """Where it cannot be reached, no value of the option gives fewer."""
    folder, requests = made_of(family)
    shapes = [requests.make(sample(size), "Why?", fraction_target(each).crops).shape for each in (1.0, 0.6, 0.3)]
    own, more, fewer = (shape.vision_tokens or 0 for shape in shapes)
    assert own >= more >= fewer
    least, target = requests.make(sample(size), "Why?", fraction_target(1e-6).crops).shape.vision_tokens, own * 0.3
    assert fewer <= target + 0.5 or fewer == least
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    request = requests.make(sample(size), "Why?", fraction_target(0.3).crops)
    # Where placeholders and features differ in number, transformers raises.
    with torch.inference_mode():
        ids = model.generate(**request.inputs, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    assert ids.shape[1] == request.shape.prompt_tokens + 2


def test_crops_of_pan_and_scan_are_what_the_model_takes(made_of: Made) -> None:
    folder, requests = made_of("gemma3")
    request = requests.make(sample((300, 1100)), "Why?", fraction_target(3).crops)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.inference_mode():
        model(**request.inputs)
    assert request.inputs["pixel_values"].shape[0] == 3


def test_pictures_of_one_question_share_a_target(made_of: Made) -> None:
    """80 + 80 tokens; of both the same bound."""
    requests = made_of("qwen2_5_vl")[1]
    both = requests.make(sample((80, 60), (60, 80)), "Which?", fraction_target(0.5).crops).shape
    assert (both.target_tokens, both.vision_tokens) == (80, 70)


def test_tiers_and_numbers_bound_tokens_where_a_family_has_no_rule(made_of: Made) -> None:
    requests = made_of("gemma4")[1]
    # 144 for each crop and the whole: at most 576, of which 560 is the largest number it takes: 20 * 27.
    assert requests.make(sample((80, 60)), "Why?", TIERS["low"]).shape.vision_tokens == 20 * 27
    shape = requests.make(sample((80, 60)), "Why?", token_target(100, requests.token_unit).crops).shape
    assert (shape.vision_tokens, shape.target_tokens) == (63, None)


def test_a_picture_that_cannot_be_used_is_named(made_of: Made) -> None:
    with pytest.raises(SampleError, match="sample 7: its picture of 402 x 2 pixels cannot be used"):
        made_of("ovis2")[1].make(sample((402, 2)), "Why?", fraction_target(0.5).crops)


def test_the_processor_is_asked_for_nothing_at_the_models_own(made_of: Made) -> None:
    requests = made_of("ovis2")[1]
    own: Any = requests.make(sample((80, 60)), "Why?", None).inputs
    requests.make(sample((80, 60)), "Why?", fraction_target(0.25).crops)
    again: Any = requests.make(sample((80, 60)), "Why?", fraction_target(1.0).crops).inputs
    assert torch.equal(own["input_ids"], again["input_ids"]) and torch.equal(own["pixel_values"], again["pixel_values"])


# --- the search ---------------------------------------------------------------------------------------------------

SIZES = TRIAL_SIZES[:1]


def squares(option: TokenOption, value: int, sizes: Sizes) -> int | None:
    """Tokens by whole thousands of the value; values below 3 are refused."""
    return None if value < 3 else value // 1000 * 10 + 1


@pytest.mark.parametrize(
    ("target", "tokens"),
    # 1 is the least.
    [(1, 1), (0, 1), (10, 1), (11, 11), (500, 491), (990, 981)],
)
def test_the_largest_value_within_a_target_is_found(target: int, tokens: int) -> None:
    option = TokenOption("max_things", range(1, 100_001), True, 100_000)
    value = option.fitting(target, SIZES, squares)
    assert squares(option, value, SIZES) == tokens


def test_a_value_is_as_large_as_the_target_allows() -> None:
    """To one in 500."""
    option = TokenOption("max_things", range(1, 100_001), True, 100_000)
    assert 49_000 - 100 <= option.fitting(485, SIZES, squares) < 49_000


def test_what_adds_tokens_is_not_tried_far_beyond_the_target() -> None:
    tried = []

    def count(option: TokenOption, value: int, sizes: Sizes) -> int | None:
        tried.append(value)
        return value // 10

    option = TokenOption("max_things", range(1, 10**9), False, 100)
    assert option.fitting(77, SIZES, count) // 10 == 77
    assert max(tried) <= 2 * 780


def test_an_option_is_written_for_the_call() -> None:
    pixels = TokenOption("longest_edge", range(1, 901), True, 900, ("shortest_edge", 50), True)
    assert pixels.keywords(400) == {"size": {"longest_edge": 400, "shortest_edge": 50}}
    assert pixels.keywords(30) == {"size": {"longest_edge": 30, "shortest_edge": 30}}
    tiles = TokenOption("max_patches", range(1, 200), False, 12, ("min_patches", 2))
    assert tiles.keywords(8) == {"max_patches": 12, "min_patches": 8}
    assert tiles.keywords(20) == {"max_patches": 20, "min_patches": 20}
    scan = TokenOption("max_crops", range(1, 65), False, 4, switches=("do_scan",))
    assert scan.keywords(2) == {"do_scan": True, "max_crops": 2}
    picture = TokenOption("", range(31, WHOLE + 1), True)
    assert picture.keywords(500) == {} and picture.sizes(500, ((641, 1), (80, 60))) == ((320, 1), (40, 30))
    assert (pixels.written, tiles.written, picture.written) == (
        "size.longest_edge", "max_patches", "the size of the picture"
    )  # fmt: skip
