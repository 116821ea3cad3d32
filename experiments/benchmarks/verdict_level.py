"""How often each word that is printed is wrong, of every quantity in every world.

python -m experiments.benchmarks.verdict_level [--repetitions 200] [--processes 16] [--page PAGE]
"""

import sys
from pathlib import Path

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiments.benchmarks.verdict_words import cells_of, table_lines, write_page


def main() -> int:
    """Print the table of all words; 1 where a cell is beyond what is promised by more than chance."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="the cases that showed faults, few samples")
    parser.add_argument("--repetitions", type=int, default=200, help="runs of each case (default: 200)")
    parser.add_argument("--processes", type=int, default=1, help="processes that share the runs")
    parser.add_argument("--page", type=Path, help="the page in which the table is replaced")
    flags = parser.parse_args()
    cells = cells_of(flags.repetitions, flags.seed, flags.processes, is_small=flags.small)
    for line in table_lines(cells):
        print(line)
    if flags.page is not None:
        write_page(cells, flags.page)
    beyond = [cell for cell in cells if cell.is_beyond]
    for cell in beyond:
        where = f"{cell.table}, {cell.world}, {cell.num_samples} samples"
        print(f"beyond chance: {where}, {cell.column}: {cell.percent:.1f} %")
    return int(bool(beyond))


if __name__ == "__main__":
    sys.exit(run_command(main))
