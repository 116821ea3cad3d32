"""Pointwise parts of the vision tower and its connector, each in one pass over memory.

Everything is computed in float32 and rounded where it is stored. Importing this module needs Triton.
"""

import torch
import triton
import triton.language as tl
from torch import nn

from experiment_core_utils.engines.gpu.triton.tuning import tuning_at
from experiment_core_utils.engines.weights import ConnectorWeights


@triton.jit
def _layer_norm(value, weight, bias, column, inside, eps, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    mean = tl.sum(value, axis=0) / WIDTH
    off = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(off * off, axis=0) / WIDTH + eps)
    scaled = off * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    return scaled + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def embed_norm_kernel(  # type: ignore[no-untyped-def]
    patches,
    class_embedding,
    positions,
    first_weight,
    first_bias,
    weight,
    bias,
    states,
    normed,
    eps,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = row % TOKENS
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if token == 0:
        value = tl.load(class_embedding + column, mask=inside, other=0.0).to(tl.float32)
    else:
        patch = row // TOKENS * (TOKENS - 1) + token - 1
        value = tl.load(patches + patch * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(positions + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    kind: tl.constexpr = states.dtype.element_ty
    state = _layer_norm(value, first_weight, first_bias, column, inside, eps, WIDTH).to(kind)
    tl.store(states + row * WIDTH + column, state, mask=inside)
    unit = _layer_norm(state.to(tl.float32), weight, bias, column, inside, eps, WIDTH)
    tl.store(normed + row * WIDTH + column, unit.to(kind), mask=inside)


def embed_norm(
    patches: torch.Tensor,
    class_embedding: torch.Tensor,
    positions: torch.Tensor,
    before: nn.LayerNorm,
    first: nn.LayerNorm,
) -> tuple[torch.Tensor, torch.Tensor]:
    """States [N * (P + 1), D] after the norm `before`, and their norm `first`, of patch embeddings [N * P, D]."""
    tokens, width = positions.shape
    rows = patches.shape[0] // (tokens - 1) * tokens
    states = torch.empty((rows, width), dtype=patches.dtype, device=patches.device)
    normed = torch.empty_like(states)
    embed_norm_kernel[(rows,)](
        patches,
        class_embedding,
        positions,
        before.weight,
        before.bias,
        first.weight,
        first.bias,
        states,
        normed,
        before.eps,
        TOKENS=tokens,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=tuning_at(patches.device).row_warps,
    )
    return states, normed


@triton.jit
def add_norm_kernel(  # type: ignore[no-untyped-def]
    states, branch, weight, bias, normed, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = row * WIDTH + column
    value = tl.load(states + place, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(branch + place, mask=inside, other=0.0).to(tl.float32)
    kind: tl.constexpr = states.dtype.element_ty
    value = value.to(kind)
    tl.store(states + place, value, mask=inside)
    unit = _layer_norm(value.to(tl.float32), weight, bias, column, inside, eps, WIDTH)
    tl.store(normed + place, unit.to(kind), mask=inside)


def add_norm(states: torch.Tensor, branch: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
    """Add `branch` [M, D] to `states` in place, and return their norm [M, D]."""
    rows, width = states.shape
    normed = torch.empty_like(states)
    block, warps = triton.next_power_of_2(width), tuning_at(states.device).row_warps
    add_norm_kernel[(rows,)](
        states, branch, norm.weight, norm.bias, normed, norm.eps, WIDTH=width, BLOCK=block, num_warps=warps
    )
    return normed


@triton.jit
def quick_gelu_kernel(values, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + place, mask=place < count, other=0.0).to(tl.float32)
    value = value * tl.sigmoid(1.702 * value)
    tl.store(values + place, value.to(values.dtype.element_ty), mask=place < count)


def quick_gelu_in_place(values: torch.Tensor) -> None:
    """The quick GELU x * sigmoid(1.702 * x), over a contiguous tensor."""
    count, tile = values.numel(), tuning_at(values.device).elementwise
    quick_gelu_kernel[(triton.cdiv(count, tile.rows),)](values, count, BLOCK=tile.rows, num_warps=tile.warps)


@triton.jit
def stack_kernel(  # type: ignore[no-untyped-def]
    states,
    is_real,
    masks,
    pads,
    features,
    means,
    first_column,
    STACKED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SIDE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One window a program: its patches' states, padding filled in, and their mean."""
    cells: tl.constexpr = SIDE // WINDOW
    window = tl.program_id(0).to(tl.int64)
    crop = window // (cells * cells)
    cell = window % (cells * cells)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    kind: tl.constexpr = features.dtype.element_ty
    real = tl.load(is_real + crop).to(tl.float32)
    all_pad = tl.load(pads + first_column + column, mask=inside, other=0.0).to(tl.float32)
    part_pad = tl.load(pads + STACKED + first_column + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for corner in tl.static_range(WINDOW * WINDOW):
        patch = (cell // cells * WINDOW + corner // WINDOW) * SIDE + cell % cells * WINDOW + corner % WINDOW
        mask = tl.load(masks + crop * (SIDE * SIDE) + patch).to(tl.float32)
        state = crop * (SIDE * SIDE + 1) + 1 + patch
        value = tl.load(states + state * WIDTH + column, mask=inside, other=0.0).to(tl.float32) * real
        value += tl.where(mask == 0, all_pad, tl.where(mask < 1, part_pad, 0.0))
        value = value.to(kind)
        out = (window * (WINDOW * WINDOW) + corner) * STACKED + first_column
        tl.store(features + out + column, value, mask=inside)
        total += value.to(tl.float32)
    mean = total / (WINDOW * WINDOW)
    tl.store(means + window * STACKED + first_column + column, mean.to(kind), mask=inside)


def stack(
    states: torch.Tensor,
    is_real: torch.Tensor,
    masks: torch.Tensor,
    connector: ConnectorWeights,
    layer: int,
    features: torch.Tensor,
    means: torch.Tensor,
) -> None:
    """Put one feature block's states into its columns of `features` and `means`, windows one after the other.

    Args:
        states: [N * (P + 1), D], the class token first in each crop; dropped here.
        is_real: [N] bool, False makes a crop's states zero.
        masks: [N, P] fraction of real pixels of each patch, in the states' dtype.
        layer: whose columns: layer * D to (layer + 1) * D.
        features: [N * F * W * W, C], `means`: [N * F, C]; C is the width of all feature blocks together.
    """
    width = states.shape[1]
    stack_kernel[(means.shape[0],)](
        states,
        is_real,
        masks,
        connector.pads,
        features,
        means,
        layer * width,
        STACKED=features.shape[1],
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        SIDE=connector.grid_side,
        WINDOW=connector.window,
        num_warps=tuning_at(states.device).row_warps,
    )


@triton.jit
def pool_kernel(  # type: ignore[no-untyped-def]
    queries,
    keys_values,
    output,
    scale,
    PATCHES: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One window a program: its query over its patches, head by head, with a running softmax."""
    window = tl.program_id(0).to(tl.int64)
    width: tl.constexpr = HEADS * CHANNELS
    head = tl.arange(0, PADDED)
    channel = tl.arange(0, BLOCK)
    inside = (head < HEADS)[:, None] & (channel < CHANNELS)[None, :]
    place = head[:, None] * CHANNELS + channel[None, :]
    query = tl.load(queries + window * width + place, mask=inside, other=0.0).to(tl.float32) * scale
    largest = tl.full((PADDED,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((PADDED,), dtype=tl.float32)
    total = tl.zeros((PADDED, BLOCK), dtype=tl.float32)
    for patch in tl.static_range(PATCHES):
        row = keys_values + (window * PATCHES + patch) * (2 * width) + place
        score = tl.sum(query * tl.load(row, mask=inside, other=0.0).to(tl.float32), axis=1)
        value = tl.load(row + width, mask=inside, other=0.0).to(tl.float32)
        above = tl.maximum(largest, score)
        kept = tl.exp(largest - above)
        power = tl.exp(score - above)
        weight = weight * kept + power
        total = total * kept[:, None] + power[:, None] * value
        largest = above
    pooled = total / weight[:, None]
    tl.store(output + window * width + place, pooled.to(output.dtype.element_ty), mask=inside)


def pool(queries: torch.Tensor, keys_values: torch.Tensor, heads: int) -> torch.Tensor:
    """Attention of each window's query [M, D] over its patches' keys beside values [M * W * W, 2 * D] -> [M, D]."""
    windows, width = queries.shape
    channels = width // heads
    output = torch.empty_like(queries)
    pool_kernel[(windows,)](
        queries,
        keys_values,
        output,
        channels**-0.5,
        PATCHES=keys_values.shape[0] // windows,
        HEADS=heads,
        PADDED=triton.next_power_of_2(heads),
        CHANNELS=channels,
        BLOCK=triton.next_power_of_2(channels),
        num_warps=tuning_at(queries.device).row_warps,
    )
    return output
