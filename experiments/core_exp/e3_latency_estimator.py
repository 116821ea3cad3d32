"""E3, a latency estimator from the folders of runs: load, fit, validate on settings left out, write.

knobprof analyse latency RESULTS_DIR... [--output_dir DIR] [--target_dir OTHER_RESULTS]

Writes e3_latency_estimator.json (the model), e3_validation.json, e3_predictions.csv and pictures. See
docs/core_exp/e3_latency_estimator.md.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.texts import counted
from experiments.analyses.charts.latency_charts import latency_charts
from experiments.analyses.charts.style import caption_of
from experiments.analyses.files import AnalysisFiles, add_output_flags, finding_lines
from experiments.analyses.knobs.conclusion import invalid_lines, voiding_caveats
from experiments.analyses.latency.analysis import (
    analyse_latency,
    budget_sentences,
    prediction_sentences,
    recalibration_studies,
)
from experiments.analyses.latency.estimator import LEVEL
from experiments.analyses.latency.recalibration import refuse_other_model
from experiments.analyses.latency.records import contents_of, detail_lines, tables_of
from experiments.analyses.limits import Steps
from experiments.analyses.sweeps import load_sweep, samples_frame


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run the analysis. Exit code: 0 written, 1 the results are broken or too few, 2 the request is not possible."""
    parser = OneLineParser(
        prog="e3_latency_estimator.py",
        description="Fit and validate a latency estimator.",
        examples=(
            "knobprof analyse latency results/core_exp",
            "knobprof analyse latency results/h100 --target_dir results/a100",
        ),
    )
    parser.add_argument(
        "results_dirs",
        type=Path,
        nargs="+",
        metavar="RESULTS_DIR",
        help="folder of a profiling run; several are runs of the same settings on the same device",
    )
    add_output_flags(parser, "analysis in the first RESULTS_DIR")
    parser.add_argument(
        "--target_dir",
        type=Path,
        metavar="DIR",
        help="run of the same model on another device, for the error of recalibration",
    )
    parser.add_argument("--level", type=float, default=LEVEL, metavar="FRACTION", help="level of prediction intervals")
    flags: argparse.Namespace = parser.parse_args(argv)
    steps = Steps()
    sweep, *further = (load_sweep(folder) for folder in dict.fromkeys(map(Path.resolve, flags.results_dirs)))
    target = None if flags.target_dir is None else load_sweep(flags.target_dir)
    if target is not None:
        refuse_other_model(sweep, target)
    count = sum(len(run.settings) for run in (sweep, *further))
    steps.say(count, f"{counted(count, 'setting')} read; the estimator is fitted, and validated on settings left out")
    found = analyse_latency(sweep, samples_frame(sweep), flags.level, further)
    studies = recalibration_studies(sweep, found, target)
    steps.say(count, "files and pictures are written")
    caption = caption_of([run.provenance for run in (sweep, *further)], count, len(found.samples))
    files = AnalysisFiles(contents_of(sweep, found, studies), tables_of(found), latency_charts(found, studies), caption)
    written = files.write(flags.output_dir or flags.results_dirs[0] / "analysis")
    runs = [sweep, *further, *([] if target is None else [target])]
    voided_by = dict.fromkeys(sentence for run in runs for sentence in voiding_caveats(run.settings).values())
    caveats = (f"caveat: {caveat.sentence}" for caveat in found.caveats)
    findings = [*invalid_lines(voided_by), *prediction_sentences(found), *budget_sentences(found), *caveats]
    print("\n".join(finding_lines(findings, [*detail_lines(found, studies)], written, flags.verbose)))


if __name__ == "__main__":
    sys.exit(run_command(main))
