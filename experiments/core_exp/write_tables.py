"""Write the CSV files of settings and of samples for a folder of results, as a run does at its end.

knobprof tables results/core_exp
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser, add_knob_module
from experiment_core_utils.config.parts import TableFormat
from experiment_core_utils.l_results_csv_cleaning import samples_csv_beside
from experiment_core_utils.l_results_csv_cleaning import write_tables as write_task_tables
from experiments.analyses.sweeps import load_sweep


def write_tables(results_dir: Path, table_format: TableFormat = "csv") -> list[Path]:
    """Write two tables for each task, of all its saved settings, beside their files; returns the paths.

    Raises:
        ResultsError: no results, broken ones, or of several sweeps.
        ResultsNotSaved: the disk does not take a file.
    """
    sweep = load_sweep(results_dir)
    written = []
    for task in sweep.provenance.tasks:
        own = [setting for setting in sweep.settings if setting.task == task]
        settings_csv = write_task_tables([each.result for each in own], task, own[0].path.parent, table_format)
        written += [settings_csv, samples_csv_beside(settings_csv)]
    return written


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Write the tables. Exit code: 0 done, 1 the files do not allow it, 2 a flag is wrong."""
    parser = OneLineParser(
        prog="write_tables.py",
        description="Write the CSV files of settings and samples of a sweep.",
        examples=("knobprof tables results/core_exp", "knobprof tables results/core_exp --format parquet"),
    )
    parser.add_argument("results_dir", type=Path, metavar="RESULTS_DIR", help="the --output_dir of a profiling run")
    parser.add_argument(
        "--format", choices=get_args(TableFormat), default="csv", help="csv, or also Parquet (default: csv)"
    )
    add_knob_module(parser)
    flags = parser.parse_args(argv)
    for path in write_tables(flags.results_dir, flags.format):
        print(path)


if __name__ == "__main__":
    sys.exit(run_command(main))
