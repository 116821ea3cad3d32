"""Panels by hand, and the kernels of whole blocks against torch's own operations at sizes that fill no tile."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from experiment_core_utils.engines.cpu.decoder_block import DecoderBlockKernel, decoder_block_kernel
from experiment_core_utils.engines.cpu.panels import Workspace, paired_panels, panels_of, refuse_large
from experiment_core_utils.engines.cpu.vision_block import (
    EmbeddingKernel,
    PoolingKernel,
    VisionBlockKernel,
    tile_width,
)
from experiment_core_utils.engines.weights import BlockWeights
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.engines.cpu_compiler import needs_compiler


def test_panels_hold_columns_side_by_side() -> None:
    """Three columns of two in panels of two: 1, 2 | 3, 4 and 5, 6 with zeros behind it."""
    panels = panels_of(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([7.0, 8.0, 9.0]), 2)
    assert panels.weights.tolist() == [[[1.0, 3.0], [2.0, 4.0]], [[5.0, 0.0], [6.0, 0.0]]]
    assert (panels.bias.tolist(), panels.columns) == ([7.0, 8.0, 9.0, 0.0], 3)
    assert panels_of(torch.ones(3, 2), None, 2).bias.tolist() == [0.0] * 4


def test_gates_stand_beside_their_ups() -> None:
    """One expert, three gates 1, 2, 3 and ups 10, 20, 30, panels of four: two gates, their ups."""
    gate_up = torch.tensor([[[1.0], [2.0], [3.0], [10.0], [20.0], [30.0]]])
    assert paired_panels(gate_up, 4).tolist() == [[[[1.0, 2.0, 10.0, 20.0]], [[3.0, 0.0, 30.0, 0.0]]]]


def test_large_copies_are_refused() -> None:
    """Two of 3 floats are 24 bytes."""
    weights = [torch.zeros(3), torch.zeros(3)]
    refuse_large(weights, 24)
    with pytest.raises(ConfigurationError, match="would take 24 bytes, of 23 allowed"):
        refuse_large(weights, 23)


def vision_kernel(width: int, inner: int) -> VisionBlockKernel:
    torch.manual_seed(width)
    norms, tile = [nn.LayerNorm(width, eps=1e-5) for _ in range(2)], tile_width()
    for norm in norms:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    joint, output, first, second = (
        panels_of(torch.randn(rows, columns) * columns**-0.5, torch.randn(rows), tile)
        for rows, columns in ((3 * width, width), (width, width), (inner, width), (width, inner))
    )
    return VisionBlockKernel(norms[0], joint, output, norms[1], first, second)


def flat(kernel_product: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight [N, K] and bias [N] of panels."""
    weights, bias, columns = vars(kernel_product).values()
    return weights.transpose(1, 2).flatten(0, 1)[:columns], bias[:columns]


@needs_compiler
@pytest.mark.parametrize(("width", "inner"), [(1, 1), (33, 70), (64, 130)])
@pytest.mark.parametrize("rows", [1, 7, 96, 101])
@torch.inference_mode()
def test_a_vision_block_is_that_of_torch(width: int, inner: int, rows: int) -> None:
    kernel = vision_kernel(width, inner)
    states, attended = torch.randn(rows, width), torch.randn(rows, width)
    joint = kernel.project(states, torch.empty(rows, 3 * width))
    torch.testing.assert_close(joint, F.linear(kernel.first_norm(states), *flat(kernel.joint)), rtol=1e-4, atol=1e-4)
    summed = states + F.linear(attended, *flat(kernel.output))
    hidden = F.linear(kernel.second_norm(summed), *flat(kernel.inner))
    expected = summed + F.linear(hidden * torch.sigmoid(1.702 * hidden), *flat(kernel.outer))
    found = kernel.finish(attended, states)
    assert found.data_ptr() == states.data_ptr()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@needs_compiler
def test_rows_of_another_width_are_refused() -> None:
    kernel = vision_kernel(33, 70)
    with pytest.raises(ValueError, match=r"\[2, 33\], not torch.float32 \[2, 32\]"):
        kernel.project(torch.zeros(2, 32), torch.zeros(2, 99))
    with pytest.raises(ValueError, match=r"\[2, 33\], not torch.float32 \[3, 33\]"):
        kernel.finish(torch.zeros(3, 33), torch.zeros(2, 33))


def decoder_kernel(width: int, experts: int, inner: int, normalises: bool = False) -> DecoderBlockKernel:
    """Two query heads and one of keys and values, 4 wide."""
    torch.manual_seed(width)
    block = BlockWeights(
        *(torch.randn(width), torch.randn(16, width), torch.randn(8), torch.randn(4), torch.randn(width, 8)),
        *(torch.randn(width), torch.randn(experts, width)),
        *(torch.randn(experts, 2 * inner, width), torch.randn(experts, width, inner) * 0.1),
    )
    return decoder_block_kernel(block, 1e-5, normalises, Workspace())


@needs_compiler
@pytest.mark.parametrize(("width", "experts", "inner", "top_k"), [(1, 1, 1, 1), (35, 5, 33, 2), (64, 70, 16, 3)])
@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 203])
def test_a_decoder_block_is_that_of_torch(
    width: int, experts: int, inner: int, top_k: int, normalises: bool, tokens: int
) -> None:
    """Experts in float64, one token after the other."""
    kernel = decoder_kernel(width, experts, inner, normalises)
    block, states, attended = kernel.block, torch.randn(tokens, width), torch.randn(tokens, 8)
    before = states.clone()
    found, topk_ids = kernel.finish(states, attended, top_k)
    summed = states + F.linear(attended, block.output)
    normed = F.rms_norm(summed, (width,), block.ffn_norm, 1e-5)
    weights, expected_experts = F.linear(normed, block.router).softmax(dim=1).topk(top_k)
    weights = weights / weights.sum(dim=1, keepdim=True) if normalises else weights
    assert torch.equal(topk_ids, expected_experts) and torch.equal(states, before)
    gate, up = torch.einsum("tkih,th->tki", block.gate_up.double()[topk_ids], normed.double()).chunk(2, dim=2)
    mixed = torch.einsum("tkhi,tki->tkh", block.down.double()[topk_ids], F.silu(gate) * up)
    expected = (summed + (mixed * weights[..., None]).sum(dim=1)).float()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@needs_compiler
def test_queries_and_keys_are_normed_and_turned() -> None:
    """At a quarter turn (a, b, c, d) becomes (-c, -d, a, b)."""
    kernel = decoder_kernel(35, 5, 33)
    block, states = kernel.block, torch.randn(101, 35)
    cos_sin = torch.zeros(101, 1, 4), torch.tensor([-1.0, -1.0, 1.0, 1.0]).expand(101, 1, 4).contiguous()
    kv_cache = torch.full((2, 1, 110, 4), 9.0)
    queries = kernel.project(states, cos_sin, (kv_cache[0, :, :101], kv_cache[1, :, :101]), 2)
    joint = F.linear(F.rms_norm(states, (35,), block.input_norm, 1e-5), block.qkv)

    def turned(heads: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(heads, norm.shape, norm, 1e-5).unflatten(1, (-1, 4))
        return torch.cat([-normed[..., 2:], normed[..., :2]], dim=2).transpose(0, 1)

    torch.testing.assert_close(queries, turned(joint[:, :8], block.query_norm), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kv_cache[0, :, :101], turned(joint[:, 8:12], block.key_norm), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kv_cache[1, 0, :101], joint[:, 12:], rtol=1e-4, atol=1e-4)
    assert bool((kv_cache[:, :, 101:] == 9.0).all())


@needs_compiler
def test_what_does_not_fit_a_decoder_block_is_refused() -> None:
    kernel = decoder_kernel(35, 5, 33)
    with pytest.raises(ValueError, match="6 experts a token were requested, of 5"):
        kernel.finish(torch.zeros(2, 35), torch.zeros(2, 8), 6)
    with pytest.raises(ValueError, match="attended rows have to be"):
        kernel.finish(torch.zeros(2, 35), torch.zeros(3, 8), 2)
    cos_sin, apart = (torch.zeros(2, 1, 4), torch.zeros(2, 1, 4)), torch.zeros(1, 4, 4)[:, ::2]
    with pytest.raises(ValueError, match="the positions of a head must be contiguous"):
        kernel.project(torch.zeros(2, 35), cos_sin, (apart, apart), 2)
    with pytest.raises(ValueError, match="3 and 1 heads of 4 are not those of the block"):
        kernel.project(torch.zeros(2, 35), cos_sin, (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)), 3)


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
