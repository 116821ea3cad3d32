"""A convolution by a named algorithm of cuDNN, on torch's tensors and stream, or a refusal.

cuDNN's legacy interface is called because it alone takes an algorithm by name: torch offers no choice, and the newer
interface numbers engines without naming algorithms.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from ctypes import byref, c_float, c_int, c_size_t, c_void_p
from functools import partial

import torch
from torch import Tensor

from experiment_core_utils.primitives.device import out_of_memory_named, synchronize
from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.performance_prediction.algorithms.convolution import (
    AlgorithmName,
    AlgorithmRefused,
    ConvShape,
    Precision,
    PreparedConvolution,
)
from experiments.performance_prediction.algorithms.cudnn_library import SUCCESS, AlgorithmPerformance, CudnnLibrary

# cudnnConvolutionFwdAlgo_t
ALGORITHM_NUMBERS: Mapping[AlgorithmName, int] = {
    "implicit gemm": 0,
    "implicit precomp gemm": 1,
    "gemm": 2,
    "direct": 3,
    "fft": 4,
    "fft tiling": 5,
    "winograd": 6,
    "winograd nonfused": 7,
}
_NAMES = {number: name for name, number in ALGORITHM_NUMBERS.items()}
# cudnnMathType_t: DEFAULT lets TF32 in, FMA keeps float32, TENSOR_OP multiplies 16-bit inputs.
_MATH_TYPES: Mapping[Precision, int] = {"tf32": 0, "half": 1, "fma": 3}
# cudnnDataType_t
_DATA_TYPES: Mapping[torch.dtype, int] = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 9}
_FLOAT, _NCHW, _CROSS_CORRELATION = 0, 0, 1


class CudnnConvolution:
    """The descriptors of one convolution.

    Args:
        library: cuDNN.
        shape: what is convolved; tensors are contiguous NCHW.
        dtype: float32 for `fma` and `tf32`, float16 or bfloat16 for `half`; sums are in float32 always.
        precision: whether products may be in TF32.
        device: a GPU.

    Raises:
        ConfigurationError: a dtype that does not go with the precision, or cuDNN does not work here.
        AlgorithmRefused: cuDNN takes no such shape.
    """

    def __init__(
        self, library: CudnnLibrary, shape: ConvShape, dtype: torch.dtype, precision: Precision, device: torch.device
    ) -> None:
        if dtype not in _DATA_TYPES or (precision == "half") != (dtype != torch.float32):
            raise ConfigurationError(
                f"precision {precision} does not go with {dtype}; float32 takes fma or tf32, 16 bits take half"
            )
        self._library, self._shape, self._dtype, self._device = library, shape, dtype, device
        self._one, self._zero = c_float(1.0), c_float(0.0)
        with ExitStack() as created:
            self._given = self._descriptor("Tensor", created)
            self._weight = self._descriptor("Filter", created)
            self._convolution = self._descriptor("Convolution", created)
            self._output = self._descriptor("Tensor", created)
            self._describe(precision)
            self._created = created.pop_all()

    def close(self) -> None:
        """Destroy the descriptors; a second call does nothing."""
        self._created.close()

    def workspace_bytes(self, algorithm: AlgorithmName) -> int:
        """The workspace that this algorithm needs; raises AlgorithmRefused where cuDNN does not grant it."""
        size = c_size_t()
        with self._on_device():
            self._library.call(
                "cudnnGetConvolutionForwardWorkspaceSize",
                *self._call_descriptors(),
                ALGORITHM_NUMBERS[algorithm],
                byref(size),
            )
        return size.value

    def heuristic_ranking(self) -> list[AlgorithmName]:
        """The algorithms that cuDNN's heuristic considers possible, best first."""
        found, rows = c_int(), (AlgorithmPerformance * len(_NAMES))()
        with self._on_device():
            self._library.call(
                "cudnnGetConvolutionForwardAlgorithm_v7", *self._call_descriptors(), len(rows), byref(found), rows
            )
        return [_NAMES[row.algorithm] for row in rows[: found.value] if row.status == SUCCESS]

    def first_that_runs(self) -> tuple[AlgorithmName, int]:
        """The first algorithm of that ranking that runs, with its workspace; AlgorithmRefused where none does."""
        refusals = []
        for candidate in self.heuristic_ranking():
            try:
                return candidate, self.tried(candidate)
            except AlgorithmRefused as refusal:
                refusals.append(f"{candidate}: {refusal}")
        listed = "; ".join(refusals) or "none at all"
        raise AlgorithmRefused(f"cuDNN's heuristic names no algorithm that runs ({listed})")

    def tried(self, algorithm: AlgorithmName) -> int:
        """Workspace bytes of an algorithm that has just run; raises as `workspace_bytes`, and OutOfMemory."""
        size = self.workspace_bytes(algorithm)
        run_on_zeros(partial(self.run, algorithm, size), self._shape, self._dtype, self._device)
        return size

    def run(self, algorithm: AlgorithmName, workspace_bytes: int, given: Tensor, weight: Tensor) -> Tensor:
        """Output of the input and weight, both contiguous; queued on torch's current stream.

        The workspace comes from torch's allocator for the time of the call.
        """
        self._check(given, weight)
        output = torch.empty(self._shape.output_shape, dtype=self._dtype, device=self._device)
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=self._device)
        with self._on_device():
            handle, source, filters, convolution, target = self._call_descriptors()
            self._library.call("cudnnSetStream", handle, current_stream(self._device))
            self._library.call(
                "cudnnConvolutionForward",
                handle,
                byref(self._one),
                source,
                given.data_ptr(),
                filters,
                weight.data_ptr(),
                convolution,
                ALGORITHM_NUMBERS[algorithm],
                workspace.data_ptr() if workspace_bytes else None,
                workspace_bytes,
                byref(self._zero),
                target,
                output.data_ptr(),
            )
        return output

    def _check(self, given: Tensor, weight: Tensor) -> None:
        # cuDNN gets bare addresses: what it would read wrongly is refused here.
        for name, tensor, size in (
            ("input", given, self._shape.input_shape),
            ("weight", weight, self._shape.weight_shape),
        ):
            found = (tuple(tensor.shape), tensor.dtype, tensor.device)
            if found != (size, self._dtype, self._device) or not tensor.is_contiguous():
                raise ConfigurationError(
                    f"prepared for a contiguous {name} {size} of {self._dtype} on {self._device}, given {found}"
                    f"{'' if tensor.is_contiguous() else ', not contiguous'}"
                )

    def _descriptor(self, kind: str, created: ExitStack) -> c_void_p:
        descriptor = c_void_p()
        self._library.call(f"cudnnCreate{kind}Descriptor", byref(descriptor))
        created.callback(self._library.call, f"cudnnDestroy{kind}Descriptor", descriptor)
        return descriptor

    def _describe(self, precision: Precision) -> None:
        call, shape, kind = self._library.call, self._shape, _DATA_TYPES[self._dtype]
        call("cudnnSetTensor4dDescriptor", self._given, _NCHW, kind, *shape.input_shape)
        call("cudnnSetFilter4dDescriptor", self._weight, kind, _NCHW, *shape.weight_shape)
        call(
            "cudnnSetConvolution2dDescriptor",
            self._convolution,
            *shape.padding,
            *shape.stride,
            *shape.dilation,
            _CROSS_CORRELATION,
            _FLOAT,
        )
        call("cudnnSetConvolutionGroupCount", self._convolution, shape.groups)
        call("cudnnSetConvolutionMathType", self._convolution, _MATH_TYPES[precision])
        sizes = [c_int() for _ in shape.output_shape]
        call(
            "cudnnGetConvolution2dForwardOutputDim",
            self._convolution,
            self._given,
            self._weight,
            *(byref(size) for size in sizes),
        )
        found = tuple(size.value for size in sizes)
        if found != shape.output_shape:
            raise ConfigurationError(f"cuDNN makes an output of {found} where {shape.output_shape} is right: {shape}")
        call("cudnnSetTensor4dDescriptor", self._output, _NCHW, kind, *shape.output_shape)

    def _call_descriptors(self) -> tuple[c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]:
        return self._library.handle(self._device), self._given, self._weight, self._convolution, self._output

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def current_stream(device: torch.device) -> int | None:
    """The address of torch's current stream; None is the default stream."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def prepare_cudnn(
    library: CudnnLibrary,
    algorithm: AlgorithmName,
    shape: ConvShape,
    dtype: torch.dtype,
    precision: Precision,
    device: torch.device,
) -> PreparedConvolution:
    """The convolution by this algorithm, or by the first that works of the heuristic's ranking for `guess`.

    Granted means that it ran once, on zeros: cuDNN reports a workspace size for some that it then refuses.

    Raises:
        AlgorithmRefused: cuDNN does not grant it.
        OutOfMemory: no memory for input, output and workspace.
        CudnnFailed: it broke off.
        ConfigurationError: as `CudnnConvolution`.
    """
    convolution = CudnnConvolution(library, shape, dtype, precision, device)
    with ExitStack() as on_failure:
        on_failure.callback(convolution.close)
        is_guess = algorithm == "guess"
        runs, size = convolution.first_that_runs() if is_guess else (algorithm, convolution.tried(algorithm))
        on_failure.pop_all()
    run: Callable[[Tensor, Tensor], Tensor] = partial(convolution.run, runs, size)
    return PreparedConvolution(shape, algorithm, runs, "cudnn", size, run, convolution.close)


def run_on_zeros(
    run: Callable[[Tensor, Tensor], Tensor], shape: ConvShape, dtype: torch.dtype, device: torch.device
) -> None:
    """Run a convolution once; raises OutOfMemory where input, output and workspace do not fit."""
    with out_of_memory_named():
        given = torch.zeros(shape.input_shape, dtype=dtype, device=device)
        weight = torch.zeros(shape.weight_shape, dtype=dtype, device=device)
        run(given, weight)
        synchronize(device)
