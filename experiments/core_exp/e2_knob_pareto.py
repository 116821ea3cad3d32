"""E2, what the knobs buy: fronts of accuracy against latency, energy and operations, and how the knobs depend on one
another. Reads runs' folders, writes three JSON files, CSV files and figures.

python experiments/core_exp/e2_knob_pareto.py results/core_exp
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from matplotlib.figure import Figure

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.units import LARGEST_SEED, check_within
from experiments.analyses.charts.knob_figures import draw_coupling, draw_effects, draw_fronts
from experiments.analyses.files import AnalysisFiles, Steps
from experiments.analyses.knobs.analysis import NUM_DRAWS, analyse_knobs
from experiments.analyses.knobs.coupling import moving_knobs
from experiments.analyses.knobs.grid import load_study
from experiments.analyses.knobs.objectives import ENERGY, FLOPS, LATENCY_MEAN, LATENCY_P95, LATENCY_P99, Cost
from experiments.analyses.knobs.records import (
    Shared,
    TaskAnalysis,
    caveats_of,
    coupling_content,
    coupling_rows,
    effect_rows,
    front_rows,
    fronts_content,
    grid_content,
    present,
)

TAIL_LATENCIES = {95: LATENCY_P95, 99: LATENCY_P99}


def analyse(
    results: Sequence[Path], output_dir: Path, percentile: int = 95, num_draws: int = NUM_DRAWS, seed: int = 0
) -> list[Path]:
    """Load, compute and write; returns the files.

    Raises:
        ResultsError: no results, broken ones, or ones of different sweeps.
        ResultsNotSaved: the disk does not take a file.
    """
    steps = Steps()
    study = load_study(results)
    count = sum(len(grid.points) for grid in study.grids)
    steps.say(count, f"{count} settings are read; fronts, couplings and effects are computed")
    costs = (TAIL_LATENCIES[percentile], LATENCY_MEAN, ENERGY, FLOPS)
    found = analyse_knobs(study.grids, costs, num_draws, seed)
    analyses = found.tasks
    steps.say(count, "figures are drawn")
    shared = Shared(study.source, num_draws, seed)
    contents = {
        "e2_knob_grid_results": grid_content(shared, analyses, caveats_of(analyses, study.random_weights)),
        "e2_pareto_frontiers": fronts_content(shared, analyses, found.differences),
        "e2_coupling_analysis": coupling_content(shared, analyses),
    }
    tables = {
        "e2_fronts": front_rows(analyses),
        "e2_fixed_knobs": coupling_rows(analyses),
        "e2_effects": effect_rows(analyses),
    }
    return AnalysisFiles(contents, tables, draw(analyses, costs, study.caption)).write(output_dir)


def draw(analyses: Sequence[TaskAnalysis], costs: Sequence[Cost], caption: str) -> Mapping[str, Figure]:
    """The figures: fronts for each cost, of all tasks; for each task one of coupling and one of effects."""
    figures = {}
    for of in costs:
        panels = [each for analysis in analyses for each in present(analysis) if each.found.of.name == of.name]
        if panels:
            figures[f"e2_front_{of.name}"] = draw_fronts(panels, caption)
    for analysis in analyses:
        found = present(analysis)
        if found and moving_knobs(found[0].found):
            task = analysis.grid.task
            shown = caption if len(analyses) == 1 else f"{task.replace('_', ' ')} of:  {caption}"
            if found[0].front.hypervolume.value > 0:
                figures[f"e2_coupling_{task}"] = draw_coupling(found[0], shown)
            figures[f"e2_effects_{task}"] = draw_effects(analysis, shown)
    return figures


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run the analysis. Exit code: 0 done, 1 the files do not allow it, 2 a flag is wrong."""
    parser = OneLineParser(prog="e2_knob_pareto.py", description="What the knobs of a sweep buy, and how they depend.")
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS_DIR",
                        help="--output_dir of a run (several: one sweep), or a table of a full grid")  # fmt: skip
    parser.add_argument("--output_dir", type=Path, metavar="DIR", help="default: analysis in the first")
    parser.add_argument("--percentile", type=int, choices=sorted(TAIL_LATENCIES), default=95,
                        help="percentile of the end-to-end latency (default: 95)")  # fmt: skip
    parser.add_argument("--num_draws", type=int, default=NUM_DRAWS, metavar="B",
                        help=f"number of paired resamples for the intervals ({NUM_DRAWS})")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the resamples (default: 0)")
    given: argparse.Namespace = parser.parse_args(argv)
    # All draws are held in memory at the same time.
    check_within("--num_draws", given.num_draws, 100, 100_000)
    check_within("--seed", given.seed, 0, LARGEST_SEED)
    first = given.results[0]
    folder = given.output_dir or (first.parent if first.is_file() else first) / "analysis"
    for path in analyse(given.results, folder, given.percentile, given.num_draws, given.seed):
        print(path)


if __name__ == "__main__":
    sys.exit(run_command(main))
