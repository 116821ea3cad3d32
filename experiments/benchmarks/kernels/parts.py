"""Every kernel of a stage, with its variants, at MolmoE-1B's shape: time, and what it attains of this card's rates.

    python -m experiments.benchmarks.kernels.parts --stage decode --top_k_list 8
    python -m experiments.benchmarks.kernels.parts --stage decode --top_k_list 8 1 --block_counts 16 --batch_sizes 4 32
    python -m experiments.benchmarks.kernels.parts --stage prefill vision

Random weights in bfloat16, on a GPU, device time of CUDA graphs. A part runs once in each block, so that every block's
weights come from memory; kernels of a decode step overlap with their neighbours there as they do in a step. With
`--batch_sizes` whole decode steps follow, of requests that have other tokens, keys and values each, in both ways:
weights read for each of them, and once for all. Rates of a copy and of a matrix product are measured first.
"""

import sys
from collections.abc import Callable, Iterable

import torch

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.engines.cuda_graphs import CudaGraphPool
from experiment_core_utils.primitives.errors import ConfigurationError, ProfilerError, first_line
from experiments.benchmarks.kernels.launches import KernelWork, built, filled_kv_cache, microseconds, over_blocks
from experiments.benchmarks.kernels.process import attained_rates, device_seconds
from experiments.benchmarks.kernels.work import Rates, Work

CROPS = 13


@torch.inference_mode()
def print_parts(
    title: str, parts: Iterable[KernelWork], blocks: int, rates: Rates, timed: Callable[..., float]
) -> None:
    """A line for each part: microseconds a block, and its limit as a fraction of them.

    Args:
        timed: gives the seconds of a replay.
    """
    graphs, placeholder = CudaGraphPool(limit=1), torch.zeros(1, device="cuda")
    for part in parts:
        try:
            graphs.capture(part.name, over_blocks(part.run, blocks, placeholder))
        except (RuntimeError, ProfilerError) as error:
            print(f"{title} {part.name:24s} {first_line(error)[:100]}", flush=True)
            continue
        seconds = timed(lambda part=part: graphs.replay(part.name)) / blocks
        limit_s = Work(part.flops, part.bytes).floor_s(rates)
        limit = f"{limit_s / seconds:5.0%} of its limit" if limit_s else ""
        print(f"{title} {part.name:24s} {seconds * 1e6:7.2f} us {limit}", flush=True)


def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--stage", nargs="+", choices=("decode", "prefill", "vision"), required=True)
    parser.add_argument("--top_k_list", type=int, nargs="+", default=[8, 4, 1], help="of decode steps")
    parser.add_argument("--block_counts", type=int, nargs="+", default=[16, 12], help="of whole decode steps")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[], help="requests of whole decode steps")
    flags = parser.parse_args()
    if not torch.cuda.is_available():
        raise ConfigurationError("kernels are measured on a GPU, and torch sees none; run this where one is")
    from experiments.benchmarks.kernels.stage_parts import decode_parts, decoder_parts, print_steps, vision_parts

    model = built(16)
    device, decoder = model.modules.device, model.fused_decoder()
    rates, blocks = attained_rates(device, torch.bfloat16), len(decoder.blocks)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {rates}")
    if "decode" in flags.stage:
        kv_cache = filled_kv_cache(decoder, 1)
        for top_k in flags.top_k_list:
            parts = decode_parts(decoder, top_k, kv_cache)
            print_parts(f"decode, top-k {top_k}:", parts, blocks, rates, lambda run: microseconds(run, kv_cache) * 1e-6)
        for batch in flags.batch_sizes:
            for active in flags.block_counts:
                for top_k in flags.top_k_list:
                    print_steps(decoder, top_k, active, batch, rates)
    if "prefill" in flags.stage:
        print_parts("prefill:", decoder_parts(decoder), blocks, rates, lambda run: device_seconds(run, device))
    if "vision" in flags.stage:
        tower = model.fused_vision()
        rows = vision_parts(tower, CROPS)
        print_parts(f"{CROPS} crops:", rows, len(tower.blocks), rates, lambda run: device_seconds(run, device))


if __name__ == "__main__":
    sys.exit(run_command(main))
