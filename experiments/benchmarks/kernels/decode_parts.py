"""The kernels of a decode step, the bytes that they read, and whole steps of several requests.

Importing this module needs Triton.
"""

import statistics
from collections.abc import Callable, Mapping

import torch

from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.gpu.decode import GraphedDecode
from experiment_core_utils.engines.gpu.triton.decode_forward import DecodeStep, StepBuffers
from experiment_core_utils.engines.gpu.triton.tuning import Card, Tuning, tiles_for
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import DecoderWeights
from experiments.benchmarks.execution_table import Rates
from experiments.benchmarks.kernels.launches import MAX_SEQ_LEN, POSITIONS, KernelWork, filled_kv_cache, microseconds


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
