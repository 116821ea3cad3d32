"""What answering in batches gains over one by one, and how many answers differ, tier by tier on the embedded model.

python -m experiments.benchmarks.accuracy_batches --num_samples 32 --batch_sizes 2 4 8

Both ways answer the same prepared requests, on the device already; the time of one by one is that of the stages without
marks. Best of the rounds, in turn. Flags that are not this script's own go to the pipeline's configuration.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from experiment_core_utils.b_model_loader import find_model, load_staged_model
from experiment_core_utils.c_prompt_processing import draw_samples, open_task
from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.models.common.greedy import generate_greedily
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.device import NoMarks, choose_device, set_cpu_threads
from experiments.benchmarks.shared import best_of_rounds

Answers = list[tuple[int, ...]]


def one_by_one(model: StagedModel, inputs: Sequence[Mapping[str, Any]], max_new_tokens: int) -> Answers:
    """The answers that the stages give each request alone."""
    return [generate_greedily(model, each, max_new_tokens, NoMarks()).token_ids for each in inputs]


def in_batches(model: StagedModel, inputs: Sequence[Mapping[str, Any]], max_new_tokens: int, size: int) -> Answers:
    """The answers in batches of `size` of like length, as the pipeline makes them, in the order of the requests."""
    order = sorted(range(len(inputs)), key=lambda place: inputs[place]["input_ids"].shape[1])
    answers: dict[int, tuple[int, ...]] = {}
    for at in range(0, len(order), size):
        places = order[at : at + size]
        answers.update(zip(places, model.answer_batch([inputs[each] for each in places], max_new_tokens), strict=True))
    return [answers[place] for place in range(len(inputs))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_samples", type=int, default=32)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    own, flags = parser.parse_known_args()
    config = parse_config(["--num_samples", str(own.num_samples), *flags])
    set_cpu_threads(config.machine.num_threads, 1)
    model = load_staged_model(config.model, find_model(config.model.model_path), choose_device(config.machine.device))
    task = open_task(config.task)
    steps = task.max_new_tokens if config.task.max_new_tokens is None else config.task.max_new_tokens
    samples = [task[sample_id] for sample_id in draw_samples(task, config.task).sample_ids]
    for target in config.knobs.vision_targets:
        requests = [model.prepare(sample, task.prompt(sample), target.crops) for sample in samples]
        inputs = [model.to_device(request.inputs) for request in requests]
        ways: dict[int, Callable[[], Answers]] = {1: partial(one_by_one, model, inputs, steps)}
        for size in own.batch_sizes:
            ways[size] = partial(in_batches, model, inputs, steps, size)
        best = best_of_rounds(model.device, ways, own.rounds)
        alone_s, alone = best.pop(1)
        for size, (seconds, answers) in best.items():
            differing = sum(one != other for one, other in zip(alone, answers, strict=True))
            print(
                f"{target.label}, batches of {size}: one by one / in batches = {alone_s / seconds:.2f}; "
                f"{differing} of {len(alone)} answers differ",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(run_command(main))
