"""Tags of the items of scenes: what each image feature should encode of the item under it, and the loss for it.

A question rewards the model for one item of a scene. The tags reward the vision tower for all of them at once:
every feature inside an item's box must encode the item's colour, shape and label, whether it lies on the shape or on
the text. So the features already *bind* the label to its shape, and the decoder only has to look the right one up.
The head that answers is thrown away after training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn

from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.hf.tilings import Tiling
from experiment_core_utils.tasks.datasets.reference_scenes import COLOURS, DIGITS, KINDS, LETTERS, Scene, ScenePlan

CHARACTERS = LETTERS + DIGITS
LABEL_LENGTH = 4
# Cap height in pixels of the crop under which characters are not requested.
SMALLEST_TEXT_PX = 5.0
NO_CHARACTER = len(CHARACTERS)
BACKGROUND, ON_ITEM, ON_CENTRE = range(3)
_COLOUR_NAMES = tuple(COLOURS)
_PARTS = (3, len(_COLOUR_NAMES), len(KINDS), LABEL_LENGTH * (NO_CHARACTER + 1))


class CropCutter(Protocol):
    """What cuts a picture into overlapping crops, as far as tags and batches need to know it."""

    crop_size: int
    window_size: int
    features_per_side: int

    def tiling_for(self, height: int, width: int, crops: CropRange | None = None) -> Tiling:
        """Rows and columns of crops for a picture."""

    def canvas_size(self, tiling: Tiling) -> tuple[int, int]:
        """Height and width of the picture that a tiling covers."""


@dataclass(frozen=True)
class ItemTags:
    """The items of B scenes, padded to N with items whose box is empty."""

    boxes: torch.Tensor  #: [B, N, 4] x0, y0, x1, y1 in pixels of the picture
    centres: torch.Tensor  #: [B, N, 2] x, y of the shapes
    text_px: torch.Tensor  #: [B, N] cap heights
    #: [B, N, 2 + 4] indices of colour, kind and the label's characters (`NO_CHARACTER` past its end)
    names: torch.Tensor

    def to(self, device: torch.device) -> "ItemTags":
        """The tags on another device, without waiting for the copy."""
        return ItemTags(*(value.to(device, non_blocking=True) for value in vars(self).values()))

    def pin_memory(self) -> "ItemTags":
        """The tags in page-locked memory."""
        return ItemTags(*(value.pin_memory() for value in vars(self).values()))


def item_tags(scenes: Sequence[Scene | ScenePlan]) -> ItemTags:
    """The tags of scenes of one size."""
    most = max(len(scene.items) for scene in scenes)
    boxes = torch.zeros(len(scenes), most, 4)
    centres = torch.zeros(len(scenes), most, 2)
    text_px = torch.zeros(len(scenes), most)
    names = torch.zeros(len(scenes), most, 2 + LABEL_LENGTH, dtype=torch.int64)
    for row, scene in enumerate(scenes):
        for at, item in enumerate(scene.items):
            boxes[row, at] = torch.tensor(item.box, dtype=torch.float32)
            centres[row, at] = torch.tensor(item.centre)
            text_px[row, at] = item.text_height_px
            label = [CHARACTERS.index(character) for character in item.label]
            label += [NO_CHARACTER] * (LABEL_LENGTH - len(label))
            names[row, at] = torch.tensor([_COLOUR_NAMES.index(item.colour), KINDS.index(item.kind), *label])
    return ItemTags(boxes, centres, text_px, names)


def feature_centres(processor: CropCutter, size: tuple[int, int], tiling: Tiling) -> tuple[torch.Tensor, torch.Tensor]:
    """The centres of what the features of each crop see, for a picture of `size` (height, width).

    Returns:
        [K, F, 2] x, y of the middle of each feature's window in pixels of the picture (outside it for padding), and
        [K] pixels of the crop for one of the picture.
    """
    side = processor.features_per_side
    pitch = processor.crop_size / side
    steps = (torch.arange(side) + 0.5) * pitch
    grid = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), dim=-1).flatten(0, 1)
    whole, whole_scale = _to_picture(grid[None], size, (processor.crop_size, processor.crop_size))
    rows, cols = tiling
    corners = torch.tensor([[col, row] for row in range(rows) for col in range(cols)]) * processor.window_size
    tiles, tile_scale = _to_picture(grid[None] + corners[:, None], size, processor.canvas_size(tiling))
    return torch.cat([whole, tiles]), torch.tensor([whole_scale] + [tile_scale] * rows * cols)


def _to_picture(points: torch.Tensor, size: tuple[int, int], target: tuple[int, int]) -> tuple[torch.Tensor, float]:
    """Points in the picture, resized and centred on a canvas of `target` (height, width), from points on the canvas."""
    scale = min(np.float32(target[0]) / np.float32(size[0]), np.float32(target[1]) / np.float32(size[1]))
    height, width = (max(int(np.float32(side) * scale), 1) for side in size)
    offset = torch.tensor([(target[1] - width) // 2, (target[0] - height) // 2])
    return (points - offset) / torch.tensor([width / size[1], height / size[0]]), float(scale)


class TagHead(nn.Module):
    """Predicts from projected image features what is under them.

    Args:
        width: of the features.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, sum(_PARTS))

    def loss(
        self, features: torch.Tensor, tags: ItemTags, points: torch.Tensor, scales: torch.Tensor, pitch: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss over presence, colour, kind and characters, and the fraction of characters that are right.

        Args:
            features: [B, K, F, H].
            points, scales: from `feature_centres`, on the features' device.
            pitch: side of a feature's window in pixels of the crop.
        """
        batch, crops, per_crop, _ = features.shape
        points = points.view(1, crops * per_crop, 1, 2)
        scales = scales.repeat_interleave(per_crop)
        boxes = tags.boxes[:, None]
        inside = ((points >= boxes[..., :2]) & (points < boxes[..., 2:])).all(dim=-1)
        owned, owner = inside.any(dim=-1), inside.float().argmax(dim=-1)
        near = ((points - tags.centres[:, None]).abs() * scales[:, None, None] <= pitch / 2).all(dim=-1)
        central = (near & (tags.text_px > 0)[:, None]).any(dim=-1)
        presence = torch.where(central, ON_CENTRE, torch.where(owned, ON_ITEM, BACKGROUND))
        names = tags.names.gather(1, owner[..., None].expand(-1, -1, tags.names.shape[2]))
        legible = owned & (tags.text_px.gather(1, owner) * scales >= SMALLEST_TEXT_PX)
        parts = self.out(self.norm(features)).float().view(batch, crops * per_crop, -1).split(_PARTS, dim=-1)
        characters = parts[3].unflatten(-1, (LABEL_LENGTH, NO_CHARACTER + 1))
        everywhere = torch.ones_like(owned)
        loss = (
            _mean_loss(parts[0], presence, everywhere)
            + _mean_loss(parts[1], names[..., 0], owned)
            + _mean_loss(parts[2], names[..., 1], owned)
            + _mean_loss(characters, names[..., 2:], legible[..., None].expand(-1, -1, LABEL_LENGTH))
        )
        right = (characters.detach().argmax(dim=-1) == names[..., 2:]).all(dim=-1) & legible
        return loss, right.sum() / legible.sum().clamp(min=1)


def _mean_loss(logits: torch.Tensor, targets: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    losses = nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    kept = kept.flatten().float()
    return (losses * kept).sum() / kept.sum().clamp(min=1)
