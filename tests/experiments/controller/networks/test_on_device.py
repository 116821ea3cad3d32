"""The logits that kernels compute against those of arrays on the host: in Triton's interpreter, and on a GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch

from experiment_core_utils.primitives.files import REPOSITORY
from tests.experiments.controller.networks.compared_logits import compared


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton", minversion="3.7")  # the interpreter of 3.6 fails with NumPy 2.4
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.experiments.controller.networks.interpreted_logits"]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["worst"] < 1e-5
    assert found["same_impossible"] and found["several"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_on_a_gpu(dtype: torch.dtype) -> None:
    found = compared(torch.device("cuda"), dtype, None)
    assert found["worst"] < 1e-4
    assert found["same_impossible"] and found["several"]
