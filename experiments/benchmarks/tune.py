"""The tile sizes that are fastest on the card of this machine, as a row of `tuning.TUNINGS`, ready to paste.

    python -m experiments.benchmarks.tune

Random weights at MolmoE-1B's widths in bfloat16, on a GPU. Each kernel of a decode step, and each grouped GEMM of a
prompt's experts, runs with each candidate in turn, once in each block, so that weights come from memory; the candidate
with the least median wins. What is not tried (how positions are split, the step of several requests, passes over rows)
is the default's.
"""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.gpu.triton.tuning import (
    Card,
    ProductTile,
    ReadTile,
    Tuning,
    tiles_for,
    tuning_of,
)
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import DecoderWeights
from experiment_core_utils.models.common.cuda_graphs import CudaGraphPool
from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.benchmarks.molmoe_1b import (
    MAX_SEQ_LEN,
    ROWS,
    TOP_K,
    built,
    filled_kv_cache,
    launches_of,
    microseconds,
)

# Series of each candidate, and the blocks of the model: more weights than fit in any cache.
ROUNDS, BLOCKS = 3, 4
# Kernels of a decode step, and the steps that each can take.
PARTS = {"qkv": (1, 2), "attention": (1,), "output": (1,), "gate_up": (1, 2), "down": (1,), "head": (1,)}
T = TypeVar("T")


def read_tiles(part: str) -> list[ReadTile]:
    """Candidates of a kernel of a decode step."""
    sizes = [(kibibytes, warps) for kibibytes in (4, 8, 16, 32, 64) for warps in (2, 4, 8)]
    return [ReadTile(*size, steps) for size in sizes for steps in PARTS[part]]


def product_tiles(card: Card) -> list[ProductTile]:
    """Candidates of a grouped GEMM; all take as many rows, as the two products of a prompt must."""
    bulk = (False, True) if card.is_hopper else (False,)
    sizes = [(strip, warps, stages) for strip in (64, 128, 256) for warps in (4, 8) for stages in (2, 3, 4)]
    return [ProductTile(strip, 64, 128, 32, warps, stages, each) for strip, warps, stages in sizes for each in bulk]


def fastest(microseconds: Mapping[T, Sequence[float]]) -> T:
    """The candidate with the least median, the first of equal ones."""
    if not microseconds:
        raise ConfigurationError("no candidate of a kernel runs on this card; report its name and Triton's version")
    return min(microseconds, key=lambda candidate: statistics.median(microseconds[candidate]))


def row_with(row: Tuning, part: str, tile: ReadTile | ProductTile) -> Tuning:
    """The row with another tile of one kernel."""
    changed: dict[str, Any] = {part: tile}
    return replace(row, **changed)


def row_text(card: Card, tuned: Tuning) -> str:
    """A line of `TUNINGS`."""
    return f'    "{card.name.removeprefix("NVIDIA ")}": {tuned!r},'


def timed(candidates: Sequence[T], run_with: Callable[[T], Callable[[], torch.Tensor]], kv_cache: KVCache) -> T:
    """The fastest of those that fit the card."""
    from triton.errors import TritonError

    found: dict[T, list[float]] = {}
    for candidate in candidates:
        graphs = CudaGraphPool(limit=1)
        try:
            graphs.capture("run", run_with(candidate))
        except TritonError:
            continue
        found[candidate] = [microseconds(lambda graphs=graphs: graphs.replay("run"), kv_cache) for _ in range(ROUNDS)]  # type: ignore[misc]
    return fastest(found)


def tuned_step(decoder: DecoderWeights, row: Tuning, kv_cache: KVCache) -> Tuning:
    """The row with the fastest tile of each kernel of a decode step."""
    from experiment_core_utils.engines.gpu.triton.decode_forward import DecodeStep, StepBuffers

    for part in PARTS:

        def run_with(candidate: ReadTile, part: str = part, row: Tuning = row) -> Callable[[], torch.Tensor]:
            tiles = tiles_for(decoder, TOP_K, MAX_SEQ_LEN, row_with(row, part, candidate))
            buffers = StepBuffers.allocate(decoder, 1, MAX_SEQ_LEN, tiles)
            step = DecodeStep(decoder, kv_cache, buffers, tiles, Card.of(decoder.device).is_hopper)
            step.launch(EngineKnobs(TOP_K, (0, 1)))
            launch = launches_of(step, buffers, TOP_K)[part]

            def every_block() -> torch.Tensor:
                for index, block in enumerate(decoder.blocks):
                    launch(block, index)
                return buffers.stream

            return every_block

        row = row_with(row, part, timed(read_tiles(part), run_with, kv_cache))
    return row


def tuned_prefill(decoder: DecoderWeights, row: Tuning, kv_cache: KVCache) -> Tuning:
    """The row with the fastest tiles of the grouped GEMMs."""
    from experiment_core_utils.engines.gpu.triton.grouped_gemm import align_blocks, grouped_gemm

    like: dict[str, Any] = {"dtype": decoder.dtype, "device": decoder.device}
    hidden = torch.randn(ROWS, decoder.width, **like)
    activated = torch.randn(ROWS * TOP_K, decoder.expert_width, **like)
    rows = torch.empty(ROWS * TOP_K, decoder.width, **like)
    chances = torch.rand(ROWS, decoder.num_experts, device=decoder.device)
    topk_ids = chances.topk(TOP_K, dim=1).indices.to(torch.int32)
    for name, gated, given, output in (
        ("prefill_gate_up", True, hidden, activated.clone()),
        ("prefill_down", False, activated, rows),
    ):

        def run_with(
            tile: ProductTile, gated: bool = gated, given: torch.Tensor = given, output: torch.Tensor = output
        ) -> Callable[[], torch.Tensor]:
            order, row_blocks = align_blocks(topk_ids, decoder.num_experts, tile.row_block)

            def every_block() -> torch.Tensor:
                for block in decoder.blocks:
                    weight = block.gate_up if gated else block.down
                    grouped_gemm(given, weight, output, order, row_blocks, TOP_K, gated, tile)
                return output

            return every_block

        row = row_with(row, name, timed(product_tiles(Card.of(decoder.device)), run_with, kv_cache))
    return row


@torch.inference_mode()
def main() -> int:
    OneLineParser(description=__doc__).parse_args()
    if not torch.cuda.is_available():
        print(
            "error: tile sizes are measured on a GPU, and this machine has none; run this where one is", file=sys.stderr
        )
        return 2
    decoder = built(BLOCKS, 10, torch.bfloat16).fused_decoder()
    card, kv_cache = Card.of(decoder.device), filled_kv_cache(decoder, 1)
    row = tuned_step(decoder, tuning_of(card.name), kv_cache)
    print(row_text(card, tuned_prefill(decoder, row, kv_cache)))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
