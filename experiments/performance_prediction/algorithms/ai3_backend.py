"""Convolutions on the CPU by the ai3 library; this is the only file that imports ai3.

ai3 (on PyPI: aithree) copies every tensor of a GPU to the host and back, names algorithms in its GPU builds that it
does not run, and ends the process where CUDA fails: it is used only as a second engine for two algorithms on the CPU.
"""

from collections.abc import Mapping

import torch
from ai3 import swap_torch  # noqa: F401 - registers torch.ops.ai3.conv2d
from torch import Tensor

from experiments.performance_prediction.algorithms.convolution import AlgorithmName, ConvShape

# What ai3 runs on the CPU, by the project's names; smm is its im2col and matrix product.
AI3_NAMES: Mapping[AlgorithmName, str] = {"direct": "direct", "gemm": "smm"}
_ZEROS = 0


def unsupported_reason(algorithm: AlgorithmName, shape: ConvShape) -> str | None:
    """The reason why ai3 does not cover this convolution, to follow its name; None where it does (float32, float64)."""
    if algorithm not in AI3_NAMES:
        return f"is not in ai3 on the CPU; {' and '.join(AI3_NAMES)} are"
    return f"takes 1 group in ai3, this has {shape.groups}" if shape.groups != 1 else None


def convolve(algorithm: AlgorithmName, shape: ConvShape, given: Tensor, weight: Tensor) -> Tensor:
    """The output [N,K,Ho,Wo] of contiguous input [N,C,H,W] and weight [K,C,R,S]; no gradient."""
    # It reads bare addresses, so that any other layout would give wrong numbers.
    steps = (*shape.padding, *shape.stride, *shape.dilation)
    output: Tensor = torch.ops.ai3.conv2d(
        given.detach().contiguous(),
        weight.detach().contiguous(),
        None,
        *steps,
        _ZEROS,
        shape.groups,
        AI3_NAMES[algorithm],
    )
    return output
