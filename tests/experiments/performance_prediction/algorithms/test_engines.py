"""Which engine answers for a name, and the optional ones where they are installed."""

import os
import subprocess
import sys

import pytest
import torch

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import REPOSITORY
from experiments.performance_prediction.algorithms.convolution import AlgorithmName, AlgorithmRefused, ConvShape
from experiments.performance_prediction.algorithms.engines import Placement, prepare
from experiments.performance_prediction.algorithms.reference import float64_reference, relative_l2

CPU = Placement(torch.device("cpu"))
SHAPE = ConvShape(2, 4, 13, 11, 6, (3, 2), (2, 1), (1, 0), (1, 2))

# The kernels in Triton's own interpreter, which has to be chosen before Triton is imported.
INTERPRETED = """
import torch
from experiments.performance_prediction.algorithms import triton_direct, triton_winograd
from experiments.performance_prediction.algorithms.convolution import ConvShape
from experiments.performance_prediction.algorithms.reference import float64_reference, relative_l2
strided = ConvShape(2, 4, 13, 11, 6, (3, 2), (2, 1), (1, 0), (1, 2), 2)
for shape in (strided, ConvShape(1, 3, 17, 12, 18, (5, 5), padding=(2, 2))):
    given, weight = torch.randn(shape.input_shape), torch.randn(shape.weight_shape)
    assert triton_direct.unsupported_reason(shape) is None
    print(relative_l2(triton_direct.direct(given, weight, shape), float64_reference(given, weight, shape)))
assert "takes kernels of 3x3" in triton_winograd.unsupported_reason(shape)
grouped = ConvShape(2, 40, 7, 10, 6, (3, 3), padding=(1, 0), groups=2)
for shape in (grouped, ConvShape(1, 3, 11, 9, 40, (3, 3), padding=(1, 1))):
    given, weight = torch.randn(shape.input_shape), torch.randn(shape.weight_shape)
    print(relative_l2(triton_winograd.winograd(given, weight, shape), float64_reference(given, weight, shape)))
"""


def test_on_the_cpu_guess_is_torchs_choice_and_says_so() -> None:
    assert (prepare("guess", SHAPE, CPU).runs, prepare("guess", SHAPE, CPU).engine) == ("torch", "torch")
    assert (prepare("torch", SHAPE, CPU).runs, prepare("gemm", SHAPE, CPU).engine) == ("torch", "operations")


def test_a_refusal_names_the_algorithm() -> None:
    with pytest.raises(AlgorithmRefused, match="winograd nonfused takes kernels of 3x3 and 5x5, this is 3x2"):
        prepare("winograd nonfused", SHAPE, CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_gpu_that_is_not_there_is_an_error_before_anything_runs() -> None:
    with pytest.raises(ConfigurationError, match="cuDNN"):
        prepare("gemm", SHAPE, Placement(torch.device("cuda", 0)))


@pytest.mark.parametrize("algorithm", ["direct", "gemm"])
def test_ai3_computes_the_same(algorithm: AlgorithmName) -> None:
    pytest.importorskip("ai3")
    prepared = prepare(algorithm, SHAPE, Placement(torch.device("cpu"), backend="ai3"))
    given, weight = torch.randn(SHAPE.input_shape), torch.randn(SHAPE.weight_shape)
    output = prepared.run(given.to(memory_format=torch.channels_last), weight)
    error = relative_l2(output, float64_reference(given, weight, SHAPE))
    assert prepared.engine == "ai3" and error is not None and error < 1e-6
    with pytest.raises(AlgorithmRefused, match="fft is not in ai3"):
        prepare("fft", SHAPE, Placement(torch.device("cpu"), backend="ai3"))


def test_without_ai3_its_backend_says_what_to_install() -> None:
    if subprocess.run([sys.executable, "-c", "import ai3"], capture_output=True, check=False).returncode == 0:
        pytest.skip("ai3 is installed")
    with pytest.raises(ConfigurationError, match="pip install aithree"):
        prepare("gemm", SHAPE, Placement(torch.device("cpu"), backend="ai3"))


def test_the_kernels_in_tritons_interpreter() -> None:
    pytest.importorskip("triton", minversion="3.7")  # the interpreter of 3.6 fails with NumPy 2.4
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", INTERPRETED]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    errors = [float(line) for line in done.stdout.split()]
    assert len(errors) == 4 and max(errors) < 1e-6
