"""What the measuring costs: the staged run with marks against the same run without, in turn, as a ratio of medians.

python -m experiments.benchmarks.marks --pairs 40
"""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import torch

from experiment_core_utils.config.command import run_command
from experiment_core_utils.models.common.greedy import generate_greedily
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.device import Marks, NoMarks, new_marks, set_cpu_threads
from experiments.benchmarks.shared import (
    add_model_flags,
    config_of,
    endless_model,
    first_inputs,
    paired_ratios,
    quartiles,
    timed,
)


def run(model: StagedModel, inputs: Mapping[str, Any], max_new_tokens: int, marks: Marks) -> None:
    """Run the stages, and read the marks."""
    generate_greedily(model, inputs, max_new_tokens, marks)
    marks.seconds()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--max_new_tokens", type=int, default=16)
    given = parser.parse_args()
    config = config_of(given)
    set_cpu_threads(None, 1)
    model = endless_model(config)
    for target in config.knobs.vision_targets:
        inputs = first_inputs(model, config.task, target)

        def marked(inputs: Mapping[str, Any] = inputs) -> float:
            return timed(model.device, lambda: run(model, inputs, given.max_new_tokens, new_marks(model.device)))[0]

        def unmarked(inputs: Mapping[str, Any] = inputs) -> float:
            return timed(model.device, lambda: run(model, inputs, given.max_new_tokens, NoMarks()))[0]

        with torch.inference_mode():
            paired_ratios(marked, unmarked, 2)
            ratios = paired_ratios(marked, unmarked, given.pairs)
            noise = paired_ratios(unmarked, unmarked, given.pairs)
        print(
            f"{target.label}: marked / unmarked = {quartiles(ratios)}, quartiles of {given.pairs} pairs; "
            f"unmarked / unmarked = {quartiles(noise)}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(run_command(main))
