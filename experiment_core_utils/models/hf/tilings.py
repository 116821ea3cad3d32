"""The rules by which processors cut pictures into tiles, and the options that set their number.

Each class is the rule of one kind of processor.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from transformers.image_processing_utils import select_best_resolution

from experiment_core_utils.knobs.token_units import TokenUnit, tokens_of_crops
from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.records.requests import VisionGeometry

# Both are limits that the processors have in their code.
ARIA_SMALL_CROP = 490
_IDEFICS_LONGEST_EDGE = 4096
Tiling = tuple[int, int]


class VisionOptions(ABC):
    """The options that set the number of vision tokens of one processor; pictures are width x height pixels."""

    drops_padding: ClassVar[bool] = False  #: whether features of padding are dropped and row ends added
    overview: ClassVar[Literal["always", "beside several", "never"]] = "always"  #: as of `TokenUnit`
    features_per_crop: int | None  #: as of `TokenUnit`

    @property
    def unit(self) -> TokenUnit:
        """What a number of vision tokens is made of."""
        return TokenUnit(self.features_per_crop, self.overview)

    @abstractmethod
    def options_for(self, crops: CropRange, width: int, height: int) -> Mapping[str, Any]:
        """Keyword arguments of the image processor's call for one picture."""

    def config_for(self, crops: CropRange) -> Mapping[str, Any]:
        """Fields that the model's config and the image processor need while such requests are made and run.

        Empty for models that read everything off the request.
        """
        return {}

    @abstractmethod
    def geometry_for(self, crops: CropRange, width: int, height: int) -> VisionGeometry:
        """The geometry that the processor's rule gives under those options."""

    def own_geometry(self, width: int, height: int) -> VisionGeometry | None:
        """The geometry that the processor's rule gives without any option; None where that is not known before."""
        return None


@dataclass(frozen=True)
class PinpointTiles(VisionOptions):
    """The rule of LLaVA-NeXT: the canvas is chosen from a list that must be the same in the model's config."""

    drops_padding = True
    tile: int  #: side of a tile in pixels
    features_per_crop: int  #: before the rows and columns of padding are dropped and row ends added
    own_canvases: tuple[Tiling, ...] = ()  #: (height, width) in pixels of those that the checkpoint chooses from

    def options_for(self, crops: CropRange, width: int, height: int) -> Mapping[str, Any]:
        return self.config_for(crops)

    def config_for(self, crops: CropRange) -> Mapping[str, Any]:
        return {"image_grid_pinpoints": _canvases(crops, self.tile)}

    def geometry_for(self, crops: CropRange, width: int, height: int) -> VisionGeometry:
        return _best_canvas(_canvases(crops, self.tile), self.tile, width, height, self.features_per_crop, True)

    def own_geometry(self, width: int, height: int) -> VisionGeometry | None:
        if not self.own_canvases or any(side % self.tile for canvas in self.own_canvases for side in canvas):
            return None
        return _best_canvas(self.own_canvases, self.tile, width, height, self.features_per_crop, True)


@dataclass(frozen=True)
class SplitTiles(VisionOptions):
    """The rule of Aria: crops of 490 pixels and no crop of the whole picture."""

    overview = "never"
    features_per_crop: int

    def options_for(self, crops: CropRange, width: int, height: int) -> Mapping[str, Any]:
        return {
            "split_image": True,
            "max_image_size": ARIA_SMALL_CROP,
            "split_resolutions": _canvases(crops, ARIA_SMALL_CROP),
        }

    def geometry_for(self, crops: CropRange, width: int, height: int) -> VisionGeometry:
        canvases = _canvases(crops, ARIA_SMALL_CROP)
        return _best_canvas(canvases, ARIA_SMALL_CROP, width, height, self.features_per_crop, False)


@dataclass(frozen=True)
class AspectTiles(VisionOptions):
    """The rule of InternVL: the grid whose aspect ratio is nearest; one tile alone gets no crop of the whole picture
    beside it.
    """

    overview = "beside several"
    tile: tuple[int, int]  #: (height, width) of a tile in pixels
    features_per_crop: int
    own_crops: CropRange | None = None  #: what the checkpoint chooses from; None where it does not cut pictures

    def options_for(self, crops: CropRange, width: int, height: int) -> Mapping[str, Any]:
        return {"crop_to_patches": True, "min_patches": crops.min_crops, "max_patches": crops.max_crops}

    def geometry_for(self, crops: CropRange, width: int, height: int) -> VisionGeometry:
        """See `VisionOptions.geometry_for`.

        Of grids equally near, a later one with more tiles is taken while it has less than twice the picture's pixels.
        """
        tile_height, tile_width = self.tile
        best, least_difference = (1, 1), math.inf
        for rows, cols in sorted(tilings_within(crops), key=lambda grid: (grid[0] * grid[1], grid[1])):
            difference = abs(width / height - cols / rows)
            fills = width * height > 0.5 * tile_height * tile_width * rows * cols
            if difference < least_difference or (difference == least_difference and fills):
                best, least_difference = (rows, cols), difference
        rows, cols = best
        has_overview = rows * cols > 1
        features = tokens_of_crops(rows * cols, self.features_per_crop, has_overview=has_overview)
        return VisionGeometry(rows * cols, best, (rows * tile_height, cols * tile_width), features, has_overview)

    def own_geometry(self, width: int, height: int) -> VisionGeometry | None:
        return None if self.own_crops is None else self.geometry_for(self.own_crops, width, height)


@dataclass(frozen=True)
class LongestEdgeTiles(VisionOptions):
    """The rule of SmolVLM and Idefics3: the longer side is scaled to so many tiles, the other follows; one tile is not
    cut.
    """

    overview = "beside several"
    tile: int
    features_per_crop: int
    own_edge: int | None = None  #: longer side in pixels that the checkpoint scales to; None where it does not cut

    def options_for(self, crops: CropRange, width: int, height: int) -> Mapping[str, Any]:
        return {
            "do_image_splitting": True,
            "size": {"longest_edge": max(self._grid(crops, width, height)) * self.tile},
        }

    def geometry_for(self, crops: CropRange, width: int, height: int) -> VisionGeometry:
        return self._geometry(*self._grid(crops, width, height))

    def own_geometry(self, width: int, height: int) -> VisionGeometry | None:
        return None if self.own_edge is None else self._geometry(*self._grid_at(self.own_edge, width, height))

    def _geometry(self, rows: int, cols: int) -> VisionGeometry:
        canvas = (rows * self.tile, cols * self.tile)
        if (rows, cols) == (1, 1):
            return VisionGeometry(0, None, canvas, self.features_per_crop)
        features = tokens_of_crops(rows * cols, self.features_per_crop)
        return VisionGeometry(rows * cols, (rows, cols), canvas, features)

    def _grid(self, crops: CropRange, width: int, height: int) -> tuple[int, int]:
        """The largest grid of at most `max_crops` tiles."""
        most = min(crops.max_crops, max(_IDEFICS_LONGEST_EDGE // self.tile, 1))
        grids = (self._grid_at(along * self.tile, width, height) for along in range(most, 0, -1))
        return next(grid for grid in grids if grid[0] * grid[1] <= crops.max_crops)

    def _grid_at(self, edge: int, width: int, height: int) -> tuple[int, int]:
        """The grid of a picture whose longer side is first scaled to `edge`, then up to whole tiles."""
        edge = min(edge, _IDEFICS_LONGEST_EDGE)
        along = math.ceil(edge / self.tile)
        longer = along * self.tile
        # In floating point as the processor does it: one pixel decides over a row of tiles.
        shorter = int(longer / (width / height)) if width >= height else int(longer * (width / height))
        across = max(math.ceil((shorter + shorter % 2) / self.tile), 1)
        return (across, along) if width >= height else (along, across)


def tilings_within(crops: CropRange) -> list[Tiling]:
    """The tilings (rows, columns) whose product is in the range, by product and then rows."""
    most = crops.max_crops
    found = [(r, c) for r in range(1, most + 1) for c in range(-(-crops.min_crops // r), most // r + 1)]
    return sorted(found, key=lambda rc: (rc[0] * rc[1], rc[0]))


def _canvases(crops: CropRange, tile: int) -> list[list[int]]:
    """The size [height, width] in pixels of every tiling.

    Few tiles first, then the squarest: the rule for canvases takes the first of several that serve a picture alike.
    """
    tilings = sorted(tilings_within(crops), key=lambda rc: (rc[0] * rc[1], abs(rc[0] - rc[1]), rc[0]))
    return [[rows * tile, cols * tile] for rows, cols in tilings]


def _best_canvas(
    canvases: Sequence[Sequence[int]], tile: int, width: int, height: int, features_per_crop: int, has_overview: bool
) -> VisionGeometry:
    """The canvas that keeps most of the picture's pixels, of several the one with the least padding."""
    canvas = select_best_resolution((height, width), [list(canvas) for canvas in canvases])
    tiling = (canvas[0] // tile, canvas[1] // tile)
    num_crops = math.prod(tiling)
    features = tokens_of_crops(num_crops, features_per_crop, has_overview=has_overview)
    return VisionGeometry(num_crops, tiling, (canvas[0], canvas[1]), features, has_overview)
