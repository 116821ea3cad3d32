"""The distance of a convolution's output from a float64 reference, and the bound that it should keep.

The distance is relative in the L2 norm: |output - reference| / |reference| over all elements.
"""

from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor

from experiments.performance_prediction.algorithms.convolution import AlgorithmName, ConvShape, Precision
from experiments.performance_prediction.algorithms.on_cpu import torch_choice

# Rounding step of the numbers that are multiplied.
_STEPS: Mapping[torch.dtype, float] = {
    torch.float64: 2.0**-52,
    torch.float32: 2.0**-23,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
}
_TF32_STEP = 2.0**-10
# How many times a sum of rounded products is exceeded by an algorithm that transforms first. F(4x4,3x3) and F(2x2,5x5)
# multiply by powers of the points up to 2^5; cuDNN's nonfused 5x5 was seen at 6e-3 in float32.
_FACTORS: Mapping[AlgorithmName, float] = {"fft": 8, "fft tiling": 8, "winograd": 16, "winograd nonfused": 256}
_NONFUSED_FIVE = 2e-2


def float64_reference(given: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """The convolution in float64, on the tensors' device."""
    return torch_choice(given.double(), weight.double(), shape)


def relative_l2(output: Tensor, reference: Tensor) -> float | None:
    """The relative L2 distance; None for a reference of zeros alone; infinite or nan where the output is not finite."""
    norm = float(torch.linalg.vector_norm(reference))
    if norm == 0.0:
        return None
    return float(torch.linalg.vector_norm(output.double() - reference)) / norm


def error_bound(algorithm: AlgorithmName, shape: ConvShape, dtype: torch.dtype, precision: Precision) -> float:
    """The relative L2 error that should not be exceeded on inputs and weights of mean 0.

    A sum of n products rounded one after the other strays by about sqrt(n) steps; 2 steps more are for the inputs'
    rounding. `guess` and `torch` may choose any algorithm, hence the widest of them.
    """
    step = _TF32_STEP if precision == "tf32" else _STEPS[dtype]
    widest = max(_FACTORS.values())
    factor = widest if algorithm in ("guess", "torch") else _FACTORS.get(algorithm, 1.0)
    bound = factor * step * (2 + sqrt(shape.products_per_output) / 4)
    if algorithm in ("winograd nonfused", "guess", "torch") and shape.kernel == (5, 5):
        bound = max(bound, _NONFUSED_FIVE)
    return bound
