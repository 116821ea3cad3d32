"""AlexNet in the single-tower form of Krizhevsky, "One weird trick" (2014), and VGG-16."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

# Of AlexNet: output channels, side of the kernel, stride, padding, and whether a pooling follows.
CONVOLUTIONS = ((64, 11, 4, 2, True), (192, 5, 1, 2, True), (384, 3, 1, 1, False), (256, 3, 1, 1, False),
                (256, 3, 1, 1, True))  # fmt: skip


class AlexNet(nn.Module):
    """AlexNet: [N, 3, H, W] -> [N, 1000], sides of 63 and more."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for wider, kernel, stride, padding, is_pooled in CONVOLUTIONS:
            layers += [nn.Conv2d(channels, wider, kernel, stride, padding), nn.ReLU(inplace=True)]
            layers += [nn.MaxPool2d(kernel_size=3, stride=2)] * is_pooled
            channels = wider
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, 1000),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return logits


# Output channels of the convolutions between two poolings.
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class Vgg16(nn.Module):
    """VGG-16: [N, 3, H, W] -> [N, 1000], sides of 32 and more."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*_layers(STAGES))
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 1000),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return logits


def _layers(stages: Sequence[Sequence[int]]) -> Iterator[nn.Module]:
    channels = 3
    for stage in stages:
        for wider in stage:
            yield nn.Conv2d(channels, wider, kernel_size=3, padding=1)
            yield nn.ReLU(inplace=True)
            channels = wider
        yield nn.MaxPool2d(kernel_size=2, stride=2)
