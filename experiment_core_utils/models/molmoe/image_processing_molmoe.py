"""MolmoE's image processor: how a picture becomes crops, and the place of each crop's 144 features among the tokens.

It follows the official preprocessing of Molmo ("overlap-and-resize-c2"): the picture is resized without distortion onto
a canvas of r x c overlapping windows, padded, cut into crops, and preceded by one crop of the whole picture.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers.image_processing_base import ImageProcessingMixin

from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.hf.tilings import Tiling, tilings_within

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
PATCH_DROPPED = -100


@dataclass(frozen=True)
class ProcessedImage:
    """A picture ready for the vision tower; R = rows, C = columns of tiles, K = R * C + 1 crops."""

    pixel_values: torch.Tensor  #: [K, 3, S, S] float32, normalised; crop 0 is the whole picture
    #: [K, P] fraction of real (not padded) pixels of each patch, P = patches of a crop. The rows are the tiles' masks
    #: followed by a row of -1: the official code shifts them by one against the crops, and trained weights expect that.
    image_masks: torch.Tensor
    #: [K, F] int64, place of each pooled feature in the row-by-row image token layout *without* markers (see
    #: `MolmoeProcessor`), -100 for a feature that is dropped. F = features of a crop.
    feature_rows: torch.Tensor
    tiling: Tiling  #: (R, C)
    canvas_size: tuple[int, int]  #: (height, width) in pixels of the canvas that the tiles are cut from


def select_tiling(height: int, width: int, window: int, max_crops: int) -> Tiling:
    """The tiling by the official rule: the least upscaling, or the least downscaling where all shrink.

    `height` and `width` are the picture's sides less the canvas margin, and may be negative for tiny pictures: the
    rule is applied to the numbers as they are. Ratios are float32, as in the official code.
    """
    candidates = tilings_within(CropRange(1, max_crops))
    sizes = np.array(candidates, dtype=np.int32) * window
    with np.errstate(divide="ignore"):  # a side of 0 makes the scale infinite, which the rule copes with
        scales = (sizes.astype(np.float32) / np.array([height, width], dtype=np.float32)).min(axis=-1)
    if np.all(scales < 1):
        return candidates[int(scales.argmax())]
    return candidates[int(np.where(scales < 1.0, np.float32(10e9), scales).argmin())]


def select_least_distorting_tiling(height: int, width: int, window: int, margin: int, crops: CropRange) -> Tiling:
    """The tiling inside the range whose canvas has the picture's aspect ratio most nearly.

    The picture keeps its proportions on the canvas, so a differing aspect ratio costs padding: crops spent on nothing.
    Distance is |log(canvas ratio / picture ratio)|; equal distances take the tiling with more crops.
    """
    target = math.log(height / width)

    def distance(tiling: Tiling) -> tuple[float, int]:
        canvas = math.log((tiling[0] * window + margin) / (tiling[1] * window + margin))
        return (round(abs(canvas - target), 9), -tiling[0] * tiling[1])

    return min(tilings_within(crops), key=distance)


class MolmoeImageProcessor(ImageProcessingMixin):
    """Cuts a picture into MolmoE's overlapping crops.

    Args:
        crop_size: side of a crop in pixels.
        patch_size: side of a patch in pixels.
        pooling_size: side in patches of the window that becomes one feature.
        overlap_margins: patches at the (left/top, right/bottom) of a crop that it shares with its neighbours.
        max_crops: most crops under the official rule, used when no range is requested.
        image_mean, image_std: per channel, on values in [0, 1].
    """

    model_input_names: ClassVar[list[str]] = ["pixel_values", "image_masks", "image_input_idx"]

    def __init__(
        self,
        crop_size: int = 336,
        patch_size: int = 14,
        pooling_size: int = 2,
        overlap_margins: tuple[int, int] = (4, 4),
        max_crops: int = 12,
        image_mean: tuple[float, ...] = CLIP_MEAN,
        image_std: tuple[float, ...] = CLIP_STD,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.crop_size = crop_size
        self.patch_size = patch_size
        self.pooling_size = pooling_size
        self.overlap_margins = tuple(overlap_margins)
        self.max_crops = max_crops
        self.image_mean = tuple(image_mean)
        self.image_std = tuple(image_std)

    @property
    def window_size(self) -> int:
        """Pixels between the starts of neighbouring tiles (224)."""
        return self.crop_size - self.margin_size

    @property
    def margin_size(self) -> int:
        """Pixels of the canvas outside its windows (112)."""
        return sum(self.overlap_margins) * self.patch_size

    @property
    def features_per_side(self) -> int:
        """Pooled features along one side of a crop (12)."""
        return self.crop_size // self.patch_size // self.pooling_size

    def canvas_size(self, tiling: Tiling) -> tuple[int, int]:
        """The canvas' (height, width) in pixels for (rows, columns) of tiles."""
        return tiling[0] * self.window_size + self.margin_size, tiling[1] * self.window_size + self.margin_size

    def stitched_features(self, tiling: Tiling) -> tuple[int, int]:
        """(rows, columns) of pooled features that the stitched tiles contribute: (8r + 4, 8c + 4) for MolmoE."""
        rows, cols = (side // self.patch_size // self.pooling_size for side in self.canvas_size(tiling))
        return rows, cols

    def tiling_for(self, height: int, width: int, crops: CropRange | None = None) -> Tiling:
        """The (rows, columns) for a picture: the official rule, or the least distorting one inside `crops`.

        Of a fraction, the one on whose canvas the picture is largest, of all whose features that fraction of the
        official rule's suffices for; of several, the one with fewest features; at least one crop.
        """
        if crops is None:
            return select_tiling(height - self.margin_size, width - self.margin_size, self.window_size, self.max_crops)
        target = self.target_features(height, width, crops)
        if target is None:
            return select_least_distorting_tiling(height, width, self.window_size, self.margin_size, crops)

        def size(tiling: Tiling) -> tuple[float, int]:
            rows, cols = self.canvas_size(tiling)
            return min(rows / height, cols / width), -self.kept_features(tiling)

        # A crop more gives at least a window's features more.
        most = max(target // (self.window_size // self.patch_size // self.pooling_size) ** 2, 1)
        tilings = tilings_within(CropRange(1, most))
        fitting = [tiling for tiling in tilings if self.kept_features(tiling) <= target]
        return max(fitting, key=size, default=(1, 1))

    def target_features(self, height: int, width: int, crops: CropRange | None) -> int | None:
        """The features that a fraction of what the official rule gives a picture asks for; None without a fraction."""
        if crops is None or crops.fraction is None:
            return None
        return max(math.floor(self.kept_features(self.tiling_for(height, width)) * crops.fraction + 0.5), 1)

    def kept_features(self, tiling: Tiling) -> int:
        """Features of a tiling that enter the decoder, those of the whole picture counted: 144 + (8r + 4)(8c + 4)."""
        return self.features_per_side**2 + math.prod(self.stitched_features(tiling))

    def preprocess(self, image: Image.Image | np.ndarray, crops: CropRange | None = None) -> ProcessedImage:
        """Crops of one picture.

        Args:
            image: PIL image (EXIF orientation is applied, any mode) or uint8 array [H, W, 3].
            crops: range of crops to choose from; None applies the official rule up to `max_crops`.
        """
        pixels = _as_float_tensor(image)
        tiling = self.tiling_for(pixels.shape[1], pixels.shape[2], crops)
        pixel_values, masks = self.cut_crops(pixels[None], tiling)
        return ProcessedImage(
            pixel_values=pixel_values[0],
            image_masks=masks,
            feature_rows=self.feature_rows(tiling),
            tiling=tiling,
            canvas_size=self.canvas_size(tiling),
        )

    def cut_crops(self, pixels: torch.Tensor, tiling: Tiling) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised crops [B, K, 3, S, S] and their common masks [K, P], of pixels [B, 3, H, W] in [0, 1] on any
        device.
        """
        canvas, mask = self._resize_and_pad(pixels, self.canvas_size(tiling))
        whole, _ = self._resize_and_pad(pixels, (self.crop_size, self.crop_size))
        tiles = self._windows(canvas)
        tile_masks = torch.nn.functional.avg_pool2d(self._windows(mask[None, None])[0], self.patch_size).flatten(1)
        masks = torch.cat([tile_masks, torch.full_like(tile_masks[:1], -1.0)])
        return torch.cat([whole[:, None], tiles], dim=1), masks

    def feature_rows(self, tiling: Tiling) -> torch.Tensor:
        """The place [K, F] of each pooled feature among the image's patch tokens: the whole picture first, then the
        stitched grid row by row; -100 where a tile's margin is dropped because its neighbour covers it.
        """
        side = self.features_per_side
        rows, cols = tiling
        grid_rows, grid_cols = self.stitched_features(tiling)
        stitched = torch.arange(grid_rows * grid_cols).view(grid_rows, grid_cols) + side * side
        step = self.window_size // self.patch_size // self.pooling_size
        left, right = (margin // self.pooling_size for margin in self.overlap_margins)
        places = torch.full((rows * cols + 1, side, side), PATCH_DROPPED, dtype=torch.int64)
        places[0] = torch.arange(side * side).view(side, side)
        for r, c in itertools.product(range(rows), range(cols)):
            top, bottom = (0 if r == 0 else left), (side if r == rows - 1 else side - right)
            start, end = (0 if c == 0 else left), (side if c == cols - 1 else side - right)
            places[1 + r * cols + c, top:bottom, start:end] = stitched[
                r * step + top : r * step + bottom, c * step + start : c * step + end
            ]
        return places.view(rows * cols + 1, side * side)

    def _resize_and_pad(self, pixels: torch.Tensor, size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised pixels [B, 3, h, w], centred on a canvas padded with 0, and its mask [h, w], of pixels [B, 3, H,
        W] in [0, 1].
        """
        height, width = pixels.shape[2:]
        scale = min(np.float32(size[0]) / np.float32(height), np.float32(size[1]) / np.float32(width))
        new_height, new_width = int(np.float32(height) * scale), int(np.float32(width) * scale)
        resized = torch.nn.functional.interpolate(
            pixels, size=(max(new_height, 1), max(new_width, 1)), mode="bilinear", antialias=True, align_corners=False
        ).clamp_(0.0, 1.0)
        top, left = (size[0] - resized.shape[2]) // 2, (size[1] - resized.shape[3]) // 2
        canvas = pixels.new_zeros(pixels.shape[0], 3, *size)
        mask = pixels.new_zeros(*size)
        canvas[:, :, top : top + resized.shape[2], left : left + resized.shape[3]] = resized
        mask[top : top + resized.shape[2], left : left + resized.shape[3]] = 1.0
        mean = pixels.new_tensor(self.image_mean).view(3, 1, 1)
        std = pixels.new_tensor(self.image_std).view(3, 1, 1)
        return (canvas - mean) / std, mask

    def _windows(self, canvas: torch.Tensor) -> torch.Tensor:
        """Windows [B, R * C, ch, S, S] of a canvas [B, ch, h, w] at the canvas stride, row by row."""
        windows = canvas.unfold(2, self.crop_size, self.window_size).unfold(3, self.crop_size, self.window_size)
        return windows.permute(0, 2, 3, 1, 4, 5).flatten(1, 2)


def _as_float_tensor(image: Image.Image | np.ndarray) -> torch.Tensor:
    """The picture's pixels [3, H, W] as float32 in [0, 1]."""
    if isinstance(image, Image.Image):
        image = np.array(ImageOps.exif_transpose(image).convert("RGB"))
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"a picture must be PIL or uint8 [H, W, 3], not {image.dtype} {list(image.shape)}")
    return torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1).to(torch.float32).div_(255.0)
