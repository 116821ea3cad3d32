"""MobileNetV2 (Sandler et al., 2018), and a U-Net (Ronneberger et al., 2015) of half of the paper's channels.

The names of MobileNetV2's submodules are those of torchvision's, so that its weights can be loaded.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

# Expansion, channels, blocks and stride of the first of them, by stage (table 2 of the paper).
_STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
# Of the U-Net, by level.
_CHANNELS = (32, 64, 128, 256, 512)


def _activated(channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out), nn.ReLU6())


class InvertedResidual(nn.Module):
    """1x1 to more channels, 3x3 for each channel, 1x1 to fewer: [N, in, H, W] -> [N, out, H/stride, W/stride]."""

    def __init__(self, channels: int, out: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels * expansion
        self.adds = stride == 1 and channels == out
        self.conv = nn.Sequential(
            *([_activated(channels, wide, 1)] if expansion > 1 else []),
            _activated(wide, wide, 3, stride, groups=wide),
            nn.Conv2d(wide, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )

    def forward(self, given: Tensor) -> Tensor:
        narrow: Tensor = self.conv(given)
        return given + narrow if self.adds else narrow


class MobileNetV2(nn.Module):
    """Inverted residuals around depthwise convolutions: [N, 3, H, W] -> [N, 1000]."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_activated(3, 32, 3, 2)]
        channels = 32
        for expansion, out, count, stride in _STAGES:
            for place in range(count):
                layers.append(InvertedResidual(channels, out, stride if place == 0 else 1, expansion))
                channels = out
        self.features = nn.Sequential(*layers, _activated(channels, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images).mean((2, 3)))
        return logits


def _twice(channels: int, out: int) -> nn.Sequential:
    first, second = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())


class UNet(nn.Module):
    """Five levels, with padding, and enlargement by repetition: [N, 3, H, W] -> [N, 2, H, W]."""

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
