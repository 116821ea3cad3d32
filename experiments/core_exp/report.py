"""A report of a run as one HTML page that needs no server and no network: load, analyse, write.

python experiments/core_exp/report.py RESULTS_DIR [--output report.html]

See docs/core_exp/report.md.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser, add_knob_module
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import check_writable
from experiments.analyses.report.page import write_report
from experiments.analyses.report.watch import watch


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = OneLineParser(
        prog="report.py",
        description="Write a report of a profiling run as one HTML page.",
        examples=(
            "knobprof report results/core_exp",
            "knobprof report results/before results/after --output both.html",
        ),
    )
    parser.add_argument(
        "results_dirs",
        type=Path,
        nargs="+",
        metavar="RESULTS_DIR",
        help="--output_dir of a profiling run; several are read as one sweep, or compared where they are not one",
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--output_dir", type=Path, metavar="DIR",
                       help="folder of report.html (default: the first RESULTS_DIR)")  # fmt: skip
    place.add_argument("--output", type=Path, metavar="FILE", help="the page itself, under another name")
    parser.add_argument("--watch", action="store_true",
                        help="while a run is at work in RESULTS_DIR, show what it has so far, after each change; write "
                        "the report when it has ended")  # fmt: skip
    parser.add_argument("--budget_ms", type=float, metavar="MS",
                        help="latency budget: a line in the front, and how well the estimator keeps budgets "
                        "(default: none)")  # fmt: skip
    add_knob_module(parser)
    return parser


@reporting_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Write the report. Exit code: 0 written, 1 the results are broken or cannot be written, 2 a flag is wrong, 130
    watching was stopped.
    """
    flags = build_parser().parse_args(argv)
    output = flags.output or (flags.output_dir or flags.results_dirs[0]) / "report.html"
    if flags.watch and len(flags.results_dirs) > 1:
        raise ConfigurationError("--watch is for one RESULTS_DIR; give one, or leave --watch")
    if flags.budget_ms is not None and not flags.budget_ms > 0:
        raise ConfigurationError(f"--budget_ms is {flags.budget_ms:g}; give a time above 0 ms")
    check_writable(output)
    if flags.watch:
        print(f"watching {flags.results_dirs[0]}: {output} (Ctrl-C ends this)", flush=True)
        try:
            watch(flags.results_dirs[0], output)
        except KeyboardInterrupt:
            print(f"no longer watching; the page stays as it is: {output}", file=sys.stderr)
            return 130
    write_report(flags.results_dirs, output, flags.budget_ms)
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
