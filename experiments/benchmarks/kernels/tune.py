"""The tile sizes that are fastest on the card of this machine, as a row of `tuning.TUNINGS`, ready to paste.

    python -m experiments.benchmarks.kernels.tune

Random weights at MolmoE-1B's widths in bfloat16, on a GPU. Each kernel of a decode step, and each grouped GEMM of a
prompt's experts, runs with each candidate in turn, once in each block, so that weights come from memory; the candidate
with the least median wins. What is not tried (dense blocks, how positions are split, what is asked for ahead, the step
of several requests, passes over rows) is the default's.
"""

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.engines.cuda_graphs import CudaGraphPool
from experiment_core_utils.engines.gpu.triton.tuning import (
    Card,
    ProductTile,
    ReadTile,
    Tuning,
    tuning_of,
)
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import DecoderWeights
from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.benchmarks.kernels.launches import TOP_K, KernelWork, built, filled_kv_cache, microseconds, over_blocks

# Series of each candidate, and the blocks of the model: more weights than fit in any cache.
ROUNDS, BLOCKS = 3, 4
# Kernels of a decode step, and the steps that each can take.
PARTS = {"qkv": (1, 2), "attention": (1,), "output": (1,), "gate_up": (1, 2), "down": (1,), "head": (1,)}
# Grouped GEMMs of a prefill, and the names of their parts.
PRODUCTS = {"prefill_gate_up": "gate and up", "prefill_down": "down"}
T = TypeVar("T")
Run = Callable[[], torch.Tensor]


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


def row_text(card: Card, row: Tuning) -> str:
    """A line of `TUNINGS`."""
    return f'    "{card.name.removeprefix("NVIDIA ")}": {row!r},'


def timed(candidates: Sequence[T], run_with: Callable[[T], Run], kv_cache: KVCache) -> T:
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


def tuned(decoder: DecoderWeights, row: Tuning, kv_cache: KVCache) -> Tuning:
    """The row with the fastest tile of each kernel of a decode step, and of the grouped GEMMs of a prefill."""
    from experiments.benchmarks.kernels.stage_parts import decode_parts, decoder_parts

    def on_every_block(parts: Iterable[KernelWork], name: str) -> Run:
        part = next(each for each in parts if each.name == name)
        return over_blocks(part.run, len(decoder.blocks), kv_cache.next_tokens)

    for part in PARTS:

        def step_with(tile: ReadTile, part: str = part, row: Tuning = row) -> Run:
            return on_every_block(decode_parts(decoder, TOP_K, kv_cache, row_with(row, part, tile)), part)

        row = row_with(row, part, timed(read_tiles(part), step_with, kv_cache))
    for part, name in PRODUCTS.items():

        def prefill_with(tile: ProductTile, name: str = name) -> Run:
            return on_every_block(decoder_parts(decoder, tile), name)

        row = row_with(row, part, timed(product_tiles(Card.of(decoder.device)), prefill_with, kv_cache))
    return row


@torch.inference_mode()
def main() -> None:
    OneLineParser(description=__doc__).parse_args()
    if not torch.cuda.is_available():
        raise ConfigurationError("tile sizes are measured on a GPU, and this machine has none; run this where one is")
    decoder = built(BLOCKS).fused_decoder()
    card, kv_cache = Card.of(decoder.device), filled_kv_cache(decoder, 1)
    print(row_text(card, tuned(decoder, tuning_of(card.name), kv_cache)))


if __name__ == "__main__":
    sys.exit(run_command(main))
