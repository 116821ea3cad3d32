"""Generated scenes: pictures of labelled coloured shapes, and the list of what each shows.

The scenes are made so that seeing more of the picture pays: a model that looks at the whole canvas through one
square of 336 pixels can read only the larger labels, one that looks at several crops can read them all. What decides
is the relative text height `h_rel` = cap height in pixels / sqrt(canvas width * canvas height), drawn for each item.

Making a scene has two halves. `plan_scene` decides everything (pure, no pixels, a few tenths of a millisecond);
`render_plan` paints the plan. Both depend only on their arguments, so that any scene can be made again alone.
"""

import itertools
import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from experiment_core_utils.primitives.errors import ConfigurationError

Rgb = tuple[int, int, int]
Box = tuple[int, int, int, int]
Point = tuple[float, float]
KINDS = ("circle", "square", "triangle", "star", "diamond", "cross")
COLOURS: MappingProxyType[str, Rgb] = MappingProxyType(
    {
        "red": (215, 30, 35),
        "orange": (245, 135, 20),
        "yellow": (240, 215, 30),
        "green": (30, 150, 60),
        "cyan": (40, 200, 215),
        "blue": (35, 70, 205),
        "purple": (140, 45, 165),
        "gray": (128, 128, 128),
    }
)

# No O and no I: they look like 0 and 1.
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
DIGITS = "0123456789"
WORDS = tuple(
    """
    ACE ANT APE ART BAG BAR BAT BED BEE BELL BUS CAB CAKE CAP CAR CART CAT CUP DAY DEN DESK DRUM DUCK EAR EGG
    FAN FARM FLAG FLY GAP GAS GATE GEM GYM HAM HAND HAT HEN HUT JAM JAR JET KEY LAKE LAMP LEAF LEG MAP MASK MUG
    NET NEST NUT PALM PAN PARK PEA PEN PET RAM RAT SALT SAND SEA SHEEP SUN TEA TENT TRAM TREE TUB VAN VASE WAX
    WEB
    """.split()
)
# The characters of codes, as in K7QD and then as in KQ7D, and the seed of each form's order.
_CODE_FORMS = (
    ((LETTERS, DIGITS, LETTERS, LETTERS), "item-codes"),
    ((LETTERS, LETTERS, DIGITS, LETTERS), "item-codes-2"),
)
# Answers that the VQA normaliser would drop (articles) or turn into digits.
_FORBIDDEN_LABELS = frozenset({"AN", "THE", "TEN"})
_RESERVED_ONE_IN = 10
_MAX_LABEL_LENGTH = 4
_FONT_FILES = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSansMono.ttf", "DejaVuSerif.ttf")
_CAP_HEIGHT_PER_SIZE = 0.729  # of all DejaVu faces
_SHARE_DESCENDER = 0.28  # of the cap height: the tail of Q
MIN_TEXT_HEIGHT_PX = 6
DEFAULT_H_REL = (0.008, 0.03)
_NUMBER_OF_ITEMS = (3, 7)
_SIDE_RANGE_PX = (400, 1400)  # with an aspect ratio from 1:3 to 3:1
_MAX_ASPECT = 3.0
_SHAPE_PER_TEXT = (1.5, 3.5)
_SHAPE_FLOOR = 0.03  # of the canvas' geometric mean side
_LAYOUT_ATTEMPTS = 12
_PLACE_ATTEMPTS = 60


@dataclass(frozen=True)
class Item:
    """One labelled shape."""

    #: kind, colour: names from `KINDS` and `COLOURS`; the pair is unique within a scene
    kind: str
    colour: str
    label: str  #: 2 to 4 digits and capital letters, unique within a scene
    text_height_px: int  #: height of a rendered capital letter, in pixels
    h_rel: float  #: text_height_px / sqrt(width * height) of the canvas
    box: Box  #: (x0, y0, x1, y1) of shape and label together, x1 and y1 exclusive
    centre: Point  #: (x, y) of the shape
    diameter: int  #: side of the square that the shape fills, in pixels
    style: "ItemStyle" = field(repr=False)  #: how the drawing looks; says nothing that a question asks for

    @property
    def name(self) -> str:
        """What a question calls it, such as red circle."""
        return f"{self.colour} {self.kind}"


@dataclass(frozen=True)
class ItemStyle:
    """The look of an item: exact colours, font, rotation; `plate` is None where the label is on the background."""

    fill: Rgb
    text: Rgb
    plate: Rgb | None
    font: str
    angle_degrees: float


@dataclass(frozen=True)
class Background:
    """A plain colour with a slight texture; `strength` is the largest difference in a channel that it makes."""

    colour: Rgb
    texture: Literal["plain", "gradient", "clouds", "stripes", "grid"]
    strength: int
    texture_seed: int

    @property
    def is_light(self) -> bool:
        return sum(self.colour) > 3 * 128


@dataclass(frozen=True)
class SceneContent:
    """What questions are asked about: the size in pixels, and the items in the order in which they are drawn."""

    width: int
    height: int
    items: tuple[Item, ...]


@dataclass(frozen=True)
class ScenePlan(SceneContent):
    """A scene before painting: everything except the pixels."""

    background: Background


def plan_scene(
    rng_or_seed: random.Random | int,
    h_rel: tuple[float, float] = DEFAULT_H_REL,
    *,
    validation_labels: bool = False,
    codes: range | None = None,
) -> ScenePlan:
    """Decide canvas, background, items and their places.

    Items do not overlap and keep a margin to each other and to the border. Where they do not fit, the layout is
    tried again with smaller shapes, and then with fewer items.

    Args:
        h_rel: range of the relative text height, log-uniform for each item; never below 6 px absolute.
        validation_labels: draws about half of the labels from those reserved for validation; else none of them.
        codes: which of `item_codes` the labels are; None draws labels of all sorts.
    """
    rng = rng_or_seed if isinstance(rng_or_seed, random.Random) else random.Random(rng_or_seed)
    low, high = _SIDE_RANGE_PX
    aspect = math.exp(rng.uniform(-math.log(_MAX_ASPECT), math.log(_MAX_ASPECT)))
    spread = math.sqrt(max(aspect, 1 / aspect))
    mean_side = rng.uniform(low * spread, high / spread)
    root = math.sqrt(aspect)
    width, height = round(mean_side * root), round(mean_side / root)
    background = _draw_background(rng)
    count = rng.randint(*_NUMBER_OF_ITEMS)
    labels = (
        _draw_labels(rng, count, validation_labels)
        if codes is None
        else [item_codes()[index] for index in rng.sample(codes, count)]
    )
    drafts = [
        _draw_draft(rng, kind, colour, label, h_rel, math.sqrt(width * height), background)
        for (kind, colour), label in zip(_draw_pairs(rng, count), labels, strict=True)
    ]
    items = tuple(_finish(draft, box, width, height) for draft, box in _place(rng, width, height, drafts))
    return ScenePlan(width, height, items, background)


def is_reserved_label(label: str) -> bool:
    """Whether `label` is kept for validation: about one label in ten, by a checksum, for ever the same ones."""
    return zlib.crc32(f"reference-scenes:{label}".encode()) % _RESERVED_ONE_IN == 0


@lru_cache(maxsize=1)
def item_codes() -> tuple[str, ...]:
    """The codes of items, as in K7QD and then as in KQ7D, in an order that otherwise says nothing about them; none is
    reserved for validation.
    """
    return tuple(code for sorts, seed in _CODE_FORMS for code in _codes(sorts, seed) if not is_reserved_label(code))


def _codes(sorts: tuple[str, ...], seed: str) -> list[str]:
    """Every code of one form, in the order of `seed`."""
    codes = ["".join(signs)[::-1] for signs in itertools.product(*reversed(sorts))]
    return random.Random(seed).sample(codes, len(codes))


# --- planning -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Draft:
    """An item that has no place yet; sizes in pixels."""

    kind: str
    colour: str
    label: str
    text_height: int
    diameter: int
    style: ItemStyle

    @property
    def sprite(self) -> "_SpriteLayout":
        return _sprite_layout(self.label, self.text_height, self.diameter, self.style)


@dataclass(frozen=True)
class _SpriteLayout:
    """Where shape, plate and text are inside an upright item of `width` x `height`, and its size after rotation."""

    width: int
    height: int
    shape_left: int
    plate: Box | None
    text_left: int
    baseline: int
    rotated_width: int
    rotated_height: int


def _draw_background(rng: random.Random) -> Background:
    light = rng.random() < 0.7
    base = rng.randint(215, 252) if light else rng.randint(8, 45)
    tint = 10 if light else 8
    red, green, blue = (min(255, max(0, base + rng.randint(-tint, tint))) for _ in range(3))
    texture: Literal["plain", "gradient", "clouds", "stripes", "grid"] = rng.choice(
        ("plain", "plain", "gradient", "clouds", "stripes", "grid")
    )
    return Background((red, green, blue), texture, rng.randint(5, 16), rng.getrandbits(32))


def _draw_pairs(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """`count` different (kind, colour) pairs from a drawn part of the kinds and colours, so that both often repeat."""
    kinds = rng.sample(KINDS, rng.randint(2, len(KINDS)))
    smallest = max(2, math.ceil(count / len(kinds)))
    colours = rng.sample(tuple(COLOURS), rng.randint(smallest, len(COLOURS)))
    return rng.sample([(kind, colour) for kind in kinds for colour in colours], count)


def _draw_labels(rng: random.Random, count: int, validation: bool) -> list[str]:
    labels: list[str] = []
    while len(labels) < count:
        reserved = validation and rng.random() < 0.5
        label = _draw_label(rng)
        while is_reserved_label(label) != reserved or label in _FORBIDDEN_LABELS:
            label = _draw_label(rng)
        if label not in labels:
            labels.append(label)
    return labels


def _draw_label(rng: random.Random) -> str:
    choice = rng.random()
    length = rng.randint(2, _MAX_LABEL_LENGTH)
    if choice < 0.35:
        return rng.choice(DIGITS[1:]) + "".join(rng.choices(DIGITS, k=length - 1))
    if choice < 0.60:
        return "".join(rng.choices(LETTERS, k=length))
    if choice < 0.85:
        return "".join(rng.choices(LETTERS + DIGITS, k=length))
    return rng.choice(WORDS)


def _draw_draft(
    rng: random.Random,
    kind: str,
    colour: str,
    label: str,
    h_rel: tuple[float, float],
    mean_side: float,
    background: Background,
) -> _Draft:
    # Whole pixels, log-uniform, kept inside the range wherever a whole number of at least 6 lies in it.
    low, high = h_rel
    height = round(math.exp(rng.uniform(math.log(low), math.log(high))) * mean_side)
    inside = max(math.ceil(low * mean_side), min(math.floor(high * mean_side), height))
    text_height = max(MIN_TEXT_HEIGHT_PX, inside)
    diameter = max(rng.uniform(*_SHAPE_PER_TEXT) * text_height, _SHAPE_FLOOR * mean_side)
    fill = COLOURS[colour]
    shift = rng.randint(-10, 10)
    jittered = (_clip(fill[0] + shift), _clip(fill[1] + shift), _clip(fill[2] + shift))
    on_plate = rng.random() < 0.6
    plate_light = rng.random() < 0.5
    plate = ((255, 255, 255) if plate_light else (0, 0, 0)) if on_plate else None
    behind_light = plate_light if on_plate else background.is_light
    tone = rng.randint(0, 70) if behind_light else rng.randint(190, 255)
    text = (_clip(tone + rng.randint(-25, 25)), _clip(tone + rng.randint(-25, 25)), _clip(tone + rng.randint(-25, 25)))
    angle = round(rng.uniform(-6.0, 6.0), 2) if rng.random() < 0.2 else 0.0
    style = ItemStyle(jittered, text, plate, rng.choice(_FONT_FILES), angle)
    return _Draft(kind, colour, label, text_height, round(diameter), style)


def _clip(value: int) -> int:
    return max(0, min(255, value))


def _sprite_layout(label: str, text_height: int, diameter: int, style: ItemStyle) -> _SpriteLayout:
    text_width = math.ceil(_font(style.font, text_height).getlength(label))
    below = math.ceil(_SHARE_DESCENDER * text_height)
    if style.plate is None:
        width = max(diameter, text_width)
        gap = max(2, round(0.35 * text_height))
        baseline = diameter + gap + text_height
        height = baseline + below
        plate = None
    else:
        pad = max(2, round(0.4 * text_height))
        plate_width = text_width + 2 * pad
        width = max(diameter, plate_width)
        plate_left = (width - plate_width) // 2
        baseline = diameter + pad + text_height
        height = baseline + max(pad, below)
        plate = (plate_left, diameter, plate_left + plate_width, height)
    turn = math.radians(abs(style.angle_degrees))
    spare = 2 if turn else 0
    return _SpriteLayout(
        width=width,
        height=height,
        shape_left=(width - diameter) // 2,
        plate=plate,
        text_left=(width - text_width) // 2,
        baseline=baseline,
        rotated_width=math.ceil(width * math.cos(turn) + height * math.sin(turn)) + spare,
        rotated_height=math.ceil(width * math.sin(turn) + height * math.cos(turn)) + spare,
    )


def _place(rng: random.Random, width: int, height: int, drafts: Sequence[_Draft]) -> list[tuple[_Draft, Box]]:
    mean_side = math.sqrt(width * height)
    floor = max(8, round(_SHAPE_FLOOR * mean_side))
    kept = list(drafts)
    while True:
        for attempt in range(_LAYOUT_ATTEMPTS):
            diameters = [max(floor, round(draft.diameter * 0.9**attempt)) for draft in kept]
            sized = [replace(draft, diameter=size) for draft, size in zip(kept, diameters, strict=True)]
            boxes = _try_layout(rng, width, height, sized, max(6, round(0.012 * mean_side)))
            if boxes is not None:
                return list(zip(sized, boxes, strict=True))
        kept.pop()


def _try_layout(rng: random.Random, width: int, height: int, drafts: Sequence[_Draft], margin: int) -> list[Box] | None:
    """Random places without overlap, largest item first; None if one finds no place."""
    sizes = [(draft.sprite.rotated_width, draft.sprite.rotated_height) for draft in drafts]
    placed: dict[int, Box] = {}
    for at in sorted(range(len(sizes)), key=lambda index: -sizes[index][0] * sizes[index][1]):
        item_width, item_height = sizes[at]
        last_x, last_y = width - margin - item_width, height - margin - item_height
        if last_x < margin or last_y < margin:
            return None
        for _ in range(_PLACE_ATTEMPTS):
            x0, y0 = rng.randint(margin, last_x), rng.randint(margin, last_y)
            box = (x0, y0, x0 + item_width, y0 + item_height)
            if all(_apart(box, other, margin) for other in placed.values()):
                placed[at] = box
                break
        else:
            return None
    return [placed[at] for at in range(len(sizes))]


def _apart(one: Box, other: Box, margin: int) -> bool:
    return (
        one[2] + margin <= other[0]
        or other[2] + margin <= one[0]
        or one[3] + margin <= other[1]
        or other[3] + margin <= one[1]
    )


def _finish(draft: _Draft, box: Box, width: int, height: int) -> Item:
    sprite = draft.sprite
    middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
    # The shape's centre is above the middle of the upright item; turn that arm with the item (y points down).
    arm = sprite.height / 2 - draft.diameter / 2
    turn = math.radians(draft.style.angle_degrees)
    centre = (round(middle[0] - arm * math.sin(turn), 1), round(middle[1] - arm * math.cos(turn), 1))
    return Item(
        kind=draft.kind,
        colour=draft.colour,
        label=draft.label,
        text_height_px=draft.text_height,
        h_rel=draft.text_height / math.sqrt(width * height),
        box=box,
        centre=centre,
        diameter=draft.diameter,
        style=draft.style,
    )


# --- painting -------------------------------------------------------------------------------------------------------


def render_plan(plan: ScenePlan) -> Image.Image:
    """Paint `plan`: an RGB picture of `plan.width` x `plan.height`."""
    image = _paint_background(plan.background, plan.width, plan.height)
    for item in plan.items:
        _paint_item(image, item)
    return image


@lru_cache(maxsize=1024)
def _font(file_name: str, cap_height: int) -> ImageFont.FreeTypeFont:
    """The font at the size whose rendered capital H is `cap_height` pixels high."""
    path = str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / file_name)
    fitting = cap_height / _CAP_HEIGHT_PER_SIZE
    for nudge in (0.0, 0.25, -0.25, 0.5, -0.5, 0.75, -0.75):
        font = ImageFont.truetype(path, fitting + nudge, layout_engine=ImageFont.Layout.BASIC)
        _, top, _, bottom = font.getbbox("H", anchor="ls")
        if bottom - top == cap_height:
            return font
    raise ConfigurationError(f"{file_name} has no size with capitals of {cap_height} px: the font is not a DejaVu face")


def _paint_background(background: Background, width: int, height: int) -> Image.Image:
    if background.texture == "plain":
        return Image.new("RGB", (width, height), background.colour)
    red, green, blue = background.colour
    away = -background.strength if background.is_light else background.strength
    darker = (_clip(red + away), _clip(green + away), _clip(blue + away))
    rng = random.Random(background.texture_seed)
    if background.texture in ("stripes", "grid"):
        image = Image.new("RGB", (width, height), background.colour)
        _paint_lines(image, darker, rng, both_ways=background.texture == "grid")
        return image
    # One byte a pixel is spread over the two colours by a palette: far cheaper than blending three channels.
    if background.texture == "gradient":
        field_ = Image.frombytes("L", (2, 2), rng.randbytes(4))
    else:
        field_ = Image.frombytes("L", (13, 13), rng.randbytes(169))
    indexed = field_.resize((width, height), Image.Resampling.BILINEAR)
    levels = [
        [round(a + (b - a) * step / 255) for a, b in zip(background.colour, darker, strict=True)] for step in range(256)
    ]
    indexed.putpalette([channel for level in levels for channel in level])
    return indexed.convert("RGB")


def _paint_lines(image: Image.Image, colour: Rgb, rng: random.Random, both_ways: bool) -> None:
    draw = ImageDraw.Draw(image)
    pitch = rng.randint(12, 60)
    thickness = rng.randint(1, 2) if both_ways else rng.randint(1, max(2, pitch // 2))
    across = rng.random() < 0.5
    if both_ways or across:
        for y in range(rng.randrange(pitch), image.height, pitch):
            draw.rectangle((0, y, image.width, y + thickness - 1), fill=colour)
    if both_ways or not across:
        for x in range(rng.randrange(pitch), image.width, pitch):
            draw.rectangle((x, 0, x + thickness - 1, image.height), fill=colour)


def _paint_item(image: Image.Image, item: Item) -> None:
    style = item.style
    sprite = _sprite_layout(item.label, item.text_height_px, item.diameter, style)
    left, top = (sprite.rotated_width - sprite.width) // 2, (sprite.rotated_height - sprite.height) // 2
    size = (sprite.rotated_width, sprite.rotated_height)

    def lay(mask: Image.Image, colour: Rgb) -> None:
        turned = mask.rotate(style.angle_degrees, Image.Resampling.BICUBIC) if style.angle_degrees else mask
        image.paste(colour, item.box, turned)

    shape = Image.new("L", size)
    shape.paste(_shape_mask(item.kind, item.diameter), (left + sprite.shape_left, top))
    lay(shape, style.fill)
    if style.plate is not None and sprite.plate is not None:
        plate = Image.new("L", size)
        x0, y0, x1, y1 = sprite.plate
        plate.paste(255, (left + x0, top + y0, left + x1, top + y1))
        lay(plate, style.plate)
    text = Image.new("L", size)
    font = _font(style.font, item.text_height_px)
    ImageDraw.Draw(text).text(
        (left + sprite.text_left, top + sprite.baseline), item.label, fill=255, font=font, anchor="ls"
    )
    lay(text, style.text)


@lru_cache(maxsize=2048)
def _shape_mask(kind: str, diameter: int) -> Image.Image:
    """The shape filling a square of `diameter`, edges smoothed by drawing it four times as large."""
    scale = 4
    side = diameter * scale
    mask = Image.new("L", (side, side))
    draw = ImageDraw.Draw(mask)
    if kind == "circle":
        draw.ellipse((0, 0, side - 1, side - 1), fill=255)
    else:
        draw.polygon([(x * (side - 1), y * (side - 1)) for x, y in _OUTLINES[kind]], fill=255)
    return mask.reduce(scale)


def _star_outline() -> tuple[Point, ...]:
    points = []
    for corner in range(10):
        radius = 0.5 if corner % 2 == 0 else 0.2
        angle = math.pi * corner / 5
        points.append((0.5 + radius * math.sin(angle), 0.525 - radius * 1.05 * math.cos(angle)))
    return tuple(points)


# Corners in the unit square, y pointing down.
_OUTLINES: MappingProxyType[str, tuple[Point, ...]] = MappingProxyType(
    {
        "square": ((0.06, 0.06), (0.94, 0.06), (0.94, 0.94), (0.06, 0.94)),
        "triangle": ((0.5, 0.0), (1.0, 0.95), (0.0, 0.95)),
        "star": _star_outline(),
        "diamond": ((0.5, 0.0), (0.9, 0.5), (0.5, 1.0), (0.1, 0.5)),
        "cross": (
            (0.34, 0.0), (0.66, 0.0), (0.66, 0.34), (1.0, 0.34), (1.0, 0.66), (0.66, 0.66),
            (0.66, 1.0), (0.34, 1.0), (0.34, 0.66), (0.0, 0.66), (0.0, 0.34), (0.34, 0.34),
        ),
    }
)  # fmt: skip
