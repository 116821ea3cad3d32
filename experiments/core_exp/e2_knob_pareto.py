"""E2, what the knobs buy: fronts of accuracy against latency, energy and operations, and how the knobs depend on one
another. Reads runs' folders, writes three JSON files, CSV files and figures.

knobprof analyse knobs results/core_exp
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.errors import EXIT_CODE_INVALID
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.primitives.units import LARGEST_SEED, check_within
from experiments.analyses.charts.knob_charts import knob_study_charts
from experiments.analyses.files import AnalysisFiles, add_output_flags, finding_lines
from experiments.analyses.knobs.analysis import NUM_DRAWS, analyse_knobs
from experiments.analyses.knobs.conclusion import conclude, lines_of, why_invalid
from experiments.analyses.knobs.grid import load_study
from experiments.analyses.knobs.objectives import ENERGY, FLOPS, LATENCY_MEAN, TAIL_LATENCIES
from experiments.analyses.knobs.records import caveats_of, contents_of, tables_of
from experiments.analyses.limits import Steps


@reporting_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the analysis. Exit code: 0 done, 1 the files do not allow it, 2 a flag is wrong, 4 the run is INVALID and
    --strict was given.
    """
    parser = OneLineParser(
        prog="e2_knob_pareto.py",
        description="Show what the knobs of a sweep gain and cost.",
        examples=(
            "knobprof analyse knobs results/core_exp",
            "knobprof analyse knobs results/float32 results/bfloat16 --percentile 99",
        ),
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS_DIR",
                        help="--output_dir of a run (several are compared), or tables of a full grid")  # fmt: skip
    add_output_flags(parser, "analysis in the first RESULTS_DIR")
    parser.add_argument("--percentile", type=int, choices=sorted(TAIL_LATENCIES), default=95,
                        help="percentile of the end-to-end latency (default: 95)")  # fmt: skip
    parser.add_argument("--num_draws", type=int, default=NUM_DRAWS, metavar="N",
                        help=f"number of paired resamples for the intervals (default: {NUM_DRAWS})")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the resamples (default: 0)")
    parser.add_argument("--strict", action="store_true", help="exit code 4 where the run is INVALID")
    flags: argparse.Namespace = parser.parse_args(argv)
    # All draws are held in memory at the same time.
    check_within("--num_draws", flags.num_draws, 100, 100_000)
    check_within("--seed", flags.seed, 0, LARGEST_SEED)
    steps = Steps()
    study = load_study(flags.results)
    count = sum(len(grid.points) for grid in study.grids)
    steps.say(count, f"{counted(count, 'setting')} read; fronts, couplings and effects are computed")
    costs = LATENCY_MEAN, TAIL_LATENCIES[flags.percentile], ENERGY, FLOPS
    found = analyse_knobs(study.grids, costs, flags.num_draws, flags.seed)
    steps.say(count, "figures are drawn")
    caveats = caveats_of(found.tasks, study.random_weights)
    drawn = {"num_draws": flags.num_draws, "seed": flags.seed}
    contents = contents_of(study.source, drawn, found.tasks, found.differences, caveats)
    settings = [setting for sweep in study.sweeps for setting in sweep.settings]
    concluded = [conclude(task, settings) for task in found.tasks]
    charts = knob_study_charts(found.tasks, why_invalid(concluded))
    files = AnalysisFiles(contents, tables_of(found.tasks), charts, study.caption)
    first = flags.results[0]
    written = files.write(flags.output_dir or (first.parent if first.is_file() else first) / "analysis")
    shown = [f"caveat: {caveat.sentence}" for caveat in caveats]
    print("\n".join(finding_lines(lines_of(concluded), shown, written, flags.verbose)))
    return EXIT_CODE_INVALID if flags.strict and any(each.voided_by for each in concluded) else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
