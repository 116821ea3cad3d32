"""Answer a user's question from a finished run, and measure nothing: what an accepted loss of accuracy saves, and what
fits into a budget, by type of question.

knobprof choose results/core_exp --accept_loss 0.05
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser, add_flags, add_knob_module
from experiment_core_utils.config.parts import QuestionConfig, validated_as
from experiments.analyses.knobs.conclusion import answered, invalid_tasks
from experiments.analyses.knobs.grid import load_study


@reporting_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Print the prices of each task. Exit code: 0 done, 1 the files do not allow it, 2 a flag is wrong."""
    parser = OneLineParser(
        prog="choose.py",
        description="Choose a setting of a finished run by what may be lost or paid.",
        examples=(
            "knobprof choose results/core_exp --accept_loss 0.05",
            "knobprof choose results/core_exp --budget_p95_ms 200 --json",
        ),
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS_DIR",
                        help="--output_dir of a run (several: one sweep), or tables of a full grid")  # fmt: skip
    add_flags(parser, QuestionConfig, "the question")
    parser.add_argument("--json", action="store_true", help="print the prices as JSON")
    add_knob_module(parser)
    flags: argparse.Namespace = parser.parse_args(argv)
    asked = {name: value for name, value in vars(flags).items() if name in QuestionConfig.model_fields}
    question = validated_as(QuestionConfig, asked, lambda location: f"--{location[0]}")
    study = load_study(flags.results)
    void = invalid_tasks(study.grids, [setting for sweep in study.sweeps for setting in sweep.settings])
    found = [answered(grid, question, void.get(grid.task)) for grid in study.grids]
    if flags.json:
        print(json.dumps([asdict(each) for each in found], indent=1))
        return 0
    for each in found:
        lines = [void[each.task]] if each.task in void else each.lines
        print("\n".join([*([f"{each.task}:"] if len(found) > 1 else []), *lines]))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
