# PYTHON_ARGCOMPLETE_OK
"""The command `knobprof`: every job of the project by one name.

knobprof profile --tier_list low high --top_k_list 4 8 --num_samples 16
knobprof results/core_exp
knobprof report results/core_exp

Each subcommand runs the `main` of a published command, with its flags and exit codes; only that command is imported.
Over several processes: `torchrun --nproc-per-node=2 -m knob_profiler profile ...`, or `accelerate launch -m`.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from experiment_core_utils import __version__
from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import PROGRAM, OneLineParser
from experiment_core_utils.primitives.errors import ConfigurationError, ProfilerError


@dataclass(frozen=True)
class Command:
    """A subcommand: the module whose `main` it runs, and one line of help."""

    module: str
    help: str

    def main(self, argv: Sequence[str]) -> int:
        """Run it. Exit code: its own."""
        code: int | None = import_module(self.module).main(argv)
        return code or 0


@dataclass(frozen=True)
class Group:
    """Subcommands under one name."""

    commands: "Mapping[str, Command | Group]"
    help: str
    examples: Sequence[str] = ()


COMMANDS = Group(
    {
        "profile": Command(
            "experiments.core_exp.acc_lat_profiling", "measure accuracy and stage latency under the knobs"
        ),
        "datasets": Command("experiments.core_exp.multi_datasets", "profile several datasets, one after the other"),
        "text": Command("experiments.text_exp.run_text_generation", "measure text generation of a language model"),
        "status": Command("experiment_core_utils.planning.status", "how far a run has come, and what it comes to"),
        "report": Command("experiments.core_exp.report", "one HTML page about a run"),
        "analyse": Group(
            {
                "stages": Command("experiments.core_exp.e1_stage_latency", "which stage takes the time (E1)"),
                "knobs": Command("experiments.core_exp.e2_knob_pareto", "conclusion, front, effects of the knobs (E2)"),
                "latency": Command("experiments.core_exp.e3_latency_estimator", "a latency estimator (E3)"),
            },
            "analyses of a run: stages, knobs, latency",
            ("knobprof analyse stages results/core_exp", "knobprof analyse knobs results/core_exp --percentile 99"),
        ),
        "choose": Command(
            "experiments.core_exp.choose", "what an accepted loss of accuracy saves, and what fits into a budget"
        ),
        "compare": Command("experiments.core_exp.compare_runs", "what is faster, slower or the same in another run"),
        "verify": Command(
            "experiments.core_exp.verify_run", "whether results, tables and conclusion are what the run wrote"
        ),
        "export": Command("experiments.core_exp.export", "write a run in the layout of lm-eval or lmms-eval"),
        "tables": Command("experiments.core_exp.write_tables", "write the CSV files of a run again"),
        "collect": Command(
            "experiments.core_exp.collect_table", "measure a full grid, and write it as one small table"
        ),
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
            (
                "knobprof controller lookup build results/core_exp --output lookup.json",
                "knobprof controller lookup predict lookup.json --budget_ms 100 200",
            ),
        ),
        "convolutions": Group(
            {
                "profile": Command("experiments.performance_prediction.run_profile", "profile networks by algorithm"),
                "predict": Command("experiments.performance_prediction.predict", "predict latency from profiles"),
                "status": Command("experiments.performance_prediction.profile_status", "how far the stages have come"),
                "check": Command(
                    "experiments.performance_prediction.check_gpu", "whether this GPU's results are right"
                ),
            },
            "convolution algorithms in whole networks",
            (
                "knobprof convolutions profile --model vgg16 --algorithm gemm --test",
                "knobprof convolutions predict fit results --output latency_model.json",
            ),
        ),
        "blocks": Command(
            "experiments.block_importance.score_blocks", "score a model's transformer blocks, or choose sets of them"
        ),
        "endpoint": Group(
            {
                "check": Command(
                    "experiment_core_utils.models.endpoint.check_command", "what a server does, in ten seconds"
                )
            },
            "servers of --endpoint",
            ("knobprof endpoint check http://localhost:8000/v1",),
        ),
        "meters": Command("experiment_core_utils.meters.__main__", "what measures energy on this machine"),
    },
    "Accuracy, latency, FLOPs, memory and energy of model inference under run-time knobs.",
    (
        "knobprof profile --num_samples 64 --output_dir results/first     # the model that comes with the project",
        "knobprof profile --model_path MODEL --data_file my.jsonl --dry_run",
        "knobprof report results/first                                    # one HTML page about it",
    ),
)


# Words that name no command, and which one does what they say.
ELSEWHERE = {"conclusion": "knobprof analyse knobs RESULTS_DIR prints the conclusion of a run"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Exit code: that of the command; 2 where there is none of that name, or none is given, which
    prints the help.
    """
    name, found, rest = found_command(sys.argv[1:] if argv is None else argv)
    if isinstance(found, Group) and not rest:
        group_parser(name, found).print_help()
        return 2
    if isinstance(found, Group):
        try:
            if found is COMMANDS and rest[0] in ELSEWHERE:
                raise ConfigurationError(f"there is no command {rest[0]!r}; {ELSEWHERE[rest[0]]}")
            group_parser(name, found).parse_args(rest)
        except ProfilerError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        return 0
    token = PROGRAM.set(name)
    try:
        return found.main(rest)
    finally:
        PROGRAM.reset(token)


def found_command(words: Sequence[str]) -> tuple[str, Command | Group, list[str]]:
    """Name, subcommand or group of subcommands that the first words name, and the words that are left.

    A folder in place of a command asks for its status, which proposes the next question.
    """
    found: Command | Group = COMMANDS
    names, rest = ["knobprof"], list(words)
    if rest and rest[0] not in COMMANDS.commands and Path(rest[0]).is_dir():
        rest.insert(0, "status")
    while isinstance(found, Group) and rest and rest[0] in found.commands:
        names.append(rest.pop(0))
        found = found.commands[names[-1]]
    return " ".join(names), found, rest


def group_parser(program: str, group: Group) -> OneLineParser:
    """Lists the subcommands, gives the version, and refuses every other word."""
    parser = OneLineParser(prog=program, description=group.help, examples=group.examples)
    parser.add_argument("-V", "--version", action="version", version=f"knobprof {__version__}")
    commands = parser.add_subparsers(required=True, description=f"{program} COMMAND --help shows the flags of one")
    for name, each in group.commands.items():
        commands.add_parser(name, help=each.help)
    return parser


def console() -> None:
    """The installed script; where a shell asks what may stand at the cursor, it answers that instead."""
    if "_ARGCOMPLETE" in os.environ and find_spec("argcomplete") is not None:
        import_module("knob_profiler.completion").complete()
    sys.exit(run_command(main))


if __name__ == "__main__":
    console()
