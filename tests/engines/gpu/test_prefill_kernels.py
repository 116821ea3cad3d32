"""The Triton kernels of prefill and vision compute what the modules do, seen in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
CHECKED = {"logits", "keys", "values", "norm", "topk_weights", "experts", "features", "states"}


def test_the_kernels_in_tritons_interpreter() -> None:
    pytest.importorskip("triton", minversion="3.7")  # the interpreter of 3.6 fails with NumPy 2.4
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "tests.engines.interpreted_kernels"]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    errors = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
    assert {name.split()[0] for name, _ in errors} == {*CHECKED, "slots"}
    assert {name: error for name, error in errors if not float(error) < 3e-6} == {}
    # What lies behind a padded prompt belongs to nobody yet.
    assert [float(error) for name, error in errors if name.startswith("slots")] == [0.0, 0.0]
