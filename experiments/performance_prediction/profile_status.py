"""How far profiles have come: a line for each combination below a results folder.

knobprof convolutions status [RESULTS]
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.csv_tables import read_table_file
from experiment_core_utils.primitives.texts import printable


def status_lines(results: Path) -> Iterator[str]:
    """One line for each folder of a stage, in the order of their names; a folder without a table has started."""
    for folder in sorted(path for path in results.glob("[123]_*/*") if path.is_dir()):
        where = folder.relative_to(results)
        tables = sorted(folder.glob("*_overall.csv"))
        if not tables:
            yield f"{where}: no size done yet"
        for table in tables:
            yield f"{where}: {_state_of(table)}"


def _state_of(table: Path) -> str:
    rows = read_table_file(table)
    if not rows:
        return "no size done yet"
    requested = rows[-1]["sizes_asked"]
    statuses = Counter(str(row["status"]) for row in rows)
    counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
    state = "done" if isinstance(requested, int) and len(rows) >= requested else "not done"
    return f"{len(rows)} of {requested} sizes ({counts}), {state}; last at {rows[-1]['timestamp']}"


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Print the status. Exit code: 0, 1 where a table cannot be read, 2 where a flag is wrong."""
    parser = OneLineParser(
        prog="profile_status.py",
        description="Show how far profiles of convolutions have come.",
        examples=("knobprof convolutions status", "knobprof convolutions status results/h100"),
    )
    parser.add_argument(
        "results", nargs="?", type=Path, default=Path("results"), metavar="DIR", help="folder of the stages"
    )
    results = parser.parse_args(argv).results
    lines = list(status_lines(results))
    print("\n".join(map(printable, lines)) or f"nothing in {results} yet")


if __name__ == "__main__":
    sys.exit(run_command(main))
