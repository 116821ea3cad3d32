"""In: –; out: VGG16 (Simonyan and Zisserman, 2015), configuration D, without batch normalisation."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

# Output channels of the convolutions between two poolings.
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class Vgg16(nn.Module):
    """[N, 3, H, W] -> [N, 1000], sides of 32 and more."""

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
