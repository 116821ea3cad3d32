"""DenseNet-121 (Huang et al., 2017): each layer sees the outputs of all before it in its block.

The names of the submodules are those of torchvision's, so that its weights can be loaded.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

GROWTH, BOTTLENECK, FIRST = 32, 128, 64
BLOCKS = (6, 12, 24, 16)


class DenseLayer(nn.Module):
    """A dense layer: [N, C, H, W] -> [N, 32, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, BOTTLENECK, kernel_size=1, bias=False)
        self.norm2 = nn.BatchNorm2d(BOTTLENECK)
        self.conv2 = nn.Conv2d(BOTTLENECK, GROWTH, kernel_size=3, padding=1, bias=False)

    def forward(self, given: Tensor) -> Tensor:
        narrow = self.conv1(functional.relu(self.norm1(given)))
        new: Tensor = self.conv2(functional.relu(self.norm2(narrow)))
        return new


class DenseBlock(nn.ModuleDict):
    """A dense block: [N, C, H, W] -> [N, C + 32·layers, H, W]."""

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__({f"denselayer{i + 1}": DenseLayer(channels + GROWTH * i) for i in range(layers)})

    def forward(self, given: Tensor) -> Tensor:
        outputs = [given]
        for layer in self.values():
            outputs.append(layer(torch.cat(outputs, dim=1)))
        return torch.cat(outputs, dim=1)


class DenseNet121(nn.Module):
    """DenseNet-121: [N, 3, H, W] -> [N, 1000], sides of 29 and more."""

    def __init__(self) -> None:
        super().__init__()
        parts: OrderedDict[str, nn.Module] = OrderedDict(
            conv0=nn.Conv2d(3, FIRST, kernel_size=7, stride=2, padding=3, bias=False),
            norm0=nn.BatchNorm2d(FIRST),
            relu0=nn.ReLU(inplace=True),
            pool0=nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        channels = FIRST
        for number, layers in enumerate(BLOCKS, 1):
            parts[f"denseblock{number}"] = DenseBlock(channels, layers)
            channels += GROWTH * layers
            if number < len(BLOCKS):
                parts[f"transition{number}"] = _transition(channels)
                channels //= 2
        parts["norm5"] = nn.BatchNorm2d(channels)
        self.features = nn.Sequential(parts)
        self.classifier = nn.Linear(channels, 1000)

    def forward(self, images: Tensor) -> Tensor:
        planes = functional.relu(self.features(images))
        logits: Tensor = self.classifier(functional.adaptive_avg_pool2d(planes, (1, 1)).flatten(1))
        return logits


def _transition(channels: int) -> nn.Sequential:
    """A transition to half the channels and half the sides."""
    return nn.Sequential(
        OrderedDict(
            norm=nn.BatchNorm2d(channels),
            relu=nn.ReLU(inplace=True),
            conv=nn.Conv2d(channels, channels // 2, kernel_size=1, bias=False),
            pool=nn.AvgPool2d(kernel_size=2, stride=2),
        )
    )
