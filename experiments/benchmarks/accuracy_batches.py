"""What answering in batches gains over one by one, and how many answers differ, on the embedded model.

python -m experiments.benchmarks.accuracy_batches --num_samples 32 --batch_sizes 2 4 8
python -m experiments.benchmarks.accuracy_batches --num_samples 8 --batch_sizes 8 --num_settings 1 4 8

Tier by tier; with `--num_settings` the questions want so many different settings in turn, and those of equal settings
are batched. Both ways answer the same prepared requests and put every setting in force that is wanted; one by one is
the stages without marks. Best of the rounds, in turn. Flags that are not this script's own go to the pipeline's
configuration.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial

from experiment_core_utils.b_model_loader import find_requested_checkpoint
from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.engines.greedy import generate_greedily
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import vision_of
from experiment_core_utils.measuring.batches import PreparedQuestion, answer_prepared, batches_of
from experiment_core_utils.models.interface import StagedModel, own_setting
from experiment_core_utils.planning.plan import max_new_tokens_of, plan_for
from experiment_core_utils.primitives.device import NoMarks
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.requests.drawing import draw_samples, open_task
from experiment_core_utils.tasks.prompt_forms import prompt_for
from experiments.benchmarks.shared import best_of_rounds, loaded_model, parsed

Answers = list[tuple[int, ...]]


def one_by_one(model: StagedModel, questions: Sequence[PreparedQuestion], max_new_tokens: int) -> Answers:
    """The answers that the stages give each question alone, at its setting."""
    answers = []
    with model.restored_afterwards():
        for each in questions:
            model.apply(each.setting)
            inputs = model.to_device(each.request.inputs)
            answers.append(generate_greedily(model, inputs, max_new_tokens, NoMarks()).token_ids)
    return answers


def settings_of(config: ProfilingConfig, count: int) -> tuple[Setting, ...]:
    """The first `count` settings of the requested grid; raises ConfigurationError where it has fewer."""
    settings = plan_for(config, find_requested_checkpoint(config))
    if count > len(settings):
        raise ConfigurationError(
            f"--num_settings {count} is more than the {len(settings)} settings of the grid; give fewer, or more values "
            "of the knobs"
        )
    return settings[:count]


def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--num_settings", type=int, nargs="+", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    own, config = parsed(parser, num_samples=32)
    model = loaded_model(config)
    task = open_task(config.task)
    steps = max_new_tokens_of(config.task, task)
    samples = [task[sample_id] for sample_id in draw_samples(task, config.task).sample_ids]
    cases = {f"{count} settings": settings_of(config, count) for count in own.num_settings} or {
        target.label: (own_setting(model).replaced(vision=target),) for target in config.knobs.vision_targets
    }
    print("| questions at | batch size | batches | one by one ms | in batches ms | one by one / in batches | "
          "answers that differ |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, settings in cases.items():
        asked = [(sample, prompt_for(task, sample, model.prompt_family)) for sample in samples]
        questions = [
            PreparedQuestion(model.prepare(*prompted, vision_of(each).bounds), each)
            for prompted, each in zip(asked, itertools.cycle(settings), strict=False)
        ]
        ways: dict[int, Callable[[], Answers]] = {1: partial(one_by_one, model, questions, steps)}
        for size in own.batch_sizes:
            ways[size] = partial(answer_prepared, model, questions, steps, size)
        answer_prepared(model, questions[:1], steps, 1)
        best = best_of_rounds(model.device, ways, own.rounds)
        alone_s, alone = best.pop(1)
        for size, (seconds, answers) in best.items():
            differing = sum(one != other for one, other in zip(alone, answers, strict=True))
            cells = (
                name, size, len(batches_of(questions, size)), f"{alone_s * 1e3:.1f}", f"{seconds * 1e3:.1f}",
                f"{alone_s / seconds:.2f}", f"{differing} of {len(alone)}",
            )  # fmt: skip
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
