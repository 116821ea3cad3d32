"""Convolutions of random sizes, to train a predictor of layers on: no network, each has its own input.

Profiling such layers beside networks is nn-Meter's way to see the sizes that networks to come will have (L. Zhang et
al., "nn-Meter", MobiSys 2021).
"""

import random

from torch import Tensor, nn

_LAYERS = 240
# Kernel, stride, and how often they are drawn; stride 0 is a depthwise convolution of stride 1 or 2.
_KERNELS = {(1, 1): 34, (1, 2): 6, (3, 1): 30, (3, 2): 7, (5, 1): 6, (7, 2): 4, (7, 1): 3, (11, 4): 2, (3, 0): 8}
_DIVISORS = (1, 2, 4, 8, 16, 32)
# Channels: fewest, most beside the whole picture and for each halving of its side, most of all.
_FEWEST, _MOST_OF_PICTURE, _MOST = 8, 96, 2048
# FLOPs of a layer for each pixel of the picture, at most: such as 7.5e9 at 224 pixels.
_MOST_FLOPS_PER_PIXEL = 150_000
# Of a stride-1 layer in the whole picture, the fraction that sees its three colours.
_FIRST_LAYERS = 0.3


class SampledLayers(nn.Module):
    """Layers drawn once, with a fixed seed: [N, 3, S, S] -> the last one's output.

    The input of a layer has the side S / 1, 2, 4, ... or 32, and the picture's numbers, repeated.
    """

    def __init__(self) -> None:
        super().__init__()
        draw = random.Random(0)
        self.convolutions = nn.ModuleList()
        # Of each layer: channels of its input, side of its kernel, and what the picture's side is divided by.
        self.inputs: list[tuple[int, int, int]] = []
        while len(self.convolutions) < _LAYERS:
            divisor = draw.choice(_DIVISORS)
            convolution = _drawn(draw, divisor)
            taps = convolution.weight.numel() / convolution.stride[0] ** 2
            if 2 * taps / divisor**2 <= _MOST_FLOPS_PER_PIXEL:
                self.convolutions.append(convolution)
                self.inputs.append((convolution.in_channels, convolution.kernel_size[0], divisor))

    def forward(self, images: Tensor) -> Tensor:
        numbers = images.flatten(1)
        found = images
        for convolution, (channels, least, divisor) in zip(self.convolutions, self.inputs, strict=True):
            side = max(images.shape[2] // divisor, least)
            need = channels * side**2
            repeated = numbers.repeat(1, -(-need // numbers.shape[1]))[:, :need]
            found = convolution(repeated.reshape(-1, channels, side, side).contiguous())
        return found


def _drawn(draw: random.Random, divisor: int) -> nn.Conv2d:
    (kernel, stride), = draw.choices(list(_KERNELS), weights=list(_KERNELS.values()))  # fmt: skip
    inner, outer = _channels(draw, divisor), _channels(draw, divisor)
    groups = 1
    if stride == 0:
        stride, groups = draw.choice((1, 2)), inner
        outer = inner
    elif divisor == 1 and (kernel > 5 or draw.random() < _FIRST_LAYERS):
        inner = 3
    padding = draw.choice((kernel // 2,) * 4 + (0,))
    return nn.Conv2d(inner, outer, kernel, stride, padding, groups=groups, bias=False)


def _channels(draw: random.Random, divisor: int) -> int:
    most = min(_MOST_OF_PICTURE * divisor, _MOST)
    value = _FEWEST * (most / _FEWEST) ** draw.random()
    step = draw.choice((8, 16, 32, 32, 64)) if value >= 64 else 8
    return max(step * round(value / step), step)
