"""Every part of a decoder block and of a vision tower block on a GPU, with its variants.

Importing this module needs Triton.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from experiment_core_utils.engines.gpu.triton.grouped_gemm import align_blocks, grouped_gemm
from experiment_core_utils.engines.gpu.triton.norms import apply_rope_and_store, combine_norm, norm
from experiment_core_utils.engines.gpu.triton.prefill_forward import rotary_table
from experiment_core_utils.engines.gpu.triton.routing import route
from experiment_core_utils.engines.gpu.triton.tuning import ProductTile
from experiment_core_utils.engines.gpu.triton.vision_ops import add_norm, quick_gelu_in_place
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import DecoderWeights, VisionWeights
from experiment_core_utils.models.common.private_apis import grouped_mm
from experiments.benchmarks.molmoe_1b import POSITIONS, ROWS, TOP_K

GATED_TILES = (
    ProductTile(128, 64, 128, 32, warps=8, stages=3),
    ProductTile(128, 64, 128, 32, warps=8, stages=3, bulk=True),
    ProductTile(128, 64, 128, 32, warps=8, stages=4, bulk=True),
    ProductTile(64, 64, 128, 32, warps=4, stages=3, bulk=True),
    ProductTile(128, 64, 128, 64, warps=8, stages=3),
)
DOWN_TILES = (
    ProductTile(128, 64, 128, 32, warps=8, stages=3, bulk=True),
    ProductTile(128, 64, 128, 32, warps=4, stages=3, bulk=True),
    ProductTile(128, 64, 128, 32, warps=8, stages=3),
    ProductTile(256, 64, 128, 32, warps=8, stages=4, bulk=True),
)


@dataclass(frozen=True)
class PrefillPart:
    """A row of the table: work on block `index`, and the products that it does."""

    name: str
    run: Callable[[int], Any]
    flops: float = 0.0


def attention_parts(
    given: Callable[[int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]], causal: bool, flops: float
) -> Iterator[PrefillPart]:
    """The rows of attention, by each kernel that a GPU has for bfloat16."""
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def attend(i: int, backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                queries, keys, values = given(i)
                return scaled_dot_product_attention(queries, keys, values, is_causal=causal)

        yield PrefillPart(f"attention, {backend.name}", attend, flops)


def decoder_parts(decoder: DecoderWeights) -> Iterator[PrefillPart]:
    """The rows of everything that a block runs, with variants of what costs most."""
    width, inner, experts = decoder.width, decoder.expert_width, decoder.num_experts
    blocks, eps = decoder.blocks, decoder.norm_eps
    hidden = torch.randn(ROWS, width, device="cuda", dtype=decoder.dtype)
    length = torch.tensor([POSITIONS], device="cuda")
    kv_cache = KVCache.allocate(decoder, ROWS)
    rotary = rotary_table(decoder.inverse_frequencies, ROWS)
    block = blocks[0]
    normed = norm(hidden, block.ffn_norm, length, eps)
    topk_ids = torch.empty(ROWS, TOP_K, dtype=torch.int32, device="cuda")
    topk_weights, others = route(normed, block.router, length, topk_ids, False), torch.empty_like(topk_ids)
    packed = linear(normed, block.qkv)
    keys, values = kv_cache.keys[:, 0], kv_cache.values[:, 0]
    heads = decoder.num_heads
    queries = apply_rope_and_store(packed, block.query_norm, block.key_norm, *rotary, keys[0], values[0], heads, eps)
    keys[1:], values[1:] = keys[0], values[0]
    sorted_rows = torch.randn(ROWS * TOP_K, inner, device="cuda", dtype=decoder.dtype)
    rows = torch.randn(ROWS * TOP_K, width, device="cuda", dtype=decoder.dtype)

    yield PrefillPart(
        "qkv product", lambda i: linear(normed, blocks[i].qkv), 2.0 * ROWS * width * blocks[0].qkv.shape[0]
    )
    yield PrefillPart(
        "norms, rotary, store",
        lambda i: apply_rope_and_store(
            packed, block.query_norm, block.key_norm, *rotary, keys[i], values[i], heads, eps
        ),
    )
    rotated_queries = queries.transpose(0, 1)[None]
    yield from attention_parts(lambda i: (rotated_queries, keys[i][None], values[i][None]), True, 2.0 * ROWS**2 * width)
    yield PrefillPart(
        "output product", lambda i: torch.addmm(hidden, normed, blocks[i].output.t()), 2.0 * ROWS * width**2
    )
    yield PrefillPart("norm", lambda i: norm(hidden, blocks[i].ffn_norm, length, eps))
    yield PrefillPart("router", lambda i: route(normed, blocks[i].router, length, others, False))
    yield PrefillPart("plan", lambda i: align_blocks(topk_ids, experts, 160))
    choices = float(POSITIONS * TOP_K)
    for tile in GATED_TILES:
        order, row_blocks = align_blocks(topk_ids, experts, tile.row_block)

        def gate_up(
            i: int, tile: ProductTile = tile, order: torch.Tensor = order, row_blocks: torch.Tensor = row_blocks
        ) -> None:
            grouped_gemm(normed, blocks[i].gate_up, sorted_rows, order, row_blocks, TOP_K, True, tile)

        yield PrefillPart(f"gate and up, {tile}", gate_up, 4.0 * choices * width * inner)
    for tile in DOWN_TILES:
        order, row_blocks = align_blocks(topk_ids, experts, tile.row_block)

        def down(
            i: int, tile: ProductTile = tile, order: torch.Tensor = order, row_blocks: torch.Tensor = row_blocks
        ) -> None:
            grouped_gemm(sorted_rows, blocks[i].down, rows, order, row_blocks, TOP_K, False, tile)

        yield PrefillPart(f"down, {tile}", down, 2.0 * choices * width * inner)
    real = topk_ids[:POSITIONS].flatten().long()
    order = real.sort(stable=True).indices
    ends = real.bincount(minlength=experts).cumsum(0).to(torch.int32)
    given = normed[order // TOP_K]
    middle = sorted_rows[: len(order)]
    yield PrefillPart("gather rows for torch", lambda i: normed[order // TOP_K])
    yield PrefillPart(
        "gate and up, torch",
        lambda i: grouped_mm(given, blocks[i].gate_up.transpose(1, 2), ends),
        4.0 * choices * width * inner,
    )
    both = grouped_mm(given, blocks[0].gate_up.transpose(1, 2), ends)
    yield PrefillPart("silu and product for torch", lambda i: silu(both[:, :inner]) * both[:, inner:])
    yield PrefillPart(
        "down, torch",
        lambda i: grouped_mm(middle, blocks[i].down.transpose(1, 2), ends),
        2.0 * choices * width * inner,
    )
    yield PrefillPart(
        "combine and norm", lambda i: combine_norm(hidden, rows, topk_weights, length, blocks[i].input_norm, eps)
    )


def vision_parts(vision: VisionWeights, crops: int) -> Iterator[PrefillPart]:
    """The rows of everything that a block of the tower runs, and attention by each kernel."""
    blocks, heads = vision.blocks, vision.num_heads
    tokens, width = vision.positions.shape
    rows = crops * tokens
    states = torch.randn(rows, width, device="cuda", dtype=vision.dtype)
    wide = torch.randn(rows, blocks[0].inner.shape[0], device="cuda", dtype=vision.dtype)
    packed = linear(states, blocks[0].qkv, blocks[0].qkv_bias).view(crops, tokens, 3, heads, width // heads)
    queries, keys, values = packed.permute(2, 0, 3, 1, 4)
    yield PrefillPart("qkv product", lambda i: linear(states, blocks[i].qkv, blocks[i].qkv_bias), 6.0 * rows * width**2)
    yield from attention_parts(lambda i: (queries, keys, values), False, 4.0 * crops * tokens**2 * width)
    yield PrefillPart(
        "output product", lambda i: linear(states, blocks[i].output, blocks[i].output_bias), 2.0 * rows * width**2
    )
    yield PrefillPart("sum and norm", lambda i: add_norm(states, states, blocks[i].first_norm))
    products = 2.0 * rows * width * wide.shape[1]
    yield PrefillPart("inner product", lambda i: linear(states, blocks[i].inner, blocks[i].inner_bias), products)
    yield PrefillPart("quick-GELU", lambda i: quick_gelu_in_place(wide))
    yield PrefillPart("outer product", lambda i: linear(wide, blocks[i].outer, blocks[i].outer_bias), products)
