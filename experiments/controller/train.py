"""Train the two-stage controller on a replay of a measured grid.

knobprof controller train --grid results/grid --controller_dir results/controller
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import write_json_atomically
from experiment_core_utils.primitives.units import LARGEST_SEED, MOST_TIMES, check_fraction, check_within
from experiment_core_utils.records.journal import only_run_in
from experiment_core_utils.records.ledger import PARTS_FOLDER
from experiment_core_utils.records.locks import RunLock
from experiments.controller.training.expected import UpdateRecipe
from experiments.controller.training.jobs import open_job
from experiments.controller.training.replay_environment import RewardRecipe
from experiments.controller.training.run import CHECKPOINT, TrainingPlan, TrainingRun, start_of
from experiments.controller.training.summary import TensorboardCurves, summary_of, summary_writer, write_curves

SUMMARY = "training.json"
# For networks that were taught before, by a warm start or another training: not far away from that, because a grid has
# too few samples to distinguish luck from what requests show.
CAREFUL = UpdateRecipe(entropy_weight=0.02, kl_weight=0.1, learning_rate=1e-3)
# Fields of the recipes, each a flag of its name.
OF_START = ("entropy_weight", "kl_weight", "learning_rate")
UPDATE_FLAGS = {
    "asks_per_update": "requests in an update",
    "epochs": "optimisation steps on the same requests",
    "entropy_weight": "weight of the entropy bonus, which falls to 0",
    "kl_weight": "weight of the KL divergence from the start",
    "learning_rate": "learning rate of Adam",
    "max_grad_norm": "largest norm of a gradient",
}
REWARD_FLAGS = {"latency_weight": "weight of latency / budget", "over_budget_penalty": "reward lost over the budget"}


def build_parser() -> argparse.ArgumentParser:
    """The program's own flags; all others go to the profiler's configuration."""
    parser = OneLineParser(
        prog="train.py",
        description="Train the two-stage controller.",
        examples=("knobprof controller train --grid results/grid --controller_dir controller",),
    )
    add = parser.add_argument
    add("--environment", choices=("replay",), default="replay", help="what answers choices: a measured grid")
    add("--controller_dir", type=Path, required=True, metavar="DIR", help="folder of checkpoint, curves and summary")
    add("--grid", type=Path, nargs="+", required=True, metavar="RESULTS", help="results of a full grid of settings")
    add("--states", type=Path, metavar="FILE", help="recorded states, made if the file is missing (default: states.pt "
        "in --controller_dir)")  # fmt: skip
    add("--calibration_share", type=float, default=0.5, metavar="FRACTION",
        help="fraction of the grid's pictures to train on; the others are held out")  # fmt: skip
    add("--split_seed", type=int, default=0, help="seed of that split, as in evaluate_controller")
    add("--num_budgets", type=int, default=16, metavar="N", help="number of latency budgets")
    add = parser.add_argument_group("the objective and its updates").add_argument
    add("--objective", choices=("expected",), default="expected",
        help="what an update raises: the expected reward over all choices, which tables give exactly")  # fmt: skip
    add("--updates", type=int, default=500, help="number of training updates")
    for recipe, texts in ((UpdateRecipe(), UPDATE_FLAGS), (RewardRecipe(), REWARD_FLAGS)):
        for name, text in texts.items():
            default = getattr(recipe, name)
            # Of those that depend on the start, None says that the flag was not given.
            careful = f"; {getattr(CAREFUL, name)} with a warm start or --init_from" if name in OF_START else ""
            add(f"--{name}", type=type(default), default=None if name in OF_START else default,
                help=f"{text} (default: {default}{careful})")  # fmt: skip
    add = parser.add_argument_group("the start, seeds and checkpoints").add_argument
    add(
        "--warm_start",
        choices=("none", "per_budget"),
        help="teach first what is best in the tables at a budget (default: per_budget without --init_from, else none)",
    )
    add("--warm_start_steps", type=int, default=300, help="steps of --warm_start")
    add("--init_from", type=Path, metavar="CHECKPOINT", help="start with the networks of another training")
    add("--training_seed", type=int, default=0, help="seed of weights, requests and draws")
    add("--checkpoint_every", type=int, default=50, metavar="N", help="updates between two checkpoints")
    add("--resume", action="store_true", help="resume from the checkpoint in --controller_dir")
    add("--tensorboard", action="store_true", help="write the curves for TensorBoard, too")
    return parser


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Train a controller. Exit code: 0 done, 1 files do not allow it, 2 a flag is wrong."""
    flags, rest = build_parser().parse_known_args(argv)
    train(flags, rest)


def plan_of(flags: argparse.Namespace) -> TrainingPlan:
    """The plan of the training; raises ConfigurationError for values that are not possible."""
    for name in ("checkpoint_every", "warm_start_steps"):
        check_within(f"--{name}", getattr(flags, name), 1, MOST_TIMES)
    for name in ("split_seed", "training_seed"):
        check_within(f"--{name}", getattr(flags, name), 0, LARGEST_SEED)
    check_fraction("--calibration_share", flags.calibration_share)
    is_warm = flags.init_from is None if flags.warm_start is None else flags.warm_start != "none"
    start = CAREFUL if is_warm or flags.init_from is not None else UpdateRecipe()
    recipe = replace(start, **{name: value for name in UPDATE_FLAGS if (value := getattr(flags, name)) is not None})
    reward = RewardRecipe(flags.latency_weight, flags.over_budget_penalty)
    return TrainingPlan(recipe, reward, flags.updates, flags.training_seed, flags.warm_start_steps * is_warm)


def train(flags: argparse.Namespace, rest: Sequence[str]) -> None:
    """Train and write all results.

    Raises:
        ResultsRefused: another training is at work in the folder.
    """
    plan, folder = plan_of(flags), flags.controller_dir
    checkpoint = folder / CHECKPOINT
    if checkpoint.exists() and not flags.resume:
        raise ConfigurationError(f"{checkpoint} already exists; add --resume to resume from it, or give another folder")
    if flags.resume and not checkpoint.exists():
        raise ConfigurationError(
            f"there is no {checkpoint} to resume from; drop --resume to start a new training, or give its folder"
        )
    started = time.perf_counter()
    writer = summary_writer() if flags.tensorboard else None
    with only_run_in(folder / PARTS_FOLDER) as lock:
        job = open_job(flags, rest, plan)
        if not checkpoint.exists():
            job.run_warm_start(plan)
        run = TrainingRun(job.networks, job.environment, plan, start_of(flags.init_from))
        if checkpoint.exists():
            run.resume(checkpoint)
        opened_s, done = time.perf_counter() - started, len(run.rows)
        curves = None if writer is None else TensorboardCurves(writer, folder, run.rows)
        run_updates(run, flags.checkpoint_every, folder, job.caption, curves, lock)
        trained_s = time.perf_counter() - started - opened_s
        spent = {"opened_s": opened_s, "trained_s": trained_s, "updates": len(run.rows) - done}
        content = summary_of(job, run, spent)
        write_json_atomically(content, folder / SUMMARY)
        for part in content["parts"]:
            values = (f"{name} {value:.3f}" if isinstance(value, float) else str(value) for name, value in part.items())
            print(", ".join(values))


def run_updates(
    run: TrainingRun, every: int, folder: Path, caption: str, curves: TensorboardCurves | None, lock: RunLock
) -> None:
    """Run all remaining updates, with a checkpoint and the curves after each `every` of them and at the end.

    Raises:
        ResultsNotSaved: the disk does not take a file, or the lock of the folder was removed or moved.
    """
    if run.is_finished:
        # It may have been stopped between its last checkpoint and the curves.
        write_curves(run.rows, folder, caption)
    while not run.is_finished:
        row = run.step()
        lock.refresh()
        if curves is not None:
            curves.add(row)
        if len(run.rows) % every == 0 or run.is_finished:
            run.save(folder / CHECKPOINT)
            write_curves(run.rows, folder, caption)
            if curves is not None:
                curves.flush()
            print(
                f"update {len(run.rows)}/{run.plan.updates}: reward {row['reward']:.3f}, "
                f"accuracy {row['accuracy']:.3f}, latency {row['latency_ms']:.1f} ms, "
                f"over the budget {row['violation_rate']:.3f}"
            )


if __name__ == "__main__":
    sys.exit(run_command(main))
