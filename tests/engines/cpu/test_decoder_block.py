"""The kernel of a decoder block against torch's own operations at sizes that fill no tile."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from experiment_core_utils.engines.cpu.decoder_block import DecoderBlockKernel
from experiment_core_utils.engines.cpu.panels import Workspace
from experiment_core_utils.engines.weights import BlockWeights
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.engines.cpu_compiler import needs_compiler
from tests.same_floats import assert_same_floats


def decoder_kernel(width: int, experts: int, inner: int, normalises: bool = False) -> DecoderBlockKernel:
    """Two query heads and one of keys and values, 4 wide."""
    torch.manual_seed(width)
    block = BlockWeights(
        *(torch.randn(width), torch.randn(16, width), torch.randn(8), torch.randn(4), torch.randn(width, 8)),
        *(torch.randn(width), torch.randn(experts, width)),
        *(torch.randn(experts, 2 * inner, width), torch.randn(experts, width, inner) * 0.1),
    )
    return DecoderBlockKernel(block, 1e-5, normalises, Workspace())


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
@pytest.mark.parametrize("tokens", [300, 380])
def test_threads_share_columns_of_few_tokens_and_spans_of_many(tokens: int) -> None:
    """Of a dense block, by three threads: 300 tokens are too few spans, 380 are six. What comes out is one thread's."""
    torch.manual_seed(0)
    block = BlockWeights(
        *(torch.randn(600), torch.randn(768, 600) / 24, None, None, torch.randn(600, 384) / 20, torch.randn(600)),
        *(None, torch.randn(1, 2 * 130, 600) / 24, torch.randn(1, 600, 130) / 11),
    )
    kernel = DecoderBlockKernel(block, 1e-5, False, Workspace())
    states, attended = torch.randn(tokens, 600), torch.randn(tokens, 384)
    cos_sin, before, found = (torch.ones(tokens, 1, 32), torch.zeros(tokens, 1, 32)), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            keys, values = torch.zeros(6, tokens, 32), torch.zeros(6, tokens, 32)
            queries = kernel.project(states, cos_sin, (keys, values), 12).clone()
            after, _ = kernel.finish(states, attended, 1)
            found.append(torch.cat([each.flatten() for each in (queries, keys, values, after)]))
    finally:
        torch.set_num_threads(before)
    assert_same_floats(*found)


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
    shared = {"shared_gate_up": torch.zeros(2, 35), "shared_down": torch.zeros(35, 1), "post_ffn_norm": torch.ones(35)}
    with pytest.raises(ConfigurationError, match="no shared expert with a norm behind the experts"):
        DecoderBlockKernel(replace(kernel.block, **shared), 1e-5, False, Workspace())
