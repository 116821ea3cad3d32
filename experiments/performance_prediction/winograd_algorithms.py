"""In: input [N,C,H,W], weight [K,C/groups,R,R], shape; out: [N,K,Ho,Wo], by Winograd's minimal filtering.

Stride 1, dilation 1, square kernels.
"""

import torch
from torch import Tensor
from torch.nn import functional

from experiments.performance_prediction.convolution import ConvShape
from experiments.performance_prediction.winograd_transform import Matrix, winograd_transform

FUSED_OUTPUTS = 2
NONFUSED_OUTPUTS = {3: 4, 5: 2}


def winograd(given: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """F(2x2, 3x3), all stages for one row of tiles before the next: no transformed plane is ever held whole."""
    tiles = _tiles(given, shape, FUSED_OUTPUTS)
    kernels = transformed_kernels(weight, shape, FUSED_OUTPUTS)
    rows = [_outputs(tiles[:, :, row : row + 1], kernels, shape, FUSED_OUTPUTS) for row in range(tiles.shape[2])]
    return _cropped(torch.cat(rows, dim=2), shape)


def winograd_nonfused(given: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """F(4x4, 3x3) or F(2x2, 5x5), each stage for all tiles before the next."""
    outputs = NONFUSED_OUTPUTS[shape.kernel[0]]
    tiles = _tiles(given, shape, outputs)
    return _cropped(_outputs(tiles, transformed_kernels(weight, shape, outputs), shape, outputs), shape)


def _tiles(given: Tensor, shape: ConvShape, outputs: int) -> Tensor:
    """[N, C, tiles down, tiles across, n, n]: a view of the padded input."""
    side = outputs + shape.kernel[0] - 1
    down, across = (-(-size // outputs) for size in shape.output_size)
    below = (down - 1) * outputs + side - shape.height - shape.padding[0]
    right = (across - 1) * outputs + side - shape.width - shape.padding[1]
    padded = functional.pad(given, (shape.padding[1], right, shape.padding[0], below))
    return padded.unfold(2, side, outputs).unfold(3, side, outputs)


def transformed_kernels(weight: Tensor, shape: ConvShape, outputs: int) -> Tensor:
    """G g G^T of each 2-D kernel g: [n·n, groups, K/groups, C/groups]."""
    matrix = _tensor(winograd_transform(outputs, shape.kernel[0]).kernel, weight)
    transformed = (matrix @ weight @ matrix.T).flatten(2).permute(2, 0, 1)
    return transformed.unflatten(1, (shape.groups, -1)).contiguous()


def _outputs(tiles: Tensor, kernels: Tensor, shape: ConvShape, outputs: int) -> Tensor:
    """[N, C, down, across, n, n] -> [N, K, down·m, across·m]: transform, one matrix product per element, transform."""
    transform = winograd_transform(outputs, shape.kernel[0])
    from_input, to_output = _tensor(transform.given, tiles), _tensor(transform.output, tiles)
    batch, _, down, across = tiles.shape[:4]
    transformed = (from_input @ tiles @ from_input.T).flatten(4).flatten(2, 3)
    # [n·n, groups, C/groups, N·tiles]
    columns = transformed.unflatten(1, (shape.groups, -1)).permute(4, 1, 2, 0, 3).flatten(3)
    product = (kernels @ columns).flatten(1, 2)
    sides = (len(transform.given), len(transform.given))
    squares = product.unflatten(0, sides).unflatten(3, (batch, down, across)).permute(3, 2, 4, 5, 0, 1)
    finished = to_output @ squares @ to_output.T
    return finished.permute(0, 1, 2, 4, 3, 5).reshape(batch, shape.out_channels, down * outputs, across * outputs)


def _cropped(plane: Tensor, shape: ConvShape) -> Tensor:
    rows, columns = shape.output_size
    return plane[:, :, :rows, :columns].contiguous()


def _tensor(matrix: Matrix, like: Tensor) -> Tensor:
    return torch.tensor([[float(value) for value in row] for row in matrix], dtype=like.dtype, device=like.device)
