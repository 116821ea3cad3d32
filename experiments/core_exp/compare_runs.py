"""Runs side by side: latency, energy, memory and accuracy of the same settings in two folders or more, each against the
first; or two sides measured in turn, each in fresh processes.

python experiments/core_exp/compare_runs.py results/before results/after --fail_on_slower
python experiments/core_exp/compare_runs.py --run '' '--precision bfloat16' --output_dir results/precisions \
    -- --tier_list low --num_samples 8
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pandas as pd

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser, add_knob_module
from experiment_core_utils.primitives.contrasts import ACCURACY_MARGIN
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import check_writable, write_text_atomically
from experiment_core_utils.primitives.texts import ABSENT
from experiment_core_utils.primitives.units import check_within
from experiments.analyses.against_harness import compare_with_harness
from experiments.analyses.charts.style import caption_of
from experiments.analyses.comparison_page import COLUMNS, chart_of, comparison_page, require_plotly
from experiments.analyses.files import AnalysisFiles, json_text
from experiments.analyses.harness_results import HarnessResults, harness_files, read_harness
from experiments.analyses.report.page import write_page
from experiments.analyses.runs_in_turn import Side, run_in_turn
from experiments.analyses.sweeps import Sweep, labels_of, load_sweep
from experiments.analyses.two_runs import (
    RATIO_MARGIN,
    RunComparison,
    RunDifference,
    compare_runs,
    runs_in,
    title_of,
)
from experiments.core_exp.multi_datasets import split_at_dashes


def table(lines: Sequence[RunDifference]) -> str:
    """A row for each setting, and one for all of them; in each quantity's column its change, interval and verdict."""
    has_tasks = len({each.task for each in lines}) > 1
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for line in lines:
        named = {"run": line.run} if line.run else {}
        named |= {"task": line.task} if has_tasks else {}
        row = rows.setdefault((line.run, line.task, line.setting), named | {"setting": line.setting})
        change = f"{line.change:+.3f}" if line.quantity == "accuracy" else f"x {line.change:.3f}"
        interval = "" if line.interval is None else f" [{line.interval[0]:.3f}, {line.interval[1]:.3f}]"
        row[line.quantity] = f"{change}{interval} {line.verdict}"
        row["n"] = str(max(line.n, int(row.get("n", "0"))))
    quantities = [each for each in COLUMNS if any(each in row for row in rows.values())]
    found = pd.DataFrame(rows.values()).fillna(ABSENT)
    found = found[[*(name for name in found if name not in (*quantities, "n")), "n", *quantities]]
    return found.rename(columns={each: title_of(each, lines) for each in quantities}).to_string(index=False)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own arguments, and the profiling command's behind `--`.

    Raises:
        ConfigurationError: folders beside --run, too few of them without it, or flags of the one with the other.
    """
    own, shared = split_at_dashes(argv)
    parser = OneLineParser(
        prog="compare_runs.py",
        description="Compare the settings that runs share with the first.",
        examples=(
            "knobprof compare results/before results/after --output_dir compared",
            "knobprof compare --run '' '--execution eager' --output_dir compared -- --num_samples 64",
        ),
    )
    parser.add_argument("folders", type=Path, nargs="*", metavar="RUN",
                        help="--output_dir of the first run, of the second, and of further ones; a folder whose "
                        "sub-folders 1, 2, ... are runs of one side; of two, also results of lm-eval or "
                        "lmms-eval")  # fmt: skip
    turn = parser.add_argument_group("measure two sides in turn, in fresh processes: --run A B [-- flags of both]")
    turn.add_argument("--run", nargs=2, metavar=("A", "B"),
                      help="flags of the profiling command of each side; '' for none")  # fmt: skip
    turn.add_argument("--checkout", type=Path, nargs=2, metavar=("A", "B"), help="checkout (default: this)")
    turn.add_argument("--python", nargs=2, metavar=("A", "B"), help="interpreter (default: this)")
    turn.add_argument("--repeats", type=int, default=5, metavar="N", help="processes a side (default: 5)")
    parser.add_argument("--margin", type=float, default=RATIO_MARGIN, metavar="FRACTION",
                        help="change of a ratio that is SAME (default: 0.02, which is 2 %%)")  # fmt: skip
    parser.add_argument("--accuracy_margin", type=float, default=ACCURACY_MARGIN, metavar="FRACTION",
                        help="change of accuracy that is SAME, part of the best score (default: 0.02)")  # fmt: skip
    parser.add_argument("--between_runs", type=float, metavar="FRACTION",
                        help="how much runs of one thing differ in speed, a standard deviation; used where no side has "
                        "two runs (default: 0.02, on a CPU 0.07, or a fifth of its other load)")  # fmt: skip
    parser.add_argument("--metric", metavar="NAME",
                        help="metric of lm-eval's or lmms-eval's results, such as exact_match,none (default: the one "
                        "that is called like the run's)")  # fmt: skip
    parser.add_argument("--fail_on_slower", action="store_true",
                        help="exit code 1 where the latency of all settings together is SLOWER")  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the lines as JSON")
    parser.add_argument("--report", type=Path, metavar="FILE",
                        help="also write a page: the sentence, a picture, a table of all quantities")  # fmt: skip
    parser.add_argument("--output_dir", type=Path, metavar="DIR",
                        help="also write the lines and a picture into DIR; with --run the runs, too")  # fmt: skip
    add_knob_module(parser)
    given = parser.parse_args(_with_words_of_sides(own))
    check_within("--margin", given.margin, 0, 1)
    check_within("--accuracy_margin", given.accuracy_margin, 0, 1)
    if given.between_runs is not None:
        check_within("--between_runs", given.between_runs, 0, 1)
    check_within("--repeats", given.repeats, 2, 1000)
    if given.run is None and (given.checkout or given.python or shared):
        raise ConfigurationError("--checkout, --python and flags after -- are for --run A B; give it, or leave them")
    if given.run is not None and (given.folders or given.output_dir is None):
        raise ConfigurationError("--run takes no folders of runs, and needs --output_dir DIR for those that it makes")
    if given.run is None and len(given.folders) < 2:
        raise ConfigurationError("too few runs: give the folders of two or more, or --run A B")
    return given, shared


def _with_words_of_sides(words: Sequence[str]) -> list[str]:
    """The words with a space before both of `--run`, which argparse would take for flags of its own."""
    at = list(words).index("--run") + 1 if "--run" in words else len(words)
    return [*words[:at], *(f" {word}" for word in words[at : at + 2]), *words[at + 2 :]]


def compared(given: argparse.Namespace, shared: Sequence[str]) -> RunComparison:
    """The comparison of the folders, or of two sides that are measured now."""
    margins = given.margin, given.accuracy_margin, given.between_runs
    if given.run is None:
        if any(harness_files(folder) for folder in given.folders):
            num_others = len(given.folders) - 1
            if num_others != 1:
                raise ConfigurationError(f"results of a harness are compared with one other side, not {num_others}")
            both: list[Sweep | HarnessResults] = []
            for folder in given.folders:
                files = harness_files(folder)
                both.append(read_harness(folder, files) if files else load_sweep(folder))
            labels = [side.label if isinstance(side, HarnessResults) else side.provenance.model for side in both]
            return compare_with_harness(both, labels, given.accuracy_margin, given.metric)
        if given.metric is not None:
            raise ConfigurationError("--metric is for results of lm-eval or lmms-eval, and none is given; drop it")
        runs = [runs_in(folder) for folder in given.folders]
        return compare_runs(runs, labels_of([run[0] for run in runs], given.folders), *margins)
    checkouts, pythons = given.checkout or (None, None), given.python or (None, None)
    sides = [Side.of(*each) for each in zip(given.run, checkouts, pythons, strict=True)]
    folders = run_in_turn(sides, shared, given.repeats, given.output_dir)
    return compare_runs([runs_in(each) for each in folders], [side.label for side in sides], *margins, is_paired=True)


@reporting_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Compare. Exit code: 0 done, 1 the files do not allow it, a side failed or, on request, latency got longer, 2 a
    wrong flag, 130 stopped.
    """
    given, shared = parse(sys.argv[1:] if argv is None else argv)
    for path in (given.output, given.report):
        if path is not None:
            check_writable(path)
    if given.report is not None:
        require_plotly()
    found = compared(given, shared)
    print("\n".join([*found.headlines, *found.voided_by, table(found.shown), *found.sentences()]))
    if given.output is not None:
        write_text_atomically(json_text(found.content()), given.output)
    if given.report is not None:
        write_page(comparison_page(found), given.report)
        print(given.report)
    if given.output_dir is not None:
        runs = [run for side in found.sides for run in side]
        num_settings, num_samples = sum(len(run.settings) for run in runs), sum(run.num_samples for run in runs)
        caption = caption_of([run.provenance for run in runs], num_settings, num_samples)
        files = AnalysisFiles({"comparison": found.content()}, {}, [chart_of(found, found.lines)], caption)
        for path in files.write(given.output_dir):
            print(path)
    return 1 if given.fail_on_slower and found.is_slower else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
