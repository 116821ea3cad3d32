"""In: input [N,C,H,W], weight [K,C/groups,R,S], shape; out: [N,K,Ho,Wo], as products of spectra. Stride 1, dilation 1.

A product of spectra is a circular convolution. Only outputs that no sample wrapped around can reach are kept, so that
nothing has to be padded beyond the convolution's own zeros.
"""

import torch
from torch import Tensor
from torch.nn import functional

from experiments.performance_prediction.convolution import ConvShape, Pair

TILE = 32


def fft(given: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """One spectrum of the whole padded plane."""
    padded = functional.pad(given, (shape.padding[1], shape.padding[1], shape.padding[0], shape.padding[0]))
    circular = _correlate(padded.unsqueeze(2), weight, shape, shape.padded_size)
    rows, columns = shape.output_size
    return circular[:, :, 0, :rows, :columns].contiguous()


def fft_tiling(given: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """Overlap-save: tiles of 32x32 that overlap by kernel - 1; of each, the outputs that nothing wrapped around.

    A side of the plane that is shorter than a tile is one tile of its own length.
    """
    tile = (min(TILE, shape.padded_size[0]), min(TILE, shape.padded_size[1]))
    steps = (tile[0] - shape.kernel[0] + 1, tile[1] - shape.kernel[1] + 1)
    down, across = (-(-size // step) for size, step in zip(shape.output_size, steps, strict=True))
    below = (down - 1) * steps[0] + tile[0] - shape.height - shape.padding[0]
    right = (across - 1) * steps[1] + tile[1] - shape.width - shape.padding[1]
    padded = functional.pad(given, (shape.padding[1], right, shape.padding[0], below))
    tiles = padded.unfold(2, tile[0], steps[0]).unfold(3, tile[1], steps[1]).flatten(2, 3)
    circular = _correlate(tiles, weight, shape, tile)
    kept = circular[..., : steps[0], : steps[1]].unflatten(2, (down, across))
    plane = kept.permute(0, 1, 2, 4, 3, 5).reshape(shape.batch, -1, down * steps[0], across * steps[1])
    rows, columns = shape.output_size
    return plane[:, :, :rows, :columns].contiguous()


def _correlate(pieces: Tensor, weight: Tensor, shape: ConvShape, size: Pair) -> Tensor:
    """Circular cross-correlation of `size`: pieces [N,C,T,h,w] -> [N,K,T,h,w].

    The sum over channels is one matrix product for each frequency and group.
    """
    batch, _, count = pieces.shape[:3]
    spectra = torch.fft.rfft2(pieces).reshape(batch, shape.groups, shape.weight_shape[1], count, -1)
    kernels = torch.fft.rfft2(weight, s=size).conj().reshape(shape.groups, -1, shape.weight_shape[1], spectra.shape[-1])
    # [frequency, group, N·T, C/groups] @ [frequency, group, C/groups, K/groups]
    left = spectra.permute(4, 1, 0, 3, 2).flatten(2, 3)
    product = left @ kernels.permute(3, 0, 2, 1)
    restored = product.unflatten(2, (batch, count)).permute(2, 1, 4, 3, 0)
    half = size[1] // 2 + 1
    return torch.fft.irfft2(restored.reshape(batch, shape.out_channels, count, size[0], half), s=size)
