"""Panels by hand, and the kernels of the vision tower against torch's own operations at sizes that fill no tile."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from experiment_core_utils.engines.cpu.panels import panels_of
from experiment_core_utils.engines.cpu.vision_block import (
    EmbeddingKernel,
    PoolingKernel,
    VisionBlockKernel,
    tile_width,
)
from experiment_core_utils.engines.weights import VisionBlockWeights
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.engines.cpu_compiler import needs_compiler
from tests.same_floats import assert_same_floats


def test_panels_hold_columns_side_by_side() -> None:
    """Three columns of two in panels of two: 1, 2 | 3, 4 and 5, 6 with zeros behind it."""
    panels = panels_of(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([7.0, 8.0, 9.0]), 2)
    assert panels.weights.tolist() == [[[1.0, 3.0], [2.0, 4.0]], [[5.0, 0.0], [6.0, 0.0]]]
    assert (panels.bias.tolist(), panels.columns) == ([7.0, 8.0, 9.0, 0.0], 3)
    assert panels_of(torch.ones(3, 2), None, 2).bias.tolist() == [0.0] * 4


ACTIVATE = {
    "quick_gelu": lambda hidden: hidden * torch.sigmoid(1.702 * hidden),
    "gelu": F.gelu,
    "tanh_gelu": lambda hidden: F.gelu(hidden, approximate="tanh"),
}


def vision_kernel(width: int, inner: int, activation: Any = "quick_gelu") -> VisionBlockKernel:
    torch.manual_seed(width)
    norms = [nn.LayerNorm(width, eps=1e-5) for _ in range(2)]
    for norm in norms:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    joint, output, first, second = (
        (torch.randn(rows, columns) * columns**-0.5, torch.randn(rows))
        for rows, columns in ((3 * width, width), (width, width), (inner, width), (width, inner))
    )
    return VisionBlockKernel(VisionBlockWeights(norms[0], *joint, *output, norms[1], *first, *second, activation))


@needs_compiler
@pytest.mark.parametrize(("width", "inner"), [(1, 1), (33, 70), (64, 130), (20, 2050)])
@pytest.mark.parametrize("rows", [1, 7, 96, 101, 407])
@pytest.mark.parametrize("activation", ACTIVATE)
@torch.inference_mode()
def test_a_vision_block_is_that_of_torch(width: int, inner: int, rows: int, activation: str) -> None:
    kernel = vision_kernel(width, inner, activation)
    block, states, attended = kernel.block, torch.randn(rows, width), torch.randn(rows, width)
    joint = kernel.project(states, torch.empty(rows, 3 * width))
    expected = F.linear(block.first_norm(states), block.qkv, block.qkv_bias)
    torch.testing.assert_close(joint, expected, rtol=1e-4, atol=1e-4)
    summed = states + F.linear(attended, block.output, block.output_bias)
    hidden = ACTIVATE[activation](F.linear(block.second_norm(summed), block.inner, block.inner_bias))
    expected = summed + F.linear(hidden, block.outer, block.outer_bias)
    found = kernel.finish(attended, states)
    assert found.data_ptr() == states.data_ptr()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("threads", [2, 3])
@torch.inference_mode()
def test_threads_share_the_rows_of_a_vision_block(threads: int) -> None:
    kernel, before = vision_kernel(33, 70), torch.get_num_threads()
    states, attended = torch.randn(77, 33), torch.randn(77, 33)
    alone = kernel.project(states, torch.empty(77, 99)), kernel.finish(attended, states.clone())
    torch.set_num_threads(threads)
    try:
        together = kernel.project(states, torch.empty(77, 99)), kernel.finish(attended, states.clone())
    finally:
        torch.set_num_threads(before)
    for found, expected in zip(together, alone, strict=True):
        assert_same_floats(found, expected)


@needs_compiler
@pytest.mark.parametrize(
    ("activation", "of_one"), [("quick_gelu", 0.8457958), ("gelu", 0.8413447), ("tanh_gelu", 0.8411920)]
)
@torch.inference_mode()
def test_activations_are_right_far_from_zero(activation: Any, of_one: float) -> None:
    """The norms give their bias, the products are the identity or nothing: a state becomes the activation's value.

    What stands for erf is off by 1.5e-7, the activation so by 1e-6 at 14, and float32 rounds beside that.
    """
    given = torch.tensor([1.0, 0.0, *torch.linspace(-14, 14, 95).tolist(), 1e30, -1e30, 400.0])
    width = len(given)
    norm, zero, no_bias, same = nn.LayerNorm(width), torch.zeros(width, width), torch.zeros(width), torch.eye(width)
    nn.init.zeros_(norm.weight)
    norm.bias.data.copy_(given)
    block = VisionBlockWeights(
        *(norm, torch.zeros(3 * width, width), torch.zeros(3 * width), zero, no_bias),
        *(norm, same, no_bias, same, no_bias, activation),
    )
    found = VisionBlockKernel(block).finish(torch.zeros(1, width), torch.zeros(1, width))[0]
    assert float(found[0]) == pytest.approx(of_one, abs=2e-7)
    torch.testing.assert_close(found.double(), ACTIVATE[activation](given.double()), rtol=1e-6, atol=2e-6)


@needs_compiler
def test_rows_of_another_width_are_refused() -> None:
    kernel = vision_kernel(33, 70)
    with pytest.raises(ValueError, match=r"\[2, 33\], not torch.float32 \[2, 32\]"):
        kernel.project(torch.zeros(2, 32), torch.zeros(2, 99))
    with pytest.raises(ValueError, match=r"\[2, 33\], not torch.float32 \[3, 33\]"):
        kernel.finish(torch.zeros(3, 33), torch.zeros(2, 33))
    with pytest.raises(ConfigurationError, match="qkv weights of a vision block are not in contiguous float32"):
        VisionBlockKernel(replace(kernel.block, qkv=kernel.block.qkv.double()))


@needs_compiler
@pytest.mark.parametrize(("side", "patch", "width", "crops"), [(2, 1, 3, 1), (44, 4, 37, 2), (30, 2, 64, 3)])
@torch.inference_mode()
def test_patches_become_states(side: int, patch: int, width: int, crops: int) -> None:
    """Against a convolution; 4, 121 and 225 patches, of which the last two are more than one span."""
    torch.manual_seed(side)
    convolution, norm = nn.Conv2d(3, width, patch, patch, bias=False), nn.LayerNorm(width)
    nn.init.normal_(norm.weight)
    tokens = (side // patch) ** 2 + 1
    class_token, positions = torch.randn(width), torch.randn(tokens, width)
    patches = panels_of(convolution.weight.flatten(1), None, tile_width())
    kernel = EmbeddingKernel(patches, patch, class_token, positions, norm)
    pixels = torch.randn(crops, 3, side, side)
    of_patches = convolution(pixels).flatten(2).transpose(1, 2)
    joined = torch.cat([class_token.expand(crops, 1, width), of_patches], dim=1)
    torch.testing.assert_close(kernel.states(pixels), norm(joined + positions), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="square"):
        kernel.states(pixels[:, :, :, 1:])
    with pytest.raises(ValueError, match="are not those of this tower"):
        kernel.states(pixels[:, :2].contiguous())


@needs_compiler
def test_a_window_of_like_patches_is_their_value() -> None:
    """One cell of 2 x 2 patches, 2 wide: weights of a quarter each, values twice the features; one is all padding.

    Features 1, 2 and the pad -1, -2 make the fourth 0, 0; keys are zero: 2 * 3 / 4 * (1, 2).
    """
    tile, zero = tile_width(), torch.zeros(2, 2)
    key_value = panels_of(torch.cat([zero, 2 * torch.eye(2)]), None, tile)
    kernel = PoolingKernel(torch.tensor([[-1.0, -2.0], [9.0, 9.0]]), panels_of(zero, None, tile), key_value, 1, 1, 2)
    features, masks = torch.tensor([1.0, 2.0]).expand(1, 4, 2).contiguous(), torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    torch.testing.assert_close(kernel.pooled(features, masks), torch.tensor([[[1.5, 3.0]]]))
    with pytest.raises(ValueError, match=r"\[1, 4\], not torch.float32 \[4\]"):
        kernel.pooled(features, masks[0])


@needs_compiler
@pytest.mark.parametrize(("cells", "side", "heads"), [(1, 1, 1), (5, 2, 3), (2, 3, 2)])
def test_windows_are_pooled_by_attention(cells: int, side: int, heads: int) -> None:
    """5 wide heads, features 11 wide, in two crops; a third of the patches is all or partly padding."""
    torch.manual_seed(cells)
    width, patches, tile = 5 * heads, (cells * side) ** 2, tile_width()
    weights = [(torch.randn(width, 11), torch.randn(width)) for _ in range(3)]
    key_value = panels_of(*(torch.cat(pair) for pair in zip(weights[1], weights[2], strict=True)), tile)
    pads, features = torch.randn(2, 11), torch.randn(2, patches, 11)
    masks = torch.ones(2, patches)
    masks[:, ::3], masks[1, ::6] = 0.5, 0.0
    kernel = PoolingKernel(pads, panels_of(*weights[0], tile), key_value, heads, cells, side)
    found = kernel.pooled(features, masks)
    padded = features + pads[0] * (masks == 0)[..., None] + pads[1] * ((masks > 0) & (masks < 1))[..., None]
    grid = padded.view(2, cells, side, cells, side, 11).permute(0, 1, 3, 2, 4, 5).reshape(2, cells**2, side**2, 11)
    query, key, value = (
        F.linear(given, *each).unflatten(3, (heads, 5)).transpose(2, 3)
        for given, each in zip((grid.mean(dim=2, keepdim=True), grid, grid), weights, strict=True)
    )
    expected = F.scaled_dot_product_attention(query, key, value).flatten(2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
