"""Weights, launches and device times of single kernels at MolmoE-1B's shape, on a GPU."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from experiment_core_utils.engines.engine_model import EngineModel
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import DecoderWeights
from experiment_core_utils.models.molmoe.engine_model import MolmoeEngineModel
from experiments.benchmarks.kernels.shapes import MOLMOE, config_of, random_weights

# Tokens of a prompt, their padded number, the experts of each, and the places of a KV cache.
POSITIONS, ROWS, TOP_K, MAX_SEQ_LEN = 1053, 1088, 8, 1280
# Replays of a series.
STEPS = 40


@dataclass(frozen=True)
class KernelWork:
    """A row of a table: work on block `index`, and the products or bytes that it has to do, 0 where next to nothing."""

    name: str
    run: Callable[[int], Any]
    flops: float = 0.0
    bytes: float = 0.0


def over_blocks(run: Callable[[int], Any], blocks: int, output: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Work on every block, so that all weights come from memory; what it returns is `output`."""

    def every_block() -> torch.Tensor:
        for index in range(blocks):
            run(index)
        return output

    return every_block


def built(blocks: int) -> EngineModel:
    """MolmoE-1B with so many decoder blocks, random weights in bfloat16 made on the GPU."""
    config = config_of(f"{MOLMOE}:{blocks}", "published")
    return MolmoeEngineModel(random_weights(config, torch.device("cuda"), torch.bfloat16))


def microseconds(run: Callable[[], object], kv_cache: KVCache) -> float:
    """Device time of one of many replays in a row, from the same positions each time; the median of three series."""
    series = []
    for _ in range(3):
        kv_cache.set_lengths([POSITIONS] * kv_cache.batch)
        run()
        started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        started.record()
        for _ in range(STEPS):
            run()
        ended.record()
        ended.synchronize()
        series.append(started.elapsed_time(ended) * 1e3 / STEPS)
    return statistics.median(series)


def filled_kv_cache(decoder: DecoderWeights, batch: int) -> KVCache:
    """A KV cache with random keys and values at every position, and another token for each request."""
    kv_cache = KVCache.allocate(decoder, MAX_SEQ_LEN, batch)
    kv_cache.keys.normal_()
    kv_cache.values.normal_()
    kv_cache.next_tokens.copy_(torch.arange(6, 6 + batch))
    return kv_cache
