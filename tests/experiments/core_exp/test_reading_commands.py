"""Commands that read results do without what only measuring needs, which takes most of their time to load."""

import subprocess
import sys

from experiment_core_utils.primitives.files import REPOSITORY

READERS = "choose report compare_runs verify_run write_tables e1_stage_latency e2_knob_pareto e3_latency_estimator"


def test_commands_that_read_results_import_no_torch() -> None:
    code = "import sys, importlib; [importlib.import_module(name) for name in sys.argv[1:]]; print(*sys.modules)"
    named = [f"experiments.core_exp.{name}" for name in READERS.split()] + ["experiments.controller.lookup"]
    done = subprocess.run(
        [sys.executable, "-c", code, *named], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert set(named) <= loaded
    assert not loaded & {"torch", "transformers", "accelerate"}
