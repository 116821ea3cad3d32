"""The options of transformers image processors that set the number of vision tokens, and their values.

A kind of processor is an entry in `_KINDS`, under the name of its class. A `CropRange` counts crops without the
overview. For a processor that cuts pictures into crops it bounds the crops; for one that takes pictures in
their own shape it bounds the vision tokens: by its number of tokens where it has one, else by 144 for each crop and for
the whole picture. The upper bound holds, but for strips of few tokens; where the lower bound cannot be reached, the
counts of the request show it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from experiment_core_utils.knobs.token_units import TokenUnit, tokens_of_crops
from experiment_core_utils.knobs.vision_tokens import CropRange
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

    patch: int  #: side of a patch in pixels
    merge: int  #: patches on the side of a merged token
    frames: int  #: how often the processor counts a pixel of a still picture against the bounds
    widens_first: bool  #: whether a side shorter than a token is scaled to one before everything else
    own_bounds: tuple[int, int] | None = None  #: fewest and most pixels of the checkpoint, as its processor counts them

    @property
    def unit(self) -> TokenUnit:
        return TokenUnit(None)

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


# --- kinds --------------------------------------------------------------------------------------------------------


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


_KINDS: dict[str, Callable[[Any, Any], VisionOptions]] = {
    "LlavaNextImageProcessor": _llava_next,
    "AriaImageProcessor": _aria,
    "GotOcr2ImageProcessor": _got_ocr2,
    "SmolVLMImageProcessor": _idefics3,
    "Idefics3ImageProcessor": _idefics3,
    "Qwen2VLImageProcessor": _qwen2_vl,
    "Glm4vImageProcessor": _glm4v,
    "Glm46VImageProcessor": _glm4v,
}


def kind_of(image_processor: Any) -> str:
    """The class's name without the backend that it computes with."""
    return type(image_processor).__name__.removesuffix("Pil").removesuffix("Fast")


def known_kinds() -> tuple[str, ...]:
    """Names of the classes in the table."""
    return tuple(sorted(_KINDS))


def vision_options_of(processor: Any, config: Any) -> VisionOptions | None:
    """The options that set the number of vision tokens; None where no such option is known or there is none.

    Args:
        processor: of an image-text-to-text model, with its image processor.
        config: of the model.
    """
    make = _KINDS.get(kind_of(processor.image_processor))
    try:
        return None if make is None else make(processor, config)
    except (AttributeError, LookupError, TypeError):
        # A family that borrows another's image processor need not have the fields that this one's rule reads.
        return None
