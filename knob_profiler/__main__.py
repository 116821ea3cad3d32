"""The command `knobprof`: every job of the project by one name.

knobprof profile --tier_list low high --top_k_list 4 8 --num_samples 16
knobprof report results/core_exp

Each subcommand runs the `main` of a published command, with its flags and exit codes; only that command is imported.
Over several processes: `torchrun --nproc-per-node=2 -m knob_profiler profile ...`, or `accelerate launch -m`.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import PROGRAM, OneLineParser
from experiment_core_utils.primitives.errors import ProfilerError

DISTRIBUTION = "inference-knob-profiler"


@dataclass(frozen=True)
class Command:
    """A subcommand: the module whose `main` it runs, and one line of help."""

    module: str
    help: str


@dataclass(frozen=True)
class Group:
    """Subcommands under one name."""

    commands: "Mapping[str, Command | Group]"
    help: str


COMMANDS = Group(
    {
        "profile": Command(
            "experiments.core_exp.acc_lat_profiling", "measure accuracy and stage latency under the knobs"
        ),
        "datasets": Command("experiments.core_exp.multi_datasets", "profile several datasets, one after the other"),
        "text": Command("experiments.text_exp.run_text_generation", "measure text generation of a language model"),
        "status": Command("experiment_core_utils.sweep.status", "how far a run has come"),
        "report": Command("experiments.core_exp.report", "one HTML page about a run"),
        "analyse": Group(
            {
                "stages": Command("experiments.core_exp.e1_stage_latency", "which stage takes the time (E1)"),
                "knobs": Command("experiments.core_exp.e2_knob_pareto", "fronts, and effects of the knobs (E2)"),
                "latency": Command("experiments.core_exp.e3_latency_estimator", "a latency estimator (E3)"),
            },
            "analyses of a run: stages, knobs, latency",
        ),
        "compare": Command("experiments.core_exp.compare_runs", "what is faster, slower or the same in another run"),
        "tables": Command("experiments.core_exp.write_tables", "write the CSV files of a run again"),
        "tasks": Command(
            "experiment_core_utils.saved_results.tasks_command",
            "list tasks, score stored answers again, compare settings of a run",
        ),
        "controller": Group(
            {
                "lookup": Command("experiments.controller.lookup", "the best measured setting for a budget"),
                "train": Command("experiments.controller.train", "train the two-stage controller"),
                "evaluate": Command("experiments.controller.evaluate_controller", "policies, at latency budgets"),
            },
            "knobs for each request within a latency budget",
        ),
        "convolutions": Group(
            {
                "profile": Command("experiments.performance_prediction.run_profile", "profile networks by algorithm"),
                "predict": Command("experiments.performance_prediction.predict", "predict latency from profiles"),
                "status": Command("experiments.performance_prediction.profile_status", "how far the stages have come"),
            },
            "convolution algorithms in whole networks",
        ),
        "blocks": Command(
            "experiments.block_importance.score_blocks", "score a model's transformer blocks, or choose sets of them"
        ),
        "meters": Command("experiment_core_utils.meters.__main__", "what measures energy on this machine"),
    },
    "Accuracy, latency, FLOPs, memory and energy of model inference under run-time knobs.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Exit code: that of the command; 2 where there is none of that name, or none is given, which
    prints the help.
    """
    found: Command | Group = COMMANDS
    words, rest = ["knobprof"], list(sys.argv[1:] if argv is None else argv)
    while isinstance(found, Group) and rest and rest[0] in found.commands:
        words.append(rest.pop(0))
        found = found.commands[words[-1]]
    if isinstance(found, Group) and not rest:
        _parser(" ".join(words), found).print_help()
        return 2
    if isinstance(found, Group):
        try:
            _parser(" ".join(words), found).parse_args(rest)
        except ProfilerError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        return 0
    token = PROGRAM.set(" ".join(words))
    try:
        code: int | None = import_module(found.module).main(rest)
    finally:
        PROGRAM.reset(token)
    return code or 0


def _parser(program: str, group: Group) -> OneLineParser:
    """Lists the subcommands, gives the version, and refuses every other word."""
    parser = OneLineParser(prog=program, description=group.help, epilog=f"{program} COMMAND --help shows its flags.")
    parser.add_argument("--version", action="version", version=f"knobprof {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands", parser_class=OneLineParser)
    for name, each in group.commands.items():
        commands.add_parser(name, help=each.help)
    return parser


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "of a checkout that is not installed"


def console() -> None:
    """The installed script."""
    sys.exit(run_command(main))


if __name__ == "__main__":
    console()
