"""AlexNet in the single-tower form of Krizhevsky, "One weird trick" (2014), and VGG-16."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn


class AlexNet(nn.Module):
    """AlexNet: [N, 3, H, W] -> [N, 1000], sides of 63 and more."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(64, 192, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(192, 384, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
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
