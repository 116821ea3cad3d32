"""GoogLeNet (Szegedy et al., 2015) with batch normalisation, without the auxiliary classifiers.

As in torchvision's, whose names the submodules have, the third branch of an inception is 3x3 where the paper has 5x5.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


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


class GoogLeNet(nn.Module):
    """GoogLeNet: [N, 3, H, W] -> [N, 1000], sides of 15 and more."""

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
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(1024, 1000)

    def forward(self, images: Tensor) -> Tensor:
        planes = self.maxpool2(self.conv3(self.conv2(self.maxpool1(self.conv1(images)))))
        planes = self.maxpool3(self.inception3b(self.inception3a(planes)))
        planes = self.inception4c(self.inception4b(self.inception4a(planes)))
        planes = self.maxpool4(self.inception4e(self.inception4d(planes)))
        planes = self.inception5b(self.inception5a(planes))
        logits: Tensor = self.fc(self.dropout(self.avgpool(planes).flatten(1)))
        return logits
