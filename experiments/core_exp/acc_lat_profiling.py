"""Measure accuracy and stage-wise latency under the knobs: parse, run the pipeline, say where the results are.

accelerate launch experiments/core_exp/acc_lat_profiling.py --tier_list low high --top_k_list 4 8 --num_samples 16
"""

import signal
import sys
from pathlib import Path

from experiment_core_utils.config.command import libraries_loading, run_command
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.pipeline import RunReport
from experiment_core_utils.primitives.errors import ProfilerError, Stopped
from experiment_core_utils.saved_results.terminal import (
    caveat_lines,
    closing_table,
    failed_sample_lines,
    few_samples_warning,
    positions_of,
    search_sentence,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> int:
    """Exit code: 0 all measured, 1 a setting failed or the run broke off, 2 it cannot be done, 3 samples failed, 130
    stopped."""
    # While imports and loading last; a run has its own handlers, which let the sample at work end.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        config = parse_config()
        # torch and transformers take seconds to import; `--help` and a wrong flag need neither.
        if config.machine.dry_run:
            with libraries_loading():
                from experiment_core_utils.sweep.dry_run import describe_plan

            plan = describe_plan(config)
            if plan.is_main_process:
                print(plan.text)
            return 0
        with libraries_loading():
            from experiment_core_utils.pipeline import run_profiling

            pass

        report = run_profiling(config)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.exit_code
    except ProfilerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; finished samples are saved: run the same command again to resume", file=sys.stderr)
        return 130
    if report.is_main_process:
        print("\n".join(closing_lines(report)))
    return report.exit_code


def closing_lines(report: RunReport) -> list[str]:
    """The table of settings, what weakens them, what failed or was left out, and where the results are."""
    lines = []
    if report.results:
        lines.append(closing_table(report.results, positions_of(report.search)))
        warning = few_samples_warning(report.results)
        if warning is not None:
            lines.append(f"warning: {warning}")
    lines += [*caveat_lines(report.results), *failed_sample_lines(report.results)]
    for key, failure in report.failed.items():
        lines.append(f"failed: {key}: {failure.error} after {failure.attempts} attempts: {failure.reason}")
    for values in report.left_out:
        lines.append(f"left out by the sampling strategy: {values} (--sampling_strategy full measures all)")
    if report.search is not None:
        lines.append(search_sentence(report.search))
    measured = "nothing was left to measure" if report.experiment_id is None else f"run {report.experiment_id}"
    lines.append(f"{measured}: {len(report.results)} settings in {report.output_dir}")
    if report.csv_path is not None:
        lines.append(f"table of settings: {report.csv_path}")
    return lines


if __name__ == "__main__":
    sys.exit(run_command(main))
