"""Models of transformers by a GPU's own kernels, in Triton's interpreter, give what the modules give."""

import json
import os
import subprocess
import sys

import pytest

from experiment_core_utils.primitives.files import REPOSITORY


@pytest.mark.parametrize("family", ["qwen2", "olmoe", "qwen3_moe", "qwen3_vl_moe"])
def test_prompts_and_steps_at_several_settings(family: str) -> None:
    """Biases and windows; norms over all heads; a dense first block and norms of each head; pictures' positions and
    features that enter behind the first blocks.
    """
    pytest.importorskip("triton", minversion="3.7")  # the interpreter of 3.6 fails with NumPy 2.4
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.models.hf.interpreted_engines", family]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {
        family: {"vision": "modules", "prefill": "kernel graph", "decode": "kernel graph"}
    }
