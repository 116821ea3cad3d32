"""In: input [N,C,H,W], weight [K,C/groups,R,S], shape; out: [N,K,Ho,Wo], by shifted products or by im2col."""

import torch
from torch import Tensor
from torch.nn import functional

from experiments.performance_prediction.convolution import ConvShape


def direct(given: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """One kernel tap after the other: the input shifted by it, times its channel matrix, added to the output."""
    rows, columns = shape.output_size
    padded = functional.pad(given, (shape.padding[1], shape.padding[1], shape.padding[0], shape.padding[0]))
    grouped = weight.reshape(shape.groups, -1, shape.weight_shape[1], *shape.kernel)
    size = (shape.batch, shape.groups, grouped.shape[1], rows * columns)
    output = torch.zeros(size, dtype=given.dtype, device=given.device)
    for r in range(shape.kernel[0]):
        top = r * shape.dilation[0]
        for s in range(shape.kernel[1]):
            left = s * shape.dilation[1]
            bottom, right = top + (rows - 1) * shape.stride[0] + 1, left + (columns - 1) * shape.stride[1] + 1
            shifted = padded[:, :, top : bottom : shape.stride[0], left : right : shape.stride[1]]
            output += grouped[..., r, s] @ shifted.reshape(shape.batch, shape.groups, -1, rows * columns)
    return output.reshape(shape.output_shape)


def gemm(given: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """The whole im2col matrix [N, C·R·S, Ho·Wo], then one matrix product per image and group."""
    columns = functional.unfold(given, shape.kernel, shape.dilation, shape.padding, shape.stride)
    grouped = columns.reshape(shape.batch, shape.groups, shape.products_per_output, -1)
    return (weight.reshape(shape.groups, -1, shape.products_per_output) @ grouped).reshape(shape.output_shape)
