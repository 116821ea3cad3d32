"""What the measuring costs: the staged run with marks against the same run without, in turn, as a ratio of medians.

python -m experiments.benchmarks.marks --pairs 40
"""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from experiment_core_utils.b_model_loader import find_model, load_staged_model
from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.models.common.greedy import generate_greedily
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.device import (
    Marks,
    NoMarks,
    choose_device,
    new_marks,
    set_cpu_threads,
    synchronize,
)
from experiment_core_utils.tasks.registry import load_task


def timed_run(model: StagedModel, inputs: Mapping[str, Any], max_new_tokens: int, marks: Marks) -> float:
    """Seconds by the host's clock from before the run until its times are read; the device is idle at both ends."""
    synchronize(model.device)
    started = time.perf_counter()
    generate_greedily(model, inputs, max_new_tokens, marks)
    synchronize(model.device)
    marks.seconds()
    return time.perf_counter() - started


def paired_ratios(model: StagedModel, inputs: Mapping[str, Any], max_new_tokens: int, pairs: int) -> list[float]:
    """Marked over unmarked time of each pair; which of the two goes first alternates."""
    ratios = []
    for pair in tqdm(range(pairs), desc="pairs", leave=False):
        kinds = {"marked": new_marks(model.device), "unmarked": NoMarks()}
        order = list(kinds) if pair % 2 else list(reversed(kinds))
        seconds = {name: timed_run(model, inputs, max_new_tokens, kinds[name]) for name in order}
        ratios.append(seconds["marked"] / seconds["unmarked"])
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", type=Path)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--max_new_tokens", type=int, default=16)
    parser.add_argument("--random_weights", action="store_true")
    arguments = parser.parse_args()
    flags = ["--model_path", str(arguments.model_path)] if arguments.model_path else []
    config = parse_config([*flags, *(["--random_weights"] if arguments.random_weights else [])])
    set_cpu_threads(None, 1)
    model = load_staged_model(config.model, find_model(config.model.model_path), choose_device("auto"))
    model.eos_token_ids = frozenset()  # always the full number of tokens, so that both runs do the same work
    task = load_task(config.task.dataset_name, config.task.split)
    for target in config.knobs.vision_targets:
        sample = task[0]
        inputs = model.to_device(model.prepare(sample, task.prompt(sample), target.crops).inputs)
        with torch.inference_mode():
            paired_ratios(model, inputs, arguments.max_new_tokens, 2)
            ratios = paired_ratios(model, inputs, arguments.max_new_tokens, arguments.pairs)
            same = [
                timed_run(model, inputs, arguments.max_new_tokens, NoMarks())
                / timed_run(model, inputs, arguments.max_new_tokens, NoMarks())
                for _ in range(arguments.pairs)
            ]
        quartiles = statistics.quantiles(ratios, n=4)
        noise = statistics.quantiles(same, n=4)
        print(
            f"{target.label}: marked / unmarked = {quartiles[1]:.4f} (quartiles {quartiles[0]:.4f} to "
            f"{quartiles[2]:.4f}, {arguments.pairs} pairs); unmarked / unmarked = {noise[1]:.4f} "
            f"({noise[0]:.4f} to {noise[2]:.4f})",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(run_command(main))
