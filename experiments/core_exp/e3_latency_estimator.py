"""E3, a latency estimator from a run's folder: load, fit, validate on settings left out, write.

python experiments/core_exp/e3_latency_estimator.py RESULTS_DIR [--output_dir DIR] [--target_dir OTHER_RESULTS]

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
from experiment_core_utils.primitives.files import write_json_atomically, write_text_atomically
from experiments.analyses.charts.latency_charts import latency_charts
from experiments.analyses.charts.style import caption_of
from experiments.analyses.files import AnalysisFiles, Steps, add_output_flags, finding_lines
from experiments.analyses.latency.analysis import analyse_latency, budget_sentences, prediction_sentences
from experiments.analyses.latency.estimator import LEVEL
from experiments.analyses.latency.recalibration import (
    refuse_other_model,
    study_by_order,
    study_of_synthetic,
    study_of_target,
)
from experiments.analyses.latency.records import closing_lines, predictions_csv, validation_fields
from experiments.analyses.sweeps import load_sweep, runs_frame, samples_frame


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = OneLineParser(prog="e3_latency_estimator.py", description="Fit and validate a latency estimator.")
    parser.add_argument("results_dir", type=Path, metavar="RESULTS_DIR", help="folder of a profiling run")
    add_output_flags(parser, "RESULTS_DIR/analysis")
    parser.add_argument(
        "--target_dir", type=Path, help="run of the same model on another device, for the error of recalibration"
    )
    parser.add_argument("--level", type=float, default=LEVEL, help="level of the prediction intervals")
    return parser


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run the analysis. Exit code: 0 written, 1 the results are broken or too few, 2 the request is not possible."""
    given = build_parser().parse_args(argv)
    output_dir = given.output_dir or given.results_dir / "analysis"
    steps = Steps()
    sweep = load_sweep(given.results_dir)
    target = None if given.target_dir is None else load_sweep(given.target_dir)
    if target is not None:
        refuse_other_model(sweep, target)
    count = len(sweep.settings)
    steps.say(count, f"{count} settings are read; the estimator is fitted, and validated on settings left out")
    found = analyse_latency(samples_frame(sweep), given.level, runs_frame(sweep))
    samples, estimator, validation, curve = found.samples, found.estimator, found.validation, found.curve
    if target is None:
        studies = [study_by_order(sweep, samples, given.level), study_of_synthetic(samples, given.level)]
    else:
        studies = [study_of_target(estimator, sweep, target)]
    estimator.save(output_dir / "e3_latency_estimator.json")
    steps.say(count, "files and pictures are written")
    left_out = [] if found.left_out is None else [found.left_out]
    entries = validation_fields(sweep, samples, estimator, validation, studies, curve, left_out)
    write_json_atomically(entries, output_dir / "e3_validation.json")
    write_text_atomically(predictions_csv(samples, validation), output_dir / "e3_predictions.csv")
    drift = entries["control_drift"]
    charts = latency_charts(samples, validation, curve, studies, drift["mean_deviation"] if drift else None)
    caption = caption_of([sweep.provenance], count, len(samples))
    own = ("e3_latency_estimator.json", "e3_validation.json", "e3_predictions.csv")
    written = [*(output_dir / name for name in own), *AnalysisFiles({}, {}, charts, caption).write(output_dir)]
    findings = [*prediction_sentences(found), *budget_sentences(found)]
    findings += [f"caveat: {each}" for each in entries["caveats"]]
    details = [*closing_lines(estimator, validation, studies, curve)]
    print("\n".join(finding_lines(findings, details, written, given.verbose)))


if __name__ == "__main__":
    sys.exit(run_command(main))
