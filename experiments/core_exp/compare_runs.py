"""Runs side by side: latency, energy and accuracy of the same settings in two folders or more, of other commits,
machines, precisions or models, each against the first.

python experiments/core_exp/compare_runs.py results/before results/after --fail_on_slower
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pandas as pd

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser, add_knob_module
from experiment_core_utils.primitives.files import check_writable, write_text_atomically
from experiment_core_utils.primitives.units import check_within
from experiments.analyses.charts.run_charts import runs_chart
from experiments.analyses.charts.style import caption_of
from experiments.analyses.files import AnalysisFiles, json_text
from experiments.analyses.sweeps import labels_of, load_sweep
from experiments.analyses.two_runs import RunDifference, compare_runs


def table(lines: Sequence[RunDifference]) -> str:
    """A row for each setting and quantity."""
    has_tasks = len({each.task for each in lines}) > 1
    rows = [
        ({"run": each.run} if each.run else {})
        | ({"task": each.task} if has_tasks else {})
        | {
            "setting": each.setting,
            "quantity": each.quantity,
            "A": f"{each.one:.4g}",
            "B" if not each.run else "run's": f"{each.other:.4g}",
            "change": f"{each.change:+.3f}" if each.quantity == "accuracy" else f"x {each.change:.3f}",
            "[95 % together]": "-" if each.interval is None else f"[{each.interval[0]:.3f}, {each.interval[1]:.3f}]",
            "n": f"{each.n[0]}" if each.is_paired else f"{each.n[0]} and {each.n[1]}",
            "verdict": each.verdict,
        }
        for each in lines
    ]
    return pd.DataFrame(rows).to_string(index=False)


@reporting_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Compare. Exit code: 0 done, 1 the files do not allow it or, on request, a latency got longer, 2 a wrong flag."""
    parser = OneLineParser(prog="compare_runs.py", description="Compare the settings that runs share with the first.")
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help="--output_dir of the first run")
    parser.add_argument("others", type=Path, nargs="+", metavar="RUN_B",
                        help="--output_dir of the second run, and of further ones")  # fmt: skip
    parser.add_argument("--margin", type=float, default=0.02, metavar="M",
                        help="change of latency and energy that is SAME (default: 0.02, which is 2 %%)")  # fmt: skip
    parser.add_argument("--accuracy_margin", type=float, default=0.01, metavar="M",
                        help="change of accuracy that is SAME, part of the best score (default: 0.01)")  # fmt: skip
    parser.add_argument("--fail_on_slower", action="store_true", help="exit code 1 where a latency is SLOWER")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the lines as JSON")
    parser.add_argument("--output_dir", type=Path, metavar="DIR", help="also write the lines and a picture into DIR")
    add_knob_module(parser)
    given: argparse.Namespace = parser.parse_args(argv)
    check_within("--margin", given.margin, 0, 1)
    check_within("--accuracy_margin", given.accuracy_margin, 0, 1)
    if given.output is not None:
        check_writable(given.output)
    folders = [given.run_a, *given.others]
    runs = [load_sweep(folder) for folder in folders]
    found = compare_runs(runs, labels_of(runs, folders), given.margin, given.accuracy_margin)
    print("\n".join([table(found.lines), *found.sentences()]))
    if given.output is not None:
        write_text_atomically(json_text(found.content()), given.output)
    if given.output_dir is not None:
        num_settings, num_samples = sum(len(run.settings) for run in runs), sum(run.num_samples for run in runs)
        caption = caption_of([run.provenance for run in runs], num_settings, num_samples)
        named = [replace(each, run=each.run or found.labels[1]) for each in found.lines]
        charts = [runs_chart(named, found.labels[0])]
        for path in AnalysisFiles({"comparison": found.content()}, {}, charts, caption).write(given.output_dir):
            print(path)
    return 1 if given.fail_on_slower and any(each.verdict == "SLOWER" for each in found.lines) else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
