"""Questions about several pictures: where each stands in the prompt, and what they are together."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.hf.tilings import VisionOptions
from experiment_core_utils.records.requests import VisionGeometry

_MARK = re.compile(r"<image ([1-9]\d?)>")


def placed(prompt: str, num_pictures: int) -> list[str | int]:
    """A prompt as its texts and, between them, the numbers of its pictures from 0.

    Of several pictures each stands where the prompt names it first as ``<image 1>``; those that it does not name stand
    in front. One picture stands in front, and whatever the prompt says of it stays.
    """
    if num_pictures < 2:
        return [*range(num_pictures), prompt]
    parts: list[str | int] = []
    named: list[int] = []
    begin = 0
    for mark in _MARK.finditer(prompt):
        number = int(mark[1]) - 1
        if number < num_pictures and number not in named:
            parts += [prompt[begin : mark.start()], number]
            named.append(number)
            begin = mark.end()
    parts.append(prompt[begin:])
    return [*(each for each in range(num_pictures) if each not in named), *(each for each in parts if each != "")]


def options_of_all(
    rule: VisionOptions | None, crops: CropRange | None, sizes: Sequence[tuple[int, int]]
) -> Mapping[str, Any]:
    """The options of a processor's one call for pictures of these sizes (width, height); none for the model's own size.

    Where they depend on a picture's shape, those by which no picture gets more than the target; another may then get
    less, which the counts of the request show.
    """
    if rule is None or crops is None:
        return {}
    return min((rule.options_for(crops, *size) for size in sizes), key=lambda each: sum(each.get("size", {}).values()))


def joined(pictures: Sequence[VisionGeometry]) -> VisionGeometry:
    """The geometry of several pictures together; that of one is its own."""
    if len(pictures) == 1:
        return pictures[0]
    patches = [each.patches for each in pictures if each.patches is not None]
    return VisionGeometry(
        num_crops=sum(each.num_crops for each in pictures),
        tiling=None,
        image_size=None,
        pooled_features=sum(each.pooled_features for each in pictures),
        has_overview=any(each.has_overview for each in pictures),
        patches=sum(patches) if len(patches) == len(pictures) else None,
        pictures=tuple(pictures),
    )
