"""What fraction of a sweep's wall time is measured model time, and where the rest goes, on the embedded grid.

python -m experiments.benchmarks.sweep_efficiency --num_samples 32 --device cuda --precision bfloat16

The grid is 3 tiers x top-k 4, 8 x 12, 16 blocks of the embedded model, through the ordinary pipeline in one process.
Flags that are not this script's own go to the pipeline, for example --num_threads 1 or --request_cache_gb 0.

Measured model time is the sum of `T_total` over the runs in the results: warm-up and the proof of the knobs are not in
it. Wall time is that of `run_profiling` less the loading of the model, from planning to the CSV. The parts are host
times taken around whole steps of the pipeline, two readings of the clock for each, none of them inside a run.
"""

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from experiment_core_utils import pipeline
from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.measuring import sample_runs
from experiment_core_utils.measuring.request_source import RequestSource
from experiment_core_utils.measuring.sample_runs import SampleRunner
from experiment_core_utils.planning import run as profiling_run
from experiment_core_utils.records.journal import Journal
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.records.setting_result import SettingResult

GRID = (
    "--tier_list", "low", "medium", "high", "--top_k_list", "4", "8", "--num_active_blocks_list", "12", "16",
    "--sampling_strategy", "full",
)  # fmt: skip
LOAD = "model load"
RUNS = "measured runs"
# Whose time is whose part; a step inside another counts to the outer one.
STEPS: tuple[tuple[Any, str, str], ...] = (
    (profiling_run, "load_requested", LOAD),
    (SampleRunner, "_warm_up", "warm-up and proof of each setting"),
    (SampleRunner, "_warm_up_shape", "warm-up of each tiling"),
    (RequestSource, "take", "preparation, or waiting for it"),
    (sample_runs, "run_staged", RUNS),
    (Journal, "append", "journal"),
    (pipeline, "pool_and_save", "merging, scoring, saving"),
    (pipeline, "write_tables", "CSV"),
)


class PartTimes:
    """Seconds by part; a step that runs inside another one is not counted a second time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._is_inside = False

    def timed(self, step: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The same step, with its time counted to the part."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return step(*args, **kwargs)
            self._is_inside = True
            started = time.perf_counter()
            try:
                return step(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - started
                self._is_inside = False

        return wrapper


def measured_model_s(results: Sequence[SettingResult]) -> float:
    """Seconds of every measured run in the results."""
    samples = [sample for result in results for sample in result.per_sample_results]
    return sum(run.T_total for sample in samples for run in sample.runs) * 1e-3


def sweep(flags: Sequence[str], output_dir: Path) -> tuple[float, float, Mapping[str, float]]:
    """The times of a sweep from nothing: seconds of measured model time, of wall time without loading, and by part."""
    config = parse_config([*GRID, *flags, "--output_dir", str(output_dir)])
    parts = PartTimes()
    with ExitStack() as stack:
        for owner, name, part in STEPS:
            stack.enter_context(patch.object(owner, name, parts.timed(getattr(owner, name), part)))
        started = time.perf_counter()
        report = pipeline.run_profiling(config)
        wall_s = time.perf_counter() - started
    for result in report.results[:1]:
        Ledger(output_dir, result.fingerprint).path.unlink()
    if report.failed:
        raise SystemExit(f"settings failed, so the sweep cannot be used: {', '.join(report.failed)}")
    return measured_model_s(report.results), wall_s - parts.seconds[LOAD], parts.seconds


def print_report(model_s: float, sweep_s: float, parts: Mapping[str, float]) -> None:
    """Print the ratio, and where the rest of the wall time went."""
    rest = {name: seconds for name, seconds in parts.items() if name not in (LOAD, RUNS)}
    rest["around the marks of the runs"] = parts[RUNS] - model_s
    rest["everything else"] = sweep_s - parts[RUNS] - sum(parts[name] for name in parts if name not in (LOAD, RUNS))
    print(f"measured model time / wall time of the sweep: {model_s / sweep_s:.3f} ({model_s:.1f} s / {sweep_s:.1f} s)")
    for name, seconds in sorted(rest.items(), key=lambda item: -item[1]):
        print(f"  {name}: {seconds / sweep_s:.3f} ({seconds:.2f} s)")
    print(f"model load, not in the wall time: {parts[LOAD]:.1f} s")


def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--num_samples", type=int, default=32)
    own, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        print_report(*sweep(["--num_samples", str(own.num_samples), *flags], Path(folder)))


if __name__ == "__main__":
    sys.exit(run_command(main))
