"""What grouping gains for a batch whose samples want different settings: 1, 4 and all different, against one by one.

python -m experiments.benchmarks.grouped_batches --device cpu

Both ways answer the same prepared requests and put every setting in force that is wanted; one by one is the stages
without marks. Best of the rounds, in turn. Flags that are not this script's own go to the pipeline's configuration.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial

from experiment_core_utils.b_model_loader import find_model, load_staged_model
from experiment_core_utils.c_prompt_processing import draw_samples, open_task
from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.models.common.greedy import generate_greedily
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.device import NoMarks, choose_device, set_cpu_threads
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.knobs import KnobSetting, select_active_blocks, tier_target
from experiment_core_utils.sweep.batches import PreparedQuestion, answer_prepared, batches_of
from experiment_core_utils.sweep.plan import max_new_tokens_of
from experiments.benchmarks.accuracy_batches import Answers
from experiments.benchmarks.shared import best_of_rounds


def one_by_one(model: StagedModel, questions: Sequence[PreparedQuestion], max_new_tokens: int) -> Answers:
    """The answers that the stages give each question alone, at its setting."""
    answers = []
    with model.restored_afterwards():
        for each in questions:
            model.apply(each.setting)
            inputs = model.to_device(each.request.inputs)
            answers.append(generate_greedily(model, inputs, max_new_tokens, NoMarks()).token_ids)
    return answers


def settings_of(model: StagedModel, count: int) -> list[KnobSetting]:
    """The first `count` different settings: tiers change fastest, then blocks, then top-k.

    Raises:
        ConfigurationError: more than three tiers, two numbers of blocks and two of experts make.
    """
    total = model.num_total_blocks
    blocks = [select_active_blocks(each, total) for each in (total, -(-3 * total // 4))]
    own = model.default_top_k
    experts = (None,) if own is None else (own, max(own // 2, 1))
    grid = itertools.product(experts, blocks, ("low", "medium", "high"))
    settings = [KnobSetting(tier_target(tier), top_k, active) for top_k, active, tier in grid]
    if count > len(settings):
        raise ConfigurationError(f"{count} different settings are requested, {len(settings)} are there; ask for fewer")
    return settings[:count]


def compare(model: StagedModel, questions: Sequence[PreparedQuestion], max_new_tokens: int, rounds: int) -> str:
    """A line of the table."""
    ways: dict[str, Callable[[], Answers]] = {
        "alone": partial(one_by_one, model, questions, max_new_tokens),
        "grouped": partial(answer_prepared, model, questions, max_new_tokens, len(questions)),
    }
    best = best_of_rounds(model.device, ways, rounds)
    (alone_s, alone), (grouped_s, grouped) = best["alone"], best["grouped"]
    differing = sum(one != other for one, other in zip(alone, grouped, strict=True))
    num_settings = len({each.setting for each in questions})
    cells = (
        num_settings, len(batches_of(questions, len(questions))), f"{alone_s * 1e3:.1f}", f"{grouped_s * 1e3:.1f}",
        f"{alone_s / grouped_s:.2f}", f"{differing} of {len(alone)}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, default=8, help="questions per batch (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    own, flags = parser.parse_known_args()
    config = parse_config(["--num_samples", str(own.batch_size), *flags])
    set_cpu_threads(config.machine.num_threads, 1)
    model = load_staged_model(config.model, find_model(config.model.model_path), choose_device(config.machine.device))
    task = open_task(config.task)
    steps = max_new_tokens_of(config.task, task)
    samples = [task[sample_id] for sample_id in draw_samples(task, config.task).sample_ids]
    print("| settings | groups | one by one ms | grouped ms | one by one / grouped | answers that differ |")
    print("| --- | --- | --- | --- | --- | --- |")
    for count in sorted({1, min(4, len(samples)), len(samples)}):
        settings = itertools.cycle(settings_of(model, count))
        pairs = list(zip(samples, settings, strict=False))
        questions = [
            PreparedQuestion(model.prepare(sample, task.prompt(sample), each.vision.crops), each)
            for sample, each in pairs
        ]
        compare(model, questions[:1], steps, 1)
        print(compare(model, questions, steps, own.rounds), flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
