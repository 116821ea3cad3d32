"""Bottleneck ResNets (He et al., 2016) with the stride in the 3x3 convolution.

The names of the submodules are those of torchvision's, so that its weights can be loaded.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

EXPANSION = 4


class Bottleneck(nn.Module):
    """A bottleneck of 1x1, 3x3, 1x1 convolutions and a shortcut: [N, in, H, W] -> [N, 4·width, H/stride, W/stride]."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = width * EXPANSION
        self.conv1 = nn.Conv2d(channels, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, wide, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(wide)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != wide:
            shortcut = nn.Conv2d(channels, wide, kernel_size=1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(wide))

    def forward(self, given: Tensor) -> Tensor:
        narrow = functional.relu(self.bn1(self.conv1(given)))
        narrow = functional.relu(self.bn2(self.conv2(narrow)))
        shortcut = given if self.downsample is None else self.downsample(given)
        return functional.relu(self.bn3(self.conv3(narrow)) + shortcut)


class ResNet(nn.Module):
    """A bottleneck ResNet: [N, 3, H, W] -> [N, 1000].

    Args:
        blocks: of the four stages.
    """

    def __init__(self, blocks: Sequence[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = _stage(64, 64, blocks[0], 1)
        self.layer2 = _stage(256, 128, blocks[1], 2)
        self.layer3 = _stage(512, 256, blocks[2], 2)
        self.layer4 = _stage(1024, 512, blocks[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * EXPANSION, 1000)

    def forward(self, images: Tensor) -> Tensor:
        planes = self.maxpool(functional.relu(self.bn1(self.conv1(images))))
        planes = self.layer4(self.layer3(self.layer2(self.layer1(planes))))
        logits: Tensor = self.fc(self.avgpool(planes).flatten(1))
        return logits


def _stage(channels: int, width: int, count: int, stride: int) -> nn.Sequential:
    first = Bottleneck(channels, width, stride)
    return nn.Sequential(first, *(Bottleneck(width * EXPANSION, width, 1) for _ in range(count - 1)))
