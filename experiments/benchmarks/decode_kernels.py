"""The graphed decode step and its kernels at MolmoE-1B's shape: time, bytes, fraction of the memory's rate.

    python -m experiments.benchmarks.decode_kernels --check
    python -m experiments.benchmarks.decode_kernels --top_k_list 8 --block_counts 16 --batch_sizes 1 4 8 16 32

Random weights in bfloat16, on a GPU. A kernel's row is one launch in each block, so that every block's weights come
from memory; kernels overlap with their neighbours there as they do in a step. Several requests have other tokens, keys
and values each, and step in both ways: weights read for each of them, and once for all. `--check` first compares logits
with the modules': in float32, and in bfloat16 beside the modules' own error.
"""

import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.engine_model import EngineModel
from experiment_core_utils.engines.gpu.decode import GraphedDecode
from experiment_core_utils.engines.gpu.triton.decode_forward import DecodeStep, StepBuffers
from experiment_core_utils.engines.gpu.triton.tuning import Card, tiles_for
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import BlockWeights, DecoderWeights
from experiment_core_utils.models.common.cuda_graphs import CudaGraphPool
from experiments.benchmarks.molmoe_1b import (
    H200_BYTES_PER_S,
    MAX_SEQ_LEN,
    POSITIONS,
    built,
    filled_kv_cache,
    in_float32,
    launches_of,
    microseconds,
    relative,
)


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
def kernels(decoder: DecoderWeights, top_k: int) -> None:
    """One row a kernel."""
    kv_cache, tiles = filled_kv_cache(decoder, 1), tiles_for(decoder, top_k, MAX_SEQ_LEN)
    buffers = StepBuffers.allocate(decoder, 1, MAX_SEQ_LEN, tiles)
    step = DecodeStep(decoder, kv_cache, buffers, tiles, use_pdl=Card.of(decoder.device).is_hopper)
    step.launch(EngineKnobs(top_k, (0, 1)))
    launches = launches_of(step, buffers, top_k)
    read = kernel_bytes(decoder, top_k, POSITIONS)
    graphs = CudaGraphPool(limit=len(launches))
    for name, launch in launches.items():

        def every_block(launch: Callable[[BlockWeights, int], None] = launch) -> torch.Tensor:
            for row, block in enumerate(decoder.blocks):
                launch(block, row)
            return buffers.stream

        graphs.capture(name, every_block)
        us = microseconds(lambda name=name: graphs.replay(name), kv_cache) / len(decoder.blocks)  # type: ignore[misc]
        prob = read[name] / (us * 1e-6) / H200_BYTES_PER_S
        print(f"top-k {top_k} {name:10s} {us:6.2f} us {read[name] / 1e6:7.2f} MB {prob:5.0%} of the rate", flush=True)


@torch.inference_mode()
def steps(decoder: DecoderWeights, top_k: int, blocks: int, batch: int) -> None:
    """The rows of a whole step: one, or two where there are two ways."""
    knobs = EngineKnobs(top_k, tuple(range(blocks)))
    ways = {"for each": batch + 1, "once for all": batch} if batch > 1 else {"for each": batch + 1}
    for way, fewest in ways.items():
        kv_cache, engine = filled_kv_cache(decoder, batch), GraphedDecode(decoder, fewest_together=fewest)
        engine.warm_up(knobs, kv_cache)
        ms = microseconds(lambda: engine.step(knobs, kv_cache), kv_cache) * 1e-3  # noqa: B023
        used = engine.topk_expert_ids
        experts = statistics.mean(ids.unique().numel() for ids in used.values())
        floor = step_bytes(decoder, used, POSITIONS) / H200_BYTES_PER_S * 1e3
        print(
            f"step: top-k {top_k}, {blocks} blocks, {batch} requests, weights read {way}: {ms:.3f} ms, "
            f"{batch / ms * 1e3:.0f} tokens/s, {experts:.1f} experts a block, {ms / floor:.2f} x its floor of "
            f"{floor:.3f} ms",
            flush=True,
        )


@torch.inference_mode()
def check() -> None:
    """Compare twelve steps after a prompt with the modules, whose tokens every engine then gets."""
    half = built(4, 10, torch.bfloat16)
    full = in_float32(half)
    full.modules.set_experts_implementation("eager")
    ids = torch.randint(6, 50000, (1, POSITIONS), device="cuda")
    for knobs in (EngineKnobs(8, (0, 1, 2, 3)), EngineKnobs(3, (0, 2))):
        wanted, exact = full.modules.prefill(ids, top_k=knobs.top_k, active_blocks=knobs.blocks)
        _, rounded = half.modules.prefill(ids, top_k=knobs.top_k, active_blocks=knobs.blocks)
        ours = {
            name: _after_prompt(model, state) for name, model, state in (("32", full, exact), ("16", half, rounded))
        }
        errors: dict[str, list[float]] = {"32": [], "16": [], "modules": []}
        same = 0
        for _ in range(12):
            token = wanted.argmax(dim=-1, keepdim=True)
            wanted = full.modules.decode_step(token, exact)
            errors["modules"].append(relative(half.modules.decode_step(token, rounded), wanted))
            for name, (engine, kv_cache) in ours.items():
                kv_cache.next_tokens.copy_(token[0])
                errors[name].append(relative(engine.step(knobs, kv_cache), wanted))
            same += int(ours["32"][1].next_tokens[0] == wanted.argmax())
        print(
            f"check {knobs}: float32 {max(errors['32']):.1e}, {same} of 12 tokens the same; bfloat16 "
            f"{statistics.mean(errors['16']):.1e} (modules {statistics.mean(errors['modules']):.1e})",
            flush=True,
        )


def _after_prompt(model: EngineModel, state: Any) -> tuple[GraphedDecode, KVCache]:
    decoder = model.fused_decoder()
    kv_cache = KVCache.allocate(decoder, MAX_SEQ_LEN)
    for row, layer in enumerate(state.past_key_values.layers):
        kv_cache.keys[row, :, :, :POSITIONS], kv_cache.values[row, :, :, :POSITIONS] = layer.keys, layer.values
    kv_cache.set_lengths([POSITIONS])
    return GraphedDecode(decoder), kv_cache


def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--top_k_list", type=int, nargs="+", default=[8, 4, 1])
    parser.add_argument("--block_counts", type=int, nargs="+", default=[16, 12])
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1])
    arguments = parser.parse_args()
    if arguments.check:
        check()
    decoder = built(16, 10, torch.bfloat16).fused_decoder()
    for top_k in arguments.top_k_list:
        kernels(decoder, top_k)
    for batch in arguments.batch_sizes:
        for blocks in arguments.block_counts:
            for top_k in arguments.top_k_list:
                steps(decoder, top_k, blocks, batch)


if __name__ == "__main__":
    sys.exit(run_command(main))
