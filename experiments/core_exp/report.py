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
from experiment_core_utils.primitives.files import check_writable
from experiments.analyses.report.page import write_report


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = OneLineParser(prog="report.py", description="Write a report of a profiling run as one HTML page.")
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
    add_knob_module(parser)
    return parser


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Write the report. Exit code: 0 written, 1 the results are broken or cannot be written, 2 a flag is wrong."""
    given = build_parser().parse_args(argv)
    output = given.output or (given.output_dir or given.results_dirs[0]) / "report.html"
    check_writable(output)
    write_report(given.results_dirs, output)
    print(output)


if __name__ == "__main__":
    sys.exit(run_command(main))
