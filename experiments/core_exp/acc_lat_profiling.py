"""Measure accuracy and stage-wise latency under the knobs: parse, run the pipeline, say where the results are.

accelerate launch experiments/core_exp/acc_lat_profiling.py --tier_list low high --top_k_list 4 8 --num_samples 16
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiment_core_utils.config.command import libraries_loading, reporting_errors, run_command
from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.primitives.texts import printable


@reporting_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 all measured, 1 a setting failed or the run broke off, 2 refused, 3 samples failed, 4 the run is
    INVALID and --strict was given, 130 stopped.

    Of a dry run: 0 the run can be made, 2 refused, 3 some rows of the data file cannot be used.
    """
    # While imports and loading last; a run has its own handlers, which let the sample at work end.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config = parse_config(argv)
    # torch and transformers take seconds to import; `--help` and a wrong flag need neither.
    if config.machine.dry_run:
        with libraries_loading():
            from experiment_core_utils.planning.dry_run import describe_plan

        plan = describe_plan(config)
        if plan.is_main_process:
            print(plan.text)
        return plan.exit_code
    if config.model.serve is not None:
        with libraries_loading():
            from experiments.core_exp.served_runs import run_at_servers

        return run_at_servers(config, measured)
    return measured(config)


def measured(config: ProfilingConfig) -> int:
    """The exit code of one run, whose table and conclusion are printed."""
    with libraries_loading():
        from experiment_core_utils.pipeline import run_profiling

    report = run_profiling(config)
    if not report.is_main_process:
        return 0
    # It comes from E2, which takes a second to import: too long before the first sample.
    from experiments.core_exp.closing_lines import closing_lines, concluded_and_saved

    found = concluded_and_saved(report, config.machine.tracker, config.question)
    print("\n".join(printable(line) for lines in closing_lines(report, found) for line in lines.split("\n")))
    return found.exit_code(report, is_strict=config.machine.strict)


if __name__ == "__main__":
    sys.exit(run_command(main))
