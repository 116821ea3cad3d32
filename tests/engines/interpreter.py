"""Modules whose Triton kernels run in Triton's interpreter, which has to be chosen before Triton is imported."""

import os
import subprocess
import sys

import pytest

from experiment_core_utils.primitives.files import REPOSITORY


def printed_by(module: str, *arguments: str) -> str:
    """The output of `python -m module` in the interpreter, without a GPU."""
    pytest.importorskip("triton", minversion="3.7")  # the interpreter of 3.6 fails with NumPy 2.4
    chosen = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **chosen},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout
