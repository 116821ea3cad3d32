"""The scene generator: the same again from a seed, honest sizes, nothing overlapping, labels kept apart."""

import math
import random

import pytest
from PIL import Image, ImageChops

from experiment_core_utils.tasks.datasets.reference_scenes import (
    COLOURS,
    DEFAULT_H_REL,
    KINDS,
    LETTERS,
    MIN_TEXT_HEIGHT_PX,
    WORDS,
    Background,
    Item,
    ItemStyle,
    ScenePlan,
    _sprite_layout,
    is_reserved_label,
    plan_scene,
    render_plan,
)

PLANS = [plan_scene(seed) for seed in range(150)]


def test_equal_seeds_give_equal_scenes() -> None:
    one, other = plan_scene(11), plan_scene(random.Random(11))
    assert one == other
    assert render_plan(one).tobytes() == render_plan(other).tobytes()
    assert plan_scene(12) != one


def test_picture_has_the_size_of_the_plan() -> None:
    image = render_plan(PLANS[3])
    assert (image.mode, image.size) == ("RGB", (PLANS[3].width, PLANS[3].height))


def test_canvas_sides_and_aspect() -> None:
    for plan in PLANS:
        assert min(plan.width, plan.height) >= 400 and max(plan.width, plan.height) <= 1400
        assert 1 / 3.01 <= plan.width / plan.height <= 3.01


def test_items_stay_inside_and_apart() -> None:
    for plan in PLANS:
        for at, item in enumerate(plan.items):
            x0, y0, x1, y1 = item.box
            assert 6 <= x0 < x1 <= plan.width - 6 and 6 <= y0 < y1 <= plan.height - 6
            for other in plan.items[:at]:
                a0, b0, a1, b1 = other.box
                assert min(x1, a1) < max(x0, a0) or min(y1, b1) < max(y0, b0)


def test_items_are_distinguishable() -> None:
    for plan in PLANS:
        assert 3 <= len(plan.items) <= 7
        assert len({(item.colour, item.kind) for item in plan.items}) == len(plan.items)
        assert len({item.label for item in plan.items}) == len(plan.items)
        for item in plan.items:
            assert item.kind in KINDS and item.colour in COLOURS
            assert 2 <= len(item.label) <= 4
            assert set(item.label) <= set(LETTERS + "0123456789")


def test_kinds_and_colours_repeat_in_many_scenes() -> None:
    repeated = sum(len({item.kind for item in plan.items}) < len(plan.items) for plan in PLANS)
    assert repeated > len(PLANS) / 2


def test_text_heights_are_in_range_and_log_uniform() -> None:
    low, high = DEFAULT_H_REL
    drawn = []
    for plan in PLANS:
        mean_side = math.sqrt(plan.width * plan.height)
        for item in plan.items:
            assert item.text_height_px >= MIN_TEXT_HEIGHT_PX
            assert item.h_rel == pytest.approx(item.text_height_px / mean_side)
            assert item.h_rel <= high
            assert item.h_rel >= low
            drawn.append(math.log(item.h_rel))
    middle = (math.log(low) + math.log(high)) / 2
    assert sum(drawn) / len(drawn) == pytest.approx(middle, abs=0.1)


def test_requested_text_height_is_kept() -> None:
    plan = plan_scene(5, (0.02, 0.02))
    assert {item.text_height_px for item in plan.items} == {round(0.02 * math.sqrt(plan.width * plan.height))}
    assert {item.text_height_px for item in plan_scene(5, (0.001, 0.001)).items} == {MIN_TEXT_HEIGHT_PX}


def test_shape_scales_with_its_text() -> None:
    for plan in PLANS:
        floor = 0.03 * math.sqrt(plan.width * plan.height)
        for item in plan.items:
            assert item.diameter <= max(3.5 * item.text_height_px, floor) + 1
            assert item.diameter >= floor * 0.9


@pytest.mark.parametrize("text_height", [6, 9, 14, 23, 40, 63])
@pytest.mark.parametrize("font", ["DejaVuSans.ttf", "DejaVuSansMono.ttf", "DejaVuSerif.ttf", "DejaVuSans-Bold.ttf"])
def test_rendered_capitals_have_the_stated_height(text_height: int, font: str) -> None:
    """Paint the same item with and without visible text and measure the rows in which the pictures differ."""
    black = (0, 0, 0)
    plain = Background((250, 250, 250), "plain", 0, 0)

    def paint(text: tuple[int, int, int]) -> Image.Image:
        style = ItemStyle(fill=(215, 30, 35), text=text, plate=black, font=font, angle_degrees=0.0)
        item = Item("circle", "red", "HHE", text_height, 0.0, (0, 0, 400, 400), (0.0, 0.0), 60, style)
        size = _size_of(item)
        placed = Item("circle", "red", "HHE", text_height, 0.0, (5, 5, 5 + size[0], 5 + size[1]), (0.0, 0.0), 60, style)
        return render_plan(ScenePlan(400, 400, (placed,), plain))

    box = ImageChops.difference(paint((255, 255, 255)), paint(black)).getbbox()
    assert box is not None
    assert box[3] - box[1] == text_height


def _size_of(item: Item) -> tuple[int, int]:
    layout = _sprite_layout(item.label, item.text_height_px, item.diameter, item.style)
    return layout.rotated_width, layout.rotated_height


def test_the_shape_has_its_colour_at_its_centre() -> None:
    for seed in range(15):
        image = render_plan(PLANS[seed])
        for item in PLANS[seed].items:
            pixel = image.getpixel((round(item.centre[0]), round(item.centre[1])))
            assert isinstance(pixel, tuple)
            assert all(abs(a - b) <= 12 for a, b in zip(pixel, COLOURS[item.colour], strict=True))


def test_nothing_is_painted_outside_the_boxes() -> None:
    for seed in range(8):
        plan = plan_scene(seed)
        bare = render_plan(ScenePlan(plan.width, plan.height, (), plan.background))
        difference = ImageChops.difference(render_plan(plan), bare)
        for item in plan.items:
            difference.paste((0, 0, 0), item.box)
        assert difference.getbbox() is None


def test_reserved_labels_only_occur_in_validation() -> None:
    train = [item.label for plan in PLANS for item in plan.items]
    assert not any(is_reserved_label(label) for label in train)
    validation = [item.label for seed in range(150) for item in plan_scene(seed, validation_labels=True).items]
    share = sum(map(is_reserved_label, validation)) / len(validation)
    assert 0.4 < share < 0.6


def test_about_a_tenth_of_the_labels_is_reserved() -> None:
    numbers = [str(number) for number in range(10, 10_000)]
    assert 0.08 < sum(map(is_reserved_label, numbers)) / len(numbers) < 0.12
    assert any(map(is_reserved_label, WORDS))
