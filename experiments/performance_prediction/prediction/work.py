"""The work that an algorithm does for a convolution, as terms and features for a fit.

Terms are the parts that a time can be a sum of, scaled so that each is of the order of a millisecond on a large GPU;
the scales do not matter to a fit. A wave is a round of a GPU's multiprocessors over the blocks of a kernel: blocks /
(number of multiprocessors), rounded up.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.performance_prediction.algorithms.convolution import AlgorithmName, ConvShape

# Multiprocessors by data sheet, for tables that are fitted where their device is not.
MULTIPROCESSORS: Mapping[str, int] = {
    "NVIDIA H200": 132,
    "NVIDIA H200 NVL": 132,
    "NVIDIA H100 80GB HBM3": 132,
    "NVIDIA H100 PCIe": 114,
    "NVIDIA H100 NVL": 132,
    "NVIDIA A100-SXM4-40GB": 108,
    "NVIDIA A100-PCIE-40GB": 108,
    "NVIDIA A100-SXM4-80GB": 108,
    "NVIDIA A100 80GB PCIe": 108,
    "NVIDIA L40S": 142,
    "NVIDIA L4": 58,
    "Tesla V100-SXM2-16GB": 80,
    "Tesla V100-SXM2-32GB": 80,
    "Tesla V100-PCIE-16GB": 80,
    "Tesla V100-PCIE-32GB": 80,
}
# Output pixels and channels of a block: what cuDNN's kernel names say, and the constants of the project's own kernels.
_GEMM_TILES = ((32, 32), (128, 32), (128, 128))
_DIRECT_TILE = (128, 16)
_WINOGRAD_TILE = (16, 32)
# Blocks that may run on a multiprocessor at once.
_OCCUPANCIES = (4, 8)
# Sides of the planes and tiles that cuDNN transforms.
_SMALLEST_PLANE, _TILE = 16, 32


@dataclass(frozen=True)
class _Sizes:
    """A convolution in numbers; channels are those of one group, pixels and tiles those of all images and groups."""

    shape: ConvShape
    multiprocessors: int

    @property
    def inner(self) -> int:
        return self.shape.in_channels // self.shape.groups

    @property
    def outer(self) -> int:
        return self.shape.out_channels // self.shape.groups

    @property
    def planes(self) -> int:
        return self.shape.batch * self.shape.groups

    @property
    def pixels(self) -> int:
        return math.prod(self.shape.output_size) * self.planes

    @property
    def depth(self) -> float:
        """Products of one output element, in thousands, which a block computes one after the other."""
        return self.shape.products_per_output / 1e3

    def blocks(self, rows: float, tile: tuple[int, int]) -> int:
        return math.ceil(rows / tile[0]) * math.ceil(self.outer / tile[1])

    def waves(self, blocks: int, at_once: int = 1) -> int:
        return math.ceil(blocks / (self.multiprocessors * at_once))

    def tiles(self, side: int) -> int:
        """The number of square tiles of so many outputs a side."""
        return math.prod(math.ceil(size / side) for size in self.shape.output_size) * self.planes


def multiprocessors_of(device: str) -> int:
    """Multiprocessors of a device by name: read from it if it is here, else by data sheet; 1 where neither knows, for
    which waves are blocks.
    """
    # Its import takes a second, and a fit on another machine needs none of it.
    import torch

    for place in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(place)
        if found.name == device:
            return int(found.multi_processor_count)
    return MULTIPROCESSORS.get(device, 1)


def work_terms(shape: ConvShape, algorithm: AlgorithmName, multiprocessors: int) -> dict[str, float]:
    """The terms of a time by name; `one` is the cost of a call."""
    sizes = _Sizes(shape, multiprocessors)
    common = {"one": 1.0, "bytes": shape.bytes(4) / 4.8e9}
    own = {
        "direct": _direct,
        "winograd": _winograd,
        "winograd nonfused": _winograd_nonfused,
        "fft": _fft,
        "fft tiling": _fft_tiling,
    }.get(algorithm, _gemm)
    return {**common, **own(sizes)}


def features(shape: ConvShape, algorithm: AlgorithmName, multiprocessors: int) -> list[float]:
    """Logarithms (base 2) of sizes and terms, and whether sizes are aligned (1 or 0)."""
    sizes = _Sizes(shape, multiprocessors)
    side, pixels = shape.output_size[0], sizes.pixels
    logarithms = [sizes.inner, sizes.outer, side, shape.kernel[0], shape.stride[0], max(shape.padded_size)]
    terms = [value for name, value in work_terms(shape, algorithm, multiprocessors).items() if name != "one"]
    aligned = [float(pixels % 4 == 0), float(side % 2 == 0), float(sizes.outer % 64 == 0)]
    return [*(math.log2(value) for value in (*logarithms, *terms)), *aligned]


def matrix_of_terms(shapes: Sequence[ConvShape], algorithm: AlgorithmName, multiprocessors: int) -> np.ndarray:
    """The terms of each shape, [N, terms]."""
    return np.array(
        [list(work_terms(shape, algorithm, multiprocessors).values()) for shape in shapes], dtype=np.float64
    )


def matrix_of_features(shapes: Sequence[ConvShape], algorithm: AlgorithmName, multiprocessors: int) -> np.ndarray:
    """The features of each shape, [N, features]."""
    return np.array([features(shape, algorithm, multiprocessors) for shape in shapes], dtype=np.float64)


def _gemm(sizes: _Sizes) -> dict[str, float]:
    small = sizes.blocks(sizes.pixels, _GEMM_TILES[0])
    return {
        "flops": sizes.shape.flops / 67e9,
        "depth": sizes.depth,
        **{f"waves {tile}": sizes.waves(sizes.blocks(sizes.pixels, tile)) * sizes.depth for tile in _GEMM_TILES},
        **{f"waves of {held}": sizes.waves(small, held) * sizes.depth for held in _OCCUPANCIES},
    }


def _direct(sizes: _Sizes) -> dict[str, float]:
    blocks = sizes.blocks(sizes.pixels, _DIRECT_TILE)
    waves = sizes.waves(blocks)
    return {
        "flops": sizes.shape.flops / 67e9,
        "depth": sizes.depth,
        "waves": waves * sizes.depth,
        **{f"waves of {held}": sizes.waves(blocks, held) * sizes.depth for held in _OCCUPANCIES},
        "channels": sizes.inner / 1e2,
        "channels in waves": waves * sizes.inner / 1e3,
        "strided waves": waves * sizes.depth * math.prod(sizes.shape.stride),
    }


def _winograd(sizes: _Sizes) -> dict[str, float]:
    tiles = sizes.tiles(2)
    return {
        "weight": sizes.inner * sizes.outer / 1e5,
        "waves": sizes.waves(sizes.blocks(tiles, _WINOGRAD_TILE)) * sizes.inner / 1e2,
        "products": tiles * 16 * sizes.inner * sizes.outer / 1e9,
    }


def _winograd_nonfused(sizes: _Sizes) -> dict[str, float]:
    """The terms of 4x4 outputs a tile with a kernel of 3x3; 5x5 with one of 5x5, as the kernels' names say."""
    outputs = 5 if sizes.shape.kernel[0] == 5 else 4
    samples = (outputs + sizes.shape.kernel[0] - 1) ** 2
    tiles = sizes.tiles(outputs)
    return {
        "transforms": (sizes.inner + sizes.outer) * tiles * samples / 1e6,
        "weight": sizes.inner * sizes.outer * samples / 1e6,
        "products": tiles * samples * sizes.inner * sizes.outer / 1e9,
        "waves": sizes.waves(sizes.blocks(tiles * samples, (128, 64))) * sizes.inner / 1e3,
    }


def _fft(sizes: _Sizes) -> dict[str, float]:
    """The terms of planes padded to a power of two."""
    side = 2 ** math.ceil(math.log2(max(*sizes.shape.padded_size, _SMALLEST_PLANE)))
    return {
        "transforms": (sizes.inner + sizes.outer) * sizes.planes * side**2 / 1e6,
        "weight": sizes.inner * sizes.outer * side**2 / 1e8,
        "kernels": sizes.inner * sizes.outer / 1e5,
    }


def _fft_tiling(sizes: _Sizes) -> dict[str, float]:
    """The terms of tiles of 32x32 of which the outputs without wrap-around are kept; rows of 32 for 1x1."""
    shape = sizes.shape
    if max(shape.kernel) == 1:
        tiles, samples = math.ceil(sizes.pixels / _TILE), _TILE
    else:
        tiles, samples = sizes.tiles(max(_TILE + 1 - max(shape.kernel), 1)), _TILE * (_TILE // 2 + 1)
    return {
        "transforms": (sizes.inner + sizes.outer) * tiles * samples / 1e6,
        "weight": sizes.inner * sizes.outer * samples / 1e6,
        "products": sizes.inner * sizes.outer * tiles * samples / 1e9,
        "tiles": float(tiles),
        "strided weight": math.prod(shape.stride) * sizes.inner * sizes.outer * samples / 1e6,
    }
