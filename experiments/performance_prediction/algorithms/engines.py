"""The engine of each algorithm: a convolution prepared where it is to run, or the reason against it.

On the CPU an algorithm is plain torch operations, or ai3's on request. On a GPU it is cuDNN's, and where cuDNN does not
grant `direct` or `winograd`, the project's own kernel. No algorithm ever replaces another, except that `guess` is a
choice among them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.performance_prediction.algorithms.convolution import (
    AlgorithmName,
    AlgorithmRefused,
    ConvShape,
    Precision,
    PreparedConvolution,
)
from experiments.performance_prediction.algorithms.cudnn import prepare_cudnn, run_on_zeros
from experiments.performance_prediction.algorithms.cudnn_library import loaded_cudnn
from experiments.performance_prediction.algorithms.on_cpu import CPU_ALGORITHMS, supports, torch_choice

Backend = Literal["own", "ai3"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
# What ai3 (on PyPI: aithree) runs on the CPU, by the project's names; smm is its im2col and matrix product. It copies
# every tensor of a GPU to the host and back, names algorithms in its GPU builds that it does not run, and ends the
# process where CUDA fails: it is used only as a second engine for these.
AI3_NAMES: Mapping[AlgorithmName, str] = {"direct": "direct", "gemm": "smm"}
_ZEROS = 0
# Algorithms with a kernel of the project's own, for GPUs on which cuDNN does not grant them.
OWN_KERNELS: tuple[AlgorithmName, ...] = ("direct", "winograd")


@dataclass(frozen=True)
class Placement:
    """The device and the number format of convolutions.

    Raises:
        ConfigurationError: what does not go together.
    """

    device: torch.device  #: the CPU, or a GPU with its index
    dtype: torch.dtype = torch.float32  #: of input, weight and output
    precision: Precision = "fma"  #: on the CPU always `fma`
    backend: Backend = "own"  #: `ai3` in place of the project's own operations, on the CPU only

    def __post_init__(self) -> None:
        if self.device.type == "cpu":
            if self.dtype not in (torch.float32, torch.float64) or self.precision != "fma":
                raise ConfigurationError(
                    f"{self.dtype} with precision {self.precision} does not run on the CPU; float32 with fma does"
                )
            return
        if self.device.type != "cuda" or self.device.index is None:
            raise ConfigurationError(f"device {self.device} is not covered; take cpu or a GPU with its index")
        if self.backend != "own":
            raise ConfigurationError(f"backend {self.backend} runs on the CPU only; take --device cpu or backend own")


def prepare(algorithm: AlgorithmName, shape: ConvShape, placement: Placement) -> PreparedConvolution:
    """The convolution by this algorithm. On a GPU it has run once when this returns.

    Raises:
        AlgorithmRefused: the algorithm does not cover it there.
        OutOfMemory: no memory for input, output and workspace.
        CudnnFailed: cuDNN broke off.
        ConfigurationError: no cuDNN that works, or ai3 is not installed.
    """
    if placement.backend == "ai3" and algorithm not in ("torch", "guess"):
        return _prepare_ai3(algorithm, shape)
    if algorithm == "torch":
        return PreparedConvolution(shape, algorithm, "torch", "torch", None, partial(torch_choice, shape=shape))
    if placement.device.type == "cpu":
        reason = supports(algorithm, shape)
        if reason is not None:
            raise AlgorithmRefused(f"{algorithm} {reason}")
        run = partial(CPU_ALGORITHMS[algorithm], shape=shape)
        if algorithm == "guess":
            return PreparedConvolution(shape, algorithm, "torch", "torch", None, run)
        return PreparedConvolution(shape, algorithm, algorithm, "operations", None, run)
    library = loaded_cudnn()
    try:
        return prepare_cudnn(library, algorithm, shape, placement.dtype, placement.precision, placement.device)
    except AlgorithmRefused as refused:
        if algorithm not in OWN_KERNELS:
            raise
        try:
            from experiments.performance_prediction.algorithms import triton_direct, triton_winograd
        except ImportError as error:
            raise AlgorithmRefused(f"{refused}, and the project's own kernel needs Triton: {error}") from error
        direct = algorithm == "direct"
        reason = (triton_direct if direct else triton_winograd).unsupported_reason(shape)
        if reason is not None:
            raise AlgorithmRefused(f"{refused}, and the project's own {algorithm} kernel {reason}") from refused
        run = partial(triton_direct.direct if direct else triton_winograd.winograd, shape=shape)
        run_on_zeros(run, shape, placement.dtype, placement.device)
        # Winograd's transformed weight: 16 float32 for each kernel of 3x3.
        workspace = 0 if direct else 16 * 4 * shape.out_channels * shape.weight_shape[1]
        return PreparedConvolution(shape, algorithm, algorithm, "triton", workspace, run)


def _prepare_ai3(algorithm: AlgorithmName, shape: ConvShape) -> PreparedConvolution:
    try:
        from ai3 import swap_torch  # noqa: F401 - registers torch.ops.ai3.conv2d
    except ImportError as error:
        raise ConfigurationError(
            f"backend ai3 needs the package ai3 (pip install aithree), or take backend own: {error}"
        ) from error
    if algorithm not in AI3_NAMES:
        raise AlgorithmRefused(f"{algorithm} is not in ai3 on the CPU; {' and '.join(AI3_NAMES)} are")
    if shape.groups != 1:
        raise AlgorithmRefused(f"{algorithm} takes 1 group in ai3, this has {shape.groups}")
    run = partial(_convolve_by_ai3, algorithm, shape)
    return PreparedConvolution(shape, algorithm, algorithm, "ai3", None, run)


def _convolve_by_ai3(algorithm: AlgorithmName, shape: ConvShape, given: Tensor, weight: Tensor) -> Tensor:
    # It reads bare addresses, so that any other layout would give wrong numbers; there is no gradient.
    tensors = given.detach().contiguous(), weight.detach().contiguous()
    steps = (*shape.padding, *shape.stride, *shape.dilation)
    output: Tensor = torch.ops.ai3.conv2d(*tensors, None, *steps, _ZEROS, shape.groups, AI3_NAMES[algorithm])
    return output


@contextmanager
def torch_precision(precision: Precision) -> Iterator[None]:
    """A context in which torch's convolutions and products on a GPU use TF32 for `tf32` only; for the whole process."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
