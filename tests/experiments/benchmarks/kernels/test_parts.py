"""Every part of the kernels' benches runs, in Triton's interpreter on tiny weights; without a GPU nothing is timed."""

import json
import os
import subprocess
import sys

import pytest
import torch

from experiment_core_utils.config.command import run_command
from experiment_core_utils.primitives.files import REPOSITORY
from experiments.benchmarks.kernels.parts import main
from experiments.benchmarks.kernels.tune import PARTS, PRODUCTS


def test_every_part_runs() -> None:
    pytest.importorskip("triton", minversion="3.7")  # the interpreter of 3.6 fails with NumPy 2.4
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.experiments.benchmarks.kernels.interpreted_parts"]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["decode"] == list(PARTS)
    assert {"qkv product", "router", "plan", *PRODUCTS.values()} < set(found["prefill"])
    assert found["other tiles"] == list(PRODUCTS.values())
    assert {"qkv product", "inner product", "quick-GELU", "outer product"} < set(found["vision"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["parts", "--stage", "decode"])
    assert run_command(main) == 2
    assert capsys.readouterr().err == (
        "error: kernels are measured on a GPU, and torch sees none; run this where one is\n"
    )
