"""How good `--dry_run` is: estimate a grid, measure it, print measured / estimated.

python -m experiments.benchmarks.dry_run --num_samples 4 --num_runs_per_sample 2 --num_threads 1

All flags are the driver's; --output_dir must be a folder without results. Each setting is estimated twice: with nothing
measured before, and with the results of the grid's first and last setting in the folder. With one thread on a CPU, the
processor time is what the whole would have taken alone on its core; where it is far below the wall time, others shared
the core and the ratios say more about them.
"""

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.l_results_csv_cleaning import read_results
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.planning.dry_run import PlanReport, describe_plan
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.result_files import RESULT_FILES
from experiment_core_utils.records.setting_result import SettingResult, setting_key


def request_ratios(plan: PlanReport, results: Sequence[SettingResult]) -> dict[str, float]:
    """Measured over estimated time of one request, by setting; raises ConfigurationError where there is no estimate."""
    estimated = {estimate.work.key: estimate.run_s for estimate in plan.estimates}
    measured = {setting_key(result): (result.aggregate_stats["T_total_mean"] or 0.0) * 1e-3 for result in results}
    ratios = {key: seconds / expected for key, seconds in measured.items() if (expected := estimated[key])}
    if not ratios:
        raise ConfigurationError("there is no estimate of this model's times to compare with; give a MolmoE model")
    return ratios


def estimate_from_ends(config: ProfilingConfig, results: Sequence[SettingResult]) -> PlanReport:
    """The estimate that the results of the first and the last setting alone give."""
    ends = {setting_key(results[0]), setting_key(results[-1])}
    with tempfile.TemporaryDirectory() as folder:
        for name, result in read_results(config.machine.output_dir).items():
            if setting_key(result) in ends:
                shutil.copy(config.machine.output_dir / name, folder)
        return describe_plan(config.replaced(output_dir=folder))


def line(name: str, ratios: Sequence[float]) -> str:
    """A line with the median and extremes of ratios."""
    return (
        f"{name}: measured / estimated T_total {statistics.median(ratios):.2f} in the median over "
        f"{len(ratios)} settings ({min(ratios):.2f} to {max(ratios):.2f})"
    )


@reporting_errors
def main() -> None:
    """Compare estimates with measurements. Exit code: 0 compared, 1 or 2 as the driver."""
    config = parse_config()
    if config.machine.output_dir.is_dir() and any(config.machine.output_dir.glob(RESULT_FILES)):
        raise ConfigurationError(
            f"--output_dir {config.machine.output_dir} contains results already; give an empty folder"
        )
    before = describe_plan(config)
    started, processor_started = time.perf_counter(), time.process_time()
    report = run_profiling(config)
    wall_s, processor_s = time.perf_counter() - started, time.process_time() - processor_started
    after = estimate_from_ends(config, report.results)
    ends = {setting_key(report.results[0]), setting_key(report.results[-1])}
    scaled = {key: ratio for key, ratio in request_ratios(after, report.results).items() if key not in ends}
    print(line("matmul", list(request_ratios(before, report.results).values())))
    print(line("scaled", list(scaled.values())))
    estimated = "no estimate" if before.whole_s is None else f"estimated {before.whole_s:.0f} s (matmul)"
    print(f"whole: {wall_s:.0f} s, processor time {processor_s:.0f} s; {estimated}")


if __name__ == "__main__":
    sys.exit(run_command(main))
