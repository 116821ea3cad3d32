"""Measure a full grid and write it as one small table, which E2 and the controller read.

torchrun --nproc-per-node=8 experiments/core_exp/collect_table.py table.json --device cpu --num_threads 2

Started again, it resumes where it stopped. Flags that are not in --help go to the pipeline. Its settings are the full
grid of what each knob can be in the model (of the embedded one: 3 tiers x 4 numbers of experts x 5 numbers of blocks);
one measured run of each sample. Latencies of several processes on one machine are not those of one alone; the table
keeps what the run says of that under `caveats`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from experiment_core_utils.b_model_loader import find_requested_checkpoint
from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.interface import KnobLimits
from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.primitives.files import check_writable
from experiment_core_utils.primitives.texts import counted
from experiments.analyses.recorded_table import table_of, write_table

MEASURED = {"--sampling_strategy": ("full",), "--num_runs_per_sample": ("1",), "--num_warmup_runs": ("1",)}


def collect(path: Path, results_dir: Path, num_samples: int, flags: Sequence[str]) -> int:
    """Run (or finish) the full grid and write its table; exit code as the driver's."""
    started = time.perf_counter()
    given = {flag.split("=")[0] for flag in flags}
    own = ["--num_samples", str(num_samples), "--output_dir", str(results_dir)]
    chosen = full_grid(find_requested_checkpoint(parse_config([*own, *flags])).limits) | MEASURED
    defaults = [word for flag, values in chosen.items() if flag not in given for word in (flag, *values)]
    report = run_profiling(parse_config([*defaults, *own, *flags]))
    if not report.is_main_process:
        return 0
    for key, failure in report.failed.items():
        print(f"failed: {key}: {failure.error}: {failure.reason}")
    table = table_of(report.results)
    write_table(table, path)
    print(
        f"{counted(len(table.settings), 'setting')} x {counted(len(table.sample_ids), 'sample')}: "
        f"{np.nansum(table.costs):.0f} s of model time, {time.perf_counter() - started:.0f} s of this call; {path} has "
        f"{path.stat().st_size / 1e3:.0f} kB"
    )
    return 1 if report.failed else 0


def full_grid(limits: KnobLimits) -> dict[str, tuple[str, ...]]:
    """The values that cover what each knob can be in a model, by flag.

    A knob that cannot be turned there keeps its default, and all do where only the loaded model can tell.
    """
    if limits.untried_reason is not None:
        return {}
    found = [knob.full_grid(limits) for knob in all_knobs() if knob.name not in limits.unsupported]
    return {f"--{flag}": tuple(map(str, values)) for each in found for flag, values in each.items()}


@reporting_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 a setting failed, or the table cannot be written, 2 a flag is wrong."""
    parser = OneLineParser(
        prog="collect_table.py",
        description="Measure a full grid and write it as one small table. Flags that are not this program's own go to "
        "the profiler's configuration.",
        examples=(
            "knobprof collect grid.json --num_samples 100",
            "knobprof collect grid.json --model_path MODEL --dataset_name text_vqa --tier_list low high",
        ),
    )
    parser.add_argument("table", type=Path, metavar="FILE", help="the table, a JSON file")
    parser.add_argument("--results_dir", type=Path, default=Path("results/pareto_grid"), metavar="DIR",
                        help="folder of the run")  # fmt: skip
    parser.add_argument("--num_samples", type=int, default=500, help="samples of each setting")
    given: argparse.Namespace
    given, flags = parser.parse_known_args(argv)
    check_writable(given.table)
    return collect(given.table, given.results_dir, given.num_samples, flags)


if __name__ == "__main__":
    sys.exit(run_command(main))
