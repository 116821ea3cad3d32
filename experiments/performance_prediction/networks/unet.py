"""A U-Net (Ronneberger et al., 2015) with padding, half of the paper's channels, and enlargement by repetition."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

_CHANNELS = (32, 64, 128, 256, 512)


def _twice(channels: int, out: int) -> nn.Sequential:
    first, second = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())


class UNet(nn.Module):
    """A U-Net of five levels: [N, 3, H, W] -> [N, 2, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(map(_twice, (3, *_CHANNELS), _CHANNELS))
        rising = [(deep + skipped, skipped) for skipped, deep in pairwise(_CHANNELS)]
        self.up = nn.ModuleList(_twice(*each) for each in reversed(rising))
        self.classes = nn.Conv2d(_CHANNELS[0], 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        planes, skipped = images, list[Tensor]()
        for level, convolve in enumerate(self.down):
            planes = convolve(planes if level == 0 else functional.max_pool2d(planes, 2))
            skipped.append(planes)
        skipped.pop()
        for convolve in self.up:
            beside = skipped.pop()
            planes = convolve(torch.cat([functional.interpolate(planes, size=beside.shape[2:]), beside], dim=1))
        found: Tensor = self.classes(planes)
        return found
