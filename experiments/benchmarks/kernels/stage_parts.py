"""The kernels of a decode step, and every part of a decoder block and of a vision tower block, on a GPU.

Importing this module needs Triton.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.gpu.decode import GraphedDecode
from experiment_core_utils.engines.gpu.triton.decode_forward import DecodeStep, StepBuffers
from experiment_core_utils.engines.gpu.triton.grouped_gemm import align_blocks, grouped_gemm
from experiment_core_utils.engines.gpu.triton.norms import apply_rope_and_store, combine_norm, norm
from experiment_core_utils.engines.gpu.triton.prefill_forward import rotary_table
from experiment_core_utils.engines.gpu.triton.routing import route
from experiment_core_utils.engines.gpu.triton.tuning import Card, ProductTile, Tuning, prefill_tiles_for, tiles_for
from experiment_core_utils.engines.gpu.triton.vision_ops import add_norm, quick_gelu_in_place
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import DecoderWeights, VisionWeights
from experiments.benchmarks.kernels.launches import (
    MAX_SEQ_LEN,
    POSITIONS,
    ROWS,
    TOP_K,
    KernelWork,
    filled_kv_cache,
    microseconds,
)
from experiments.benchmarks.kernels.work import Rates


def attention_parts(
    given: Callable[[int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]], causal: bool, flops: float
) -> Iterator[KernelWork]:
    """The rows of attention, by each kernel that a GPU has for bfloat16."""
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def attend(i: int, backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                queries, keys, values = given(i)
                return scaled_dot_product_attention(queries, keys, values, is_causal=causal)

        yield KernelWork(f"attention, {backend.name}", attend, flops)


def decoder_parts(decoder: DecoderWeights, tile: ProductTile | None = None) -> Iterator[KernelWork]:
    """The rows of everything that a block runs.

    Args:
        tile: of the experts' products; None takes this card's.
    """
    width, inner, experts = decoder.width, decoder.expert_width, decoder.num_experts
    blocks, eps = decoder.blocks, decoder.norm_eps
    hidden = torch.randn(ROWS, width, device=decoder.device, dtype=decoder.dtype)
    length = torch.tensor([POSITIONS], device=decoder.device)
    kv_cache = KVCache.allocate(decoder, ROWS)
    rotary = rotary_table(decoder, ROWS)
    block = blocks[0]
    normed = norm(hidden, block.ffn_norm, length, eps)
    tiles = prefill_tiles_for(width, inner, hidden) if tile is None else (tile, tile)
    topk_ids = torch.empty(ROWS, TOP_K, dtype=torch.int32, device=decoder.device)
    topk_weights, others = route(normed, block.router, length, topk_ids, False), torch.empty_like(topk_ids)
    packed = linear(normed, block.qkv)
    keys, values = kv_cache.keys[:, 0], kv_cache.values[:, 0]
    heads = decoder.num_heads
    queries = apply_rope_and_store(packed, block.query_norm, block.key_norm, *rotary, keys[0], values[0], heads, eps)
    keys[1:], values[1:] = keys[0], values[0]
    sorted_rows = torch.randn(ROWS * TOP_K, inner, device=decoder.device, dtype=decoder.dtype)
    rows = torch.randn(ROWS * TOP_K, width, device=decoder.device, dtype=decoder.dtype)

    yield KernelWork("qkv product", lambda i: linear(normed, blocks[i].qkv), 2.0 * ROWS * width * block.qkv.shape[0])
    yield KernelWork(
        "norms, rotary, store",
        lambda i: apply_rope_and_store(
            packed, block.query_norm, block.key_norm, *rotary, keys[i], values[i], heads, eps
        ),
    )
    rotated_queries = queries.transpose(0, 1)[None]
    yield from attention_parts(lambda i: (rotated_queries, keys[i][None], values[i][None]), True, 2.0 * ROWS**2 * width)
    yield KernelWork(
        "output product", lambda i: torch.addmm(hidden, normed, blocks[i].output.t()), 2.0 * ROWS * width**2
    )
    yield KernelWork("norm", lambda i: norm(hidden, blocks[i].ffn_norm, length, eps))
    yield KernelWork("router", lambda i: route(normed, blocks[i].router, length, others, False))
    yield KernelWork("plan", lambda i: align_blocks(topk_ids, experts, tiles[0].row_block))
    choices = float(POSITIONS * TOP_K)
    order, row_blocks = align_blocks(topk_ids, experts, tiles[0].row_block)
    yield KernelWork(
        "gate and up",
        lambda i: grouped_gemm(normed, blocks[i].gate_up, sorted_rows, order, row_blocks, TOP_K, True, tiles[0]),
        4.0 * choices * width * inner,
    )
    yield KernelWork(
        "down",
        lambda i: grouped_gemm(sorted_rows, blocks[i].down, rows, order, row_blocks, TOP_K, False, tiles[1]),
        2.0 * choices * width * inner,
    )
    yield KernelWork(
        "combine and norm", lambda i: combine_norm(hidden, rows, topk_weights, length, blocks[i].input_norm, eps)
    )


def vision_parts(vision: VisionWeights, crops: int) -> Iterator[KernelWork]:
    """The rows of everything that a block of the tower runs, and attention by each kernel."""
    blocks, heads = vision.blocks, vision.num_heads
    tokens, width = vision.positions.shape
    rows = crops * tokens
    states = torch.randn(rows, width, device=vision.device, dtype=vision.dtype)
    wide = torch.randn(rows, blocks[0].inner.shape[0], device=vision.device, dtype=vision.dtype)
    packed = linear(states, blocks[0].qkv, blocks[0].qkv_bias).view(crops, tokens, 3, heads, width // heads)
    queries, keys, values = packed.permute(2, 0, 3, 1, 4)
    yield KernelWork("qkv product", lambda i: linear(states, blocks[i].qkv, blocks[i].qkv_bias), 6.0 * rows * width**2)
    yield from attention_parts(lambda i: (queries, keys, values), False, 4.0 * crops * tokens**2 * width)
    yield KernelWork(
        "output product", lambda i: linear(states, blocks[i].output, blocks[i].output_bias), 2.0 * rows * width**2
    )
    yield KernelWork("sum and norm", lambda i: add_norm(states, states, blocks[i].first_norm))
    products = 2.0 * rows * width * wide.shape[1]
    yield KernelWork("inner product", lambda i: linear(states, blocks[i].inner, blocks[i].inner_bias), products)
    yield KernelWork("quick-GELU", lambda i: quick_gelu_in_place(wide))
    yield KernelWork("outer product", lambda i: linear(wide, blocks[i].outer, blocks[i].outer_bias), products)


def kernel_bytes(decoder: DecoderWeights, top_k: int, positions: int) -> dict[str, int]:
    """Bytes of weights, keys and values that each kernel of a block, and the head, reads for one request."""
    block, size = decoder.blocks[0], decoder.dtype.itemsize
    expert = (block.gate_up[0].numel(), block.down[0].numel())
    return {
        "qkv": size * block.qkv.numel(),
        "attention": size * positions * 2 * decoder.num_kv_heads * decoder.head_width,
        "output": size * (block.output.numel() + block.router.numel()),
        "gate_up": size * top_k * expert[0],
        "down": size * top_k * expert[1],
        "head": size * decoder.head.numel(),
    }


def step_bytes(decoder: DecoderWeights, used: Mapping[int, torch.Tensor], positions: int) -> int:
    """Bytes that a step of B requests has to read, counted likewise: each weight once, and keys and values of all.

    Args:
        used: expert ids [B, k] of each block that ran.
    """
    head, total = 0, 0
    for ids in used.values():
        parts = kernel_bytes(decoder, ids.unique().numel(), positions)
        head = parts.pop("head")
        total += sum(parts.values()) + (len(ids) - 1) * parts["attention"]
    return total + head


@torch.inference_mode()
def decode_parts(decoder: DecoderWeights, top_k: int, kv_cache: KVCache, row: Tuning | None = None) -> list[KernelWork]:
    """The kernels of a step, in an order in which each finds what it needs; `row` None takes this card's tiles."""
    tiles = tiles_for(decoder, top_k, MAX_SEQ_LEN, row)
    buffers = StepBuffers.allocate(decoder, 1, MAX_SEQ_LEN, tiles)
    step = DecodeStep(decoder, kv_cache, buffers, tiles, use_pdl=Card.of(decoder.device).is_hopper)
    step.launch(EngineKnobs(top_k, (0, 1)))
    blocks, read = decoder.blocks, kernel_bytes(decoder, top_k, POSITIONS)
    launches: dict[str, Callable[[int], object]] = {
        "qkv": lambda i: step.launch_qkv(blocks[i], buffers.stream, embed=False),
        "attention": lambda i: step.launch_attention(blocks[i], i),
        "output": lambda i: step.launch_output(blocks[i], buffers.stream, top_k, embed=False),
        "gate_up": lambda i: step.launch_gate_up(blocks[i], buffers.used.ids[i], top_k),
        "down": lambda i: step.launch_down(blocks[i], top_k),
        "head": lambda i: step.launch_head(),
    }
    return [KernelWork(name, launch, bytes=read[name]) for name, launch in launches.items()]


@torch.inference_mode()
def print_steps(decoder: DecoderWeights, top_k: int, blocks: int, batch: int, rates: Rates) -> None:
    """The rows of a whole step: one, or two where there are two ways."""
    knobs = EngineKnobs(top_k, tuple(range(blocks)))
    ways = {"for each": batch + 1, "once for all": batch} if batch > 1 else {"for each": batch + 1}
    for way, fewest in ways.items():
        kv_cache, engine = filled_kv_cache(decoder, batch), GraphedDecode(decoder, fewest_together=fewest)
        engine.warm_up(knobs, kv_cache)
        ms = microseconds(lambda: engine.step(knobs, kv_cache), kv_cache) * 1e-3  # noqa: B023
        used = engine.topk_expert_ids
        experts = statistics.mean(ids.unique().numel() for ids in used.values())
        limit_ms = step_bytes(decoder, used, POSITIONS) / rates.bytes_per_s * 1e3
        print(
            f"step: top-k {top_k}, {blocks} blocks, {batch} requests, weights read {way}: {ms:.3f} ms, "
            f"{batch / ms * 1e3:.0f} tokens/s, {experts:.1f} experts a block, {ms / limit_ms:.2f} x its limit of "
            f"{limit_ms:.3f} ms",
            flush=True,
        )
