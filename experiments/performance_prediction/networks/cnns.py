"""The convolutional networks that are profiled; submodules have torchvision's names, so that its weights fit."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

# Of AlexNet: output channels, side of the kernel, stride, padding, and whether a pooling follows.
ALEXNET_CONVOLUTIONS = (
    (64, 11, 4, 2, True), (192, 5, 1, 2, True), (384, 3, 1, 1, False), (256, 3, 1, 1, False), (256, 3, 1, 1, True),
)  # fmt: skip


class AlexNet(nn.Sequential):
    """AlexNet in the single tower of Krizhevsky, "One weird trick" (2014): [N, 3, H, W] -> [N, 1000], sides of 63 and
    more.
    """

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for wider, kernel, stride, padding, is_pooled in ALEXNET_CONVOLUTIONS:
            layers += [nn.Conv2d(channels, wider, kernel, stride, padding), nn.ReLU(inplace=True)]
            layers += [nn.MaxPool2d(kernel_size=3, stride=2)] * is_pooled
            channels = wider
        super().__init__()
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, 1000),
        )


# Output channels of the convolutions between two poolings.
VGG_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class Vgg16(nn.Sequential):
    """VGG-16: [N, 3, H, W] -> [N, 1000], sides of 32 and more."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*_layers(VGG_STAGES))
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 1000),
        )


def _layers(stages: Sequence[Sequence[int]]) -> Iterator[nn.Module]:
    channels = 3
    for stage in stages:
        for wider in stage:
            yield nn.Conv2d(channels, wider, kernel_size=3, padding=1)
            yield nn.ReLU(inplace=True)
            channels = wider
        yield nn.MaxPool2d(kernel_size=2, stride=2)


# Of the bottlenecks of ResNets: by how much the channels that leave one are more than those inside.
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


class ResNet(nn.Sequential):
    """A bottleneck ResNet (He et al., 2016), with the stride in the 3x3 convolution: [N, 3, H, W] -> [N, 1000].

    Args:
        blocks: of the four stages.
    """

    def __init__(self, blocks: Sequence[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = _stage(64, 64, blocks[0], 1)
        self.layer2 = _stage(256, 128, blocks[1], 2)
        self.layer3 = _stage(512, 256, blocks[2], 2)
        self.layer4 = _stage(1024, 512, blocks[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(512 * EXPANSION, 1000)


def _stage(channels: int, width: int, count: int, stride: int) -> nn.Sequential:
    first = Bottleneck(channels, width, stride)
    return nn.Sequential(first, *(Bottleneck(width * EXPANSION, width, 1) for _ in range(count - 1)))


# Of DenseNet: new channels of a layer, those inside it, those of the first convolution, and layers by block.
GROWTH, BOTTLENECK, FIRST = 32, 128, 64
DENSE_BLOCKS = (6, 12, 24, 16)


class DenseLayer(nn.Module):
    """A layer that sees the outputs of all before it in its block: [N, C, H, W] -> [N, 32, H, W]."""

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
    """DenseNet-121 (Huang et al., 2017): [N, 3, H, W] -> [N, 1000], sides of 29 and more."""

    def __init__(self) -> None:
        super().__init__()
        parts: OrderedDict[str, nn.Module] = OrderedDict(
            conv0=nn.Conv2d(3, FIRST, kernel_size=7, stride=2, padding=3, bias=False),
            norm0=nn.BatchNorm2d(FIRST),
            relu0=nn.ReLU(inplace=True),
            pool0=nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        channels = FIRST
        for number, layers in enumerate(DENSE_BLOCKS, 1):
            parts[f"denseblock{number}"] = DenseBlock(channels, layers)
            channels += GROWTH * layers
            if number < len(DENSE_BLOCKS):
                # To half the channels and half the sides.
                parts[f"transition{number}"] = nn.Sequential(
                    OrderedDict(
                        norm=nn.BatchNorm2d(channels),
                        relu=nn.ReLU(inplace=True),
                        conv=nn.Conv2d(channels, channels // 2, kernel_size=1, bias=False),
                        pool=nn.AvgPool2d(kernel_size=2, stride=2),
                    )
                )
                channels //= 2
        parts["norm5"] = nn.BatchNorm2d(channels)
        self.features = nn.Sequential(parts)
        self.classifier = nn.Linear(channels, 1000)

    def forward(self, images: Tensor) -> Tensor:
        planes = functional.relu(self.features(images))
        logits: Tensor = self.classifier(functional.adaptive_avg_pool2d(planes, (1, 1)).flatten(1))
        return logits


class BasicConv2d(nn.Module):
    """A convolution with batch normalisation and ReLU."""

    def __init__(self, channels: int, wider: int, kernel_size: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, wider, kernel_size, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(wider, eps=0.001)

    def forward(self, given: Tensor) -> Tensor:
        return functional.relu(self.bn(self.conv(given)))


class Inception(nn.Module):
    """Four branches over the same input, side by side: [N, C, H, W] -> [N, one + three + five + pooled, H, W].

    As in torchvision's, the third branch is 3x3 where the paper has 5x5.

    Args:
        channels: of the input.
        one: output channels of the 1x1 branch.
        three: channels before and after the 3x3 convolution of the second branch.
        five: the same of the third.
        pooled: output channels of the branch that pools first.
    """

    def __init__(self, channels: int, one: int, three: tuple[int, int], five: tuple[int, int], pooled: int) -> None:
        super().__init__()
        self.branch1 = BasicConv2d(channels, one, 1)
        self.branch2 = nn.Sequential(BasicConv2d(channels, three[0], 1), BasicConv2d(*three, 3, padding=1))
        self.branch3 = nn.Sequential(BasicConv2d(channels, five[0], 1), BasicConv2d(*five, 3, padding=1))
        pool = nn.MaxPool2d(kernel_size=3, stride=1, padding=1, ceil_mode=True)
        self.branch4 = nn.Sequential(pool, BasicConv2d(channels, pooled, 1))

    def forward(self, given: Tensor) -> Tensor:
        return torch.cat([self.branch1(given), self.branch2(given), self.branch3(given), self.branch4(given)], dim=1)


class GoogLeNet(nn.Sequential):
    """GoogLeNet (Szegedy et al., 2015) without auxiliary classifiers, for sides of 15 and more."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = BasicConv2d(3, 64, 7, stride=2, padding=3)
        self.maxpool1 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.conv2 = BasicConv2d(64, 64, 1)
        self.conv3 = BasicConv2d(64, 192, 3, padding=1)
        self.maxpool2 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.inception3a = Inception(192, 64, (96, 128), (16, 32), 32)
        self.inception3b = Inception(256, 128, (128, 192), (32, 96), 64)
        self.maxpool3 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.inception4a = Inception(480, 192, (96, 208), (16, 48), 64)
        self.inception4b = Inception(512, 160, (112, 224), (24, 64), 64)
        self.inception4c = Inception(512, 128, (128, 256), (24, 64), 64)
        self.inception4d = Inception(512, 112, (144, 288), (32, 64), 64)
        self.inception4e = Inception(528, 256, (160, 320), (32, 128), 128)
        self.maxpool4 = nn.MaxPool2d(2, stride=2, ceil_mode=True)
        self.inception5a = Inception(832, 256, (160, 320), (32, 128), 128)
        self.inception5b = Inception(832, 384, (192, 384), (48, 128), 128)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.flatten = nn.Flatten()
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(1024, 1000)


# Of MobileNetV2: expansion, channels, blocks and stride of the first of them, by stage (table 2 of the paper).
_MOBILE_STAGES = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip
# Of the U-Net: channels by level.
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
    """MobileNetV2 (Sandler et al., 2018), inverted residuals around depthwise layers: [N, 3, H, W] -> [N, 1000]."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_activated(3, 32, 3, 2)]
        channels = 32
        for expansion, out, count, stride in _MOBILE_STAGES:
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
    """A U-Net (Ronneberger et al., 2015) of half of the paper's channels: [N, 3, H, W] -> [N, 2, H, W].

    It has five levels, padding, and enlargement by repetition.
    """

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
