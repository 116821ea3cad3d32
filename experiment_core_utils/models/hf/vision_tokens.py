"""The options of transformers image processors that set the number of vision tokens, and their values.

A rule belongs to every processor that it foretells, as trial pictures show; a family without one has the option that
`token_options` finds. A `CropRange` counts crops without the
overview. For a processor that cuts pictures into crops it bounds the crops; for one that takes pictures in
their own shape it bounds the vision tokens: by its number of tokens where it has one, else by 144 for each crop and for
the whole picture. The upper bound holds, but for strips of few tokens; where the lower bound cannot be reached, the
counts of the request show it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from experiment_core_utils.knobs.token_units import tokens_of_crops
from experiment_core_utils.knobs.vision_tokens import TIERS, CropRange
from experiment_core_utils.models.hf.tilings import (
    ARIA_SMALL_CROP,
    AspectTiles,
    LongestEdgeTiles,
    PinpointTiles,
    SplitTiles,
    VisionOptions,
)
from experiment_core_utils.records.requests import VisionGeometry


@dataclass(frozen=True)
class PixelBudget(VisionOptions):
    """The rule of Qwen2-VL, its successors and GLM-4V: the picture keeps its shape, its pixels are kept between two
    bounds.
    """

    features_per_crop = None
    patch: int  #: side of a patch in pixels
    merge: int  #: patches on the side of a merged token
    frames: int  #: how often the processor counts a pixel of a still picture against the bounds
    widens_first: bool  #: whether a side shorter than a token is scaled to one before everything else
    own_bounds: tuple[int, int] | None = None  #: fewest and most pixels of the checkpoint, as its processor counts them

    def options_for(self, crops: CropRange, width: int, height: int) -> Mapping[str, Any]:
        least, most = self._bounds(crops, width, height)
        return {"size": {"shortest_edge": least, "longest_edge": most}}

    def geometry_for(self, crops: CropRange, width: int, height: int) -> VisionGeometry:
        return self._geometry(*self._grid(*self._bounds(crops, width, height), width, height))

    def own_geometry(self, width: int, height: int) -> VisionGeometry | None:
        return None if self.own_bounds is None else self._geometry(*self._grid(*self.own_bounds, width, height))

    def _geometry(self, rows: int, cols: int) -> VisionGeometry:
        size = (rows * self._factor, cols * self._factor)
        grid = (rows * self.merge, cols * self.merge)
        return VisionGeometry(0, None, size, rows * cols, patches=math.prod(grid), patch_grid=grid)

    @property
    def _factor(self) -> int:
        return self.patch * self.merge

    def _bounds(self, crops: CropRange, width: int, height: int) -> tuple[int, int]:
        """The bounds in pixels; the lower one is reduced as far as needed for scaled-up pictures to stay within the
        upper one.
        """
        most = crops.tokens or tokens_of_crops(crops.max_crops)
        tokens = crops.tokens or tokens_of_crops(crops.min_crops)
        pixels = self.frames * self._factor**2
        found = (
            least
            for least in range(tokens, 0, -1)
            if math.prod(self._grid(least * pixels, most * pixels, width, height)) <= most
        )
        return next(found, 1) * pixels, most * pixels

    def _grid(self, least: int, most: int, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tokens by the processor's rule for these bounds in pixels, in its own order of
        operations.
        """
        factor, frames = self._factor, self.frames
        if self.widens_first and min(width, height) < factor:
            scale = max(factor / height, factor / width)
            width, height = int(width * scale), int(height * scale)
        rows, cols = round(height / factor), round(width / factor)
        if rows * cols * frames * factor**2 > most:
            shrink = math.sqrt((frames * height * width) / most)
            return max(1, math.floor(height / shrink / factor)), max(1, math.floor(width / shrink / factor))
        if rows * cols * frames * factor**2 < least:
            grow = math.sqrt(least / (frames * height * width))
            return math.ceil(height * grow / factor), math.ceil(width * grow / factor)
        return rows, cols


# --- rules --------------------------------------------------------------------------------------------------------


def _llava_next(processor: Any, config: Any) -> VisionOptions:
    images = processor.image_processor
    # Checkpoints with a CLIP tower have a crop, those with a SigLIP tower a size of both sides.
    sides = [box for box in (images.crop_size, images.size) if box is not None]
    tile = next((box["height"] for box in sides if box["height"]), None) or images.size["shortest_edge"]
    canvases = tuple((height, width) for height, width in images.image_grid_pinpoints)
    return PinpointTiles(tile, (tile // processor.patch_size) ** 2, canvases)


def _aria(processor: Any, config: Any) -> VisionOptions:
    return SplitTiles(processor.size_conversion[ARIA_SMALL_CROP])


def _got_ocr2(processor: Any, config: Any) -> VisionOptions:
    images, size = processor.image_processor, processor.image_processor.size
    # What the processor says of its calls stands before what its image processor says.
    cuts = getattr(processor, "images_kwargs", {}).get("crop_to_patches", images.crop_to_patches)
    crops = CropRange(images.min_patches, images.max_patches) if cuts else None
    return AspectTiles((size["height"], size["width"]), config.image_seq_length, crops)


def _idefics3(processor: Any, config: Any) -> VisionOptions:
    images = processor.image_processor
    edge = images.size.get("longest_edge") if images.do_image_splitting else None
    return LongestEdgeTiles(images.max_image_size["longest_edge"], processor.image_seq_len, edge)


def _qwen2_vl(processor: Any, config: Any) -> VisionOptions:
    images = processor.image_processor
    return PixelBudget(images.patch_size, images.merge_size, 1, False, _own_bounds(images))


def _glm4v(processor: Any, config: Any) -> VisionOptions:
    images = processor.image_processor
    return PixelBudget(images.patch_size, images.merge_size, images.temporal_patch_size, True, _own_bounds(images))


def _own_bounds(images: Any) -> tuple[int, int] | None:
    least, most = (images.size.get(side) for side in ("shortest_edge", "longest_edge"))
    return (least, most) if least and most else None


_RULES: tuple[Callable[[Any, Any], VisionOptions], ...] = (_llava_next, _aria, _got_ocr2, _idefics3, _qwen2_vl, _glm4v)
# (width, height): a photo, which several tiles hold, and a strip narrower than a token.
_TRIALS = ((TIERS["low"], (640, 480)), (TIERS["medium"], (640, 480)), (TIERS["low"], (300, 5)))


def vision_options_of(
    processor: Any, config: Any, tried_geometry: Callable[[VisionOptions, CropRange, tuple[int, int]], VisionGeometry]
) -> VisionOptions | None:
    """The rule that foretells what the processor makes of trial pictures; None where there is no such rule.

    Args:
        processor: of an image-text-to-text model, with its image processor.
        config: of the model.
        tried_geometry: the geometry of a picture of a size (width, height) as the processor makes it by a rule within
            crops; raises what the processor raises.
    """
    for make in _RULES:
        try:
            rule = make(processor, config)
            if all(_foretells(rule, tried_geometry(rule, *trial), *trial) for trial in _TRIALS):
                return rule
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError):
            # Of another family: it lacks the fields that this rule reads, or refuses the options.
            continue
    return None


def _foretells(rule: VisionOptions, actual: VisionGeometry, crops: CropRange, size: tuple[int, int]) -> bool:
    said = rule.geometry_for(crops, *size)
    is_same = (said.total_crops, said.patches) == (actual.total_crops, actual.patches)
    return is_same and (rule.drops_padding or said.pooled_features == actual.pooled_features)
