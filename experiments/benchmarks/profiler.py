"""What profiling costs: the same run without a profiler, under a minimal and under a full one, in turn, as ratios.

python -m experiments.benchmarks.profiler --rounds 15

Flags that are not this script's own go to the pipeline's configuration.
"""

import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.config.parts import ProfilerMode
from experiment_core_utils.engines.greedy import generate_greedily
from experiment_core_utils.measuring.profiles import new_profiler, stages_in_ranges
from experiment_core_utils.models.interface import Stages
from experiment_core_utils.primitives.device import NoMarks, synchronize
from experiments.benchmarks.shared import endless_model, first_inputs, parsed, quartiles, timed

# "again" is a second run without a profiler in each round: its ratio to the first is the noise of the others.
KINDS: Mapping[str, ProfilerMode | None] = {"none": None, "again": None, "minimal": "minimal", "full": "full"}


def timed_run(
    model: Stages, inputs: Mapping[str, Any], max_new_tokens: int, mode: ProfilerMode | None
) -> tuple[float, float]:
    """Seconds of the generation itself, and of all with the profiler's start and stop (writing files is not in it)."""
    stages = model if mode is None else stages_in_ranges(model)
    run = partial(timed, model.device, partial(generate_greedily, stages, inputs, max_new_tokens, NoMarks()))
    synchronize(model.device)
    started = time.perf_counter()
    with nullcontext() if mode is None else new_profiler(model.device, mode):
        run_s, _ = run()
    return run_s, run_s if mode is None else time.perf_counter() - started


def ratios_of_rounds(
    model: Stages, inputs: Mapping[str, Any], max_new_tokens: int, rounds: int
) -> dict[str, tuple[list[float], list[float]]]:
    """The ratio to the run without a profiler in each round: of the generation, and of all with start and stop.

    The order of the kinds turns by one from round to round.
    """
    ratios: dict[str, tuple[list[float], list[float]]] = {kind: ([], []) for kind in KINDS if kind != "none"}
    names = list(KINDS)
    for turn in tqdm(range(rounds), desc="rounds", leave=False):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        seconds = {name: timed_run(model, inputs, max_new_tokens, KINDS[name]) for name in order}
        for name, lists in ratios.items():
            for values, own, bare in zip(lists, seconds[name], seconds["none"], strict=True):
                values.append(own / bare)
    return ratios


def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--max_new_tokens", type=int, default=16)
    arguments, config = parsed(parser)
    model = endless_model(config)
    print(f"{model.name} on {model.device.type}, {torch.get_num_threads()} threads, {arguments.rounds} rounds:")
    print("ratios to a run without a profiler, median (quartiles): the generation | with the profiler's start and stop")
    for target in config.knobs.vision_targets:
        inputs = first_inputs(model, config.task, target)
        ratios_of_rounds(model, inputs, arguments.max_new_tokens, 2)
        for name, (run, whole) in ratios_of_rounds(model, inputs, arguments.max_new_tokens, arguments.rounds).items():
            label = "none, again" if name == "again" else name
            print(f"{target.label}: {label}: {quartiles(run, 3)} | {quartiles(whole, 3)}", flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
