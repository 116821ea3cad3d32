"""E1, where the time goes: fractions of the stages by regime, how each stage grows, operations against time, parts of
the decoder. Reads a run's folder, writes three JSON files, CSV files and figures.

knobprof analyse stages results/core_exp
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.texts import counted
from experiments.analyses.charts.stage_charts import stage_charts
from experiments.analyses.charts.style import caption_of
from experiments.analyses.files import AnalysisFiles, add_output_flags, finding_lines
from experiments.analyses.knobs.conclusion import invalid_lines, voiding_caveats
from experiments.analyses.limits import Steps
from experiments.analyses.stages.analysis import analyse_stages, stage_findings
from experiments.analyses.stages.records import contents_of, tables_of
from experiments.analyses.sweeps import load_sweep, samples_frame


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run the analysis. Exit code: 0 done, 1 the files do not allow it, 2 a flag is wrong."""
    parser = OneLineParser(
        prog="e1_stage_latency.py",
        description="Show where the time of a sweep goes, stage by stage.",
        examples=("knobprof analyse stages results/core_exp", "knobprof analyse stages results/core_exp --verbose"),
    )
    parser.add_argument("results_dir", type=Path, metavar="RESULTS_DIR", help="the --output_dir of a profiling run")
    add_output_flags(parser, "RESULTS_DIR/analysis")
    flags: argparse.Namespace = parser.parse_args(argv)
    steps = Steps()
    sweep = load_sweep(flags.results_dir)
    count = len(sweep.settings)
    steps.say(count, f"{counted(count, 'setting')} read; shares and lines are computed")
    found = analyse_stages(sweep, samples_frame(sweep))
    if found is None:
        raise ResultsError(
            f"{flags.results_dir} has no stages with times: all samples were answered in batches, or by a server; "
            "measure some here"
        )
    steps.say(count, "figures are drawn")
    caption = caption_of([sweep.provenance], count, len(found.generations))
    charts = stage_charts(found, sweep.provenance.peak_flops_per_s)
    files = AnalysisFiles(contents_of(sweep, found), tables_of(found), charts, caption)
    written = files.write(flags.output_dir or flags.results_dir / "analysis")
    findings = [*invalid_lines(voiding_caveats(sweep.settings).values()), *stage_findings(found)]
    print("\n".join(finding_lines(findings, (), written, flags.verbose)))


if __name__ == "__main__":
    sys.exit(run_command(main))
