"""Tasks and metrics from the command line: list them, score stored answers again, compare settings in pairs.

knobprof tasks list
knobprof tasks rescore results/core_exp --metric vqa_score_molmo
knobprof tasks compare results/core_exp
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser, add_knob_module
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.setting_result import setting_key
from experiment_core_utils.saved_results.rescoring import by_task, compare_folder, rescore
from experiment_core_utils.saved_results.terminal import comparison_table, few_samples_warning, rescoring_table
from experiment_core_utils.tasks.registry import (
    get_metric,
    get_metric_for_dataset,
    list_metrics,
    list_tasks,
    load_task_module,
    score_name,
)


def build_parser() -> argparse.ArgumentParser:
    """The three commands and their flags."""
    parser = OneLineParser(
        prog="python -m experiment_core_utils.tasks",
        description="Tasks, metrics, stored answers.",
        examples=(
            "knobprof tasks list",
            "knobprof tasks rescore results/core_exp --metric vqa_score_molmo",
            "knobprof tasks compare results/core_exp",
        ),
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="print the tasks with their metrics, and all metrics")
    again = commands.add_parser(
        "rescore",
        help="score the answers of a run again, without a model",
        examples=("knobprof tasks rescore results/core_exp --metric vqa_score_molmo",),
    )
    again.add_argument("results_dir", type=Path, metavar="RESULTS_DIR", help="folder of a run's JSON files")
    again.add_argument(
        "--metric", required=True, metavar="METRIC", help="metric that scores the answers; the list command prints all"
    )
    again.add_argument(
        "--output", type=Path, metavar="DIR", help="folder of the output (default: RESULTS_DIR/rescored_<metric>)"
    )
    pairs = commands.add_parser(
        "compare",
        help="compare every setting with one, on the same samples",
        examples=("knobprof tasks compare results/core_exp --baseline tier-high_topk8_blocks16",),
    )
    pairs.add_argument("results_dir", type=Path, metavar="RESULTS_DIR", help="folder of a run's JSON files")
    for command in commands.choices.values():
        command.add_argument(
            "--task_module", type=Path, metavar="PATH", help="Python file that registers tasks or metrics"
        )
    for command in (again, pairs):
        add_knob_module(command)
    pairs.add_argument(
        "--baseline",
        metavar="SETTING",
        help="setting to compare with (default: the reference, else all knobs at their largest)",
    )
    return parser


def print_rescored(results_dir: Path, metric: str, output: Path | None) -> None:
    """Rescore, then a table of before and after."""
    done = rescore(results_dir, get_metric(metric), output)
    print(rescoring_table(done.before, done.after))
    for results in by_task(done.after).values():
        _warn(few_samples_warning(results))
    print(f"{counted(len(done.after), 'setting')} in {done.output}")
    for path in done.csv_paths:
        print(f"table of settings: {path}")


def print_compared(results_dir: Path, baseline: str | None) -> None:
    """A table of paired differences for each task in the folder."""
    for each in compare_folder(results_dir, baseline):
        is_reference = any(one.is_reference and setting_key(one) == each.baseline for one in each.results)
        baseline = f"the reference, {each.baseline}" if is_reference else each.baseline
        print(f"{each.task}, {each.metric}: settings against {baseline}, on the samples that both have")
        if each.comparisons:
            score = score_name(*((one.metric, one.metric_best) for one in each.results))
            print(comparison_table(each.comparisons, score))
        else:
            print("there is no other setting to compare")
        _warn(few_samples_warning(each.results))
        for condition in each.other_conditions:
            _warn(f"the results also differ in {condition}: differences are not due to the knobs alone")


def _warn(sentence: str | None) -> None:
    if sentence is not None:
        print(f"warning: {sentence}")


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Exit code: 0 done, 1 the files do not allow it, 2 the request cannot be met."""
    given = build_parser().parse_args(argv)
    if given.task_module is not None:
        load_task_module(given.task_module)
    if given.command == "list":
        for name in list_tasks():
            print(f"task    {name}  ({get_metric_for_dataset(name)})")
        for name in list_metrics():
            print(f"metric  {name}  (0 to {get_metric(name).best:g})")
    elif given.command == "rescore":
        print_rescored(given.results_dir, given.metric, given.output)
    else:
        print_compared(given.results_dir, given.baseline)


if __name__ == "__main__":
    sys.exit(run_command(main))
