"""A cuDNN in Python: the functions that the project calls, on CPU tensors, with refusals as scripted."""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

SUCCESS, NOT_INITIALIZED, BAD_PARAM, NOT_SUPPORTED, ALLOC_FAILED, EXECUTION_FAILED = 0, 1001, 2000, 3000, 4003, 5000
STATUS_NAMES = {
    NOT_INITIALIZED: b"CUDNN_STATUS_NOT_INITIALIZED",
    BAD_PARAM: b"CUDNN_STATUS_BAD_PARAM",
    NOT_SUPPORTED: b"CUDNN_STATUS_NOT_SUPPORTED",
    ALLOC_FAILED: b"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    EXECUTION_FAILED: b"CUDNN_STATUS_EXECUTION_FAILED",
}


def addressed(address: int, shape: tuple[int, ...]) -> Tensor:
    """The float32 values at an address, as a tensor over that memory."""
    count = torch.Size(shape).numel()
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32).reshape(shape)


@dataclass
class FakeCudnn:
    """Statuses are 0 where nothing is scripted.

    Attributes:
        statuses: of a function, by name.
        refused: statuses of the workspace query, by algorithm number.
        refused_when_run: statuses of the forward call, by algorithm number.
        workspaces: bytes, by algorithm number; 0 for others.
        ranking: what the heuristic answers: pairs of algorithm number and status.
        ran: algorithm numbers of forward calls that succeeded.
        calls: names of all functions in their order.
        handles, described: what is alive now; a descriptor's values are those that it was set to.
    """

    statuses: dict[str, int] = field(default_factory=dict)
    refused: dict[int, int] = field(default_factory=dict)
    refused_when_run: dict[int, int] = field(default_factory=dict)
    workspaces: dict[int, int] = field(default_factory=dict)
    ranking: tuple[tuple[int, int], ...] = ((1, SUCCESS), (0, SUCCESS))
    ran: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    handles: set[int] = field(default_factory=set)
    described: dict[int, dict[str, Any]] = field(default_factory=dict)
    _next: int = 1000

    def cudnnGetVersion(self) -> int:
        return 91900

    def cudnnGetErrorString(self, status: int) -> bytes:
        return STATUS_NAMES[status]

    def _called(self, name: str) -> int:
        self.calls.append(name)
        return self.statuses.get(name, SUCCESS)

    def _new(self, pointer: Any) -> int:
        self._next += 1
        pointer._obj.value = self._next
        return self._next

    def cudnnCreate(self, handle: Any) -> int:
        status = self._called("cudnnCreate")
        if status == SUCCESS:
            self.handles.add(self._new(handle))
        return status

    def cudnnDestroy(self, handle: Any) -> int:
        self.handles.remove(handle.value)
        return self._called("cudnnDestroy")

    def cudnnSetStream(self, handle: Any, stream: int | None) -> int:
        assert handle.value in self.handles
        return self._called("cudnnSetStream")

    def _create(self, name: str, descriptor: Any) -> int:
        status = self._called(name)
        if status == SUCCESS:
            self.described[self._new(descriptor)] = {}
        return status

    def _destroy(self, name: str, descriptor: Any) -> int:
        del self.described[descriptor.value]
        return self._called(name)

    def cudnnCreateTensorDescriptor(self, descriptor: Any) -> int:
        return self._create("cudnnCreateTensorDescriptor", descriptor)

    def cudnnCreateFilterDescriptor(self, descriptor: Any) -> int:
        return self._create("cudnnCreateFilterDescriptor", descriptor)

    def cudnnCreateConvolutionDescriptor(self, descriptor: Any) -> int:
        return self._create("cudnnCreateConvolutionDescriptor", descriptor)

    def cudnnDestroyTensorDescriptor(self, descriptor: Any) -> int:
        return self._destroy("cudnnDestroyTensorDescriptor", descriptor)

    def cudnnDestroyFilterDescriptor(self, descriptor: Any) -> int:
        return self._destroy("cudnnDestroyFilterDescriptor", descriptor)

    def cudnnDestroyConvolutionDescriptor(self, descriptor: Any) -> int:
        return self._destroy("cudnnDestroyConvolutionDescriptor", descriptor)

    def cudnnSetTensor4dDescriptor(self, descriptor: Any, layout: int, kind: int, *size: int) -> int:
        assert layout == 0
        self.described[descriptor.value].update(kind=kind, size=size)
        return self._called("cudnnSetTensor4dDescriptor")

    def cudnnSetFilter4dDescriptor(self, descriptor: Any, kind: int, layout: int, *size: int) -> int:
        assert layout == 0
        self.described[descriptor.value].update(kind=kind, size=size)
        return self._called("cudnnSetFilter4dDescriptor")

    def cudnnSetConvolution2dDescriptor(self, descriptor: Any, *values: int) -> int:
        self.described[descriptor.value].update(
            padding=values[0:2], stride=values[2:4], dilation=values[4:6], mode=values[6], compute=values[7]
        )
        return self._called("cudnnSetConvolution2dDescriptor")

    def cudnnSetConvolutionGroupCount(self, descriptor: Any, groups: int) -> int:
        self.described[descriptor.value]["groups"] = groups
        return self._called("cudnnSetConvolutionGroupCount")

    def cudnnSetConvolutionMathType(self, descriptor: Any, math_type: int) -> int:
        self.described[descriptor.value]["math_type"] = math_type
        return self._called("cudnnSetConvolutionMathType")

    def cudnnGetConvolution2dForwardOutputDim(self, convolution: Any, given: Any, weight: Any, *sizes: Any) -> int:
        steps, given_size = self.described[convolution.value], self.described[given.value]["size"]
        weight_size = self.described[weight.value]["size"]
        answer = [given_size[0], weight_size[0]]
        for axis in (0, 1):
            reach = steps["dilation"][axis] * (weight_size[2 + axis] - 1) + 1
            answer.append((given_size[2 + axis] + 2 * steps["padding"][axis] - reach) // steps["stride"][axis] + 1)
        for size, value in zip(sizes, answer, strict=True):
            size._obj.value = value
        return self._called("cudnnGetConvolution2dForwardOutputDim")

    def cudnnGetConvolutionForwardWorkspaceSize(
        self, handle: Any, given: Any, weight: Any, convolution: Any, output: Any, algorithm: int, size: Any
    ) -> int:
        assert handle.value in self.handles
        size._obj.value = self.workspaces.get(algorithm, 0)
        return self._called("cudnnGetConvolutionForwardWorkspaceSize") or self.refused.get(algorithm, SUCCESS)

    def cudnnGetConvolutionForwardAlgorithm_v7(
        self, handle: Any, given: Any, weight: Any, convolution: Any, output: Any, most: int, found: Any, rows: Any
    ) -> int:
        assert len(self.ranking) <= most
        for row, (algorithm, status) in zip(rows, self.ranking, strict=False):
            row.algorithm, row.status = algorithm, status
        found._obj.value = len(self.ranking)
        return self._called("cudnnGetConvolutionForwardAlgorithm_v7")

    def cudnnConvolutionForward(
        self,
        handle: Any,
        alpha: Any,
        given_is: Any,
        given: int,
        weight_is: Any,
        weight: int,
        convolution_is: Any,
        algorithm: int,
        workspace: int | None,
        workspace_bytes: int,
        beta: Any,
        output_is: Any,
        output: int,
    ) -> int:
        assert self.calls[-1] == "cudnnSetStream"
        assert (alpha._obj.value, beta._obj.value) == (1.0, 0.0)
        status = self._called("cudnnConvolutionForward") or self.refused_when_run.get(algorithm, SUCCESS)
        if workspace_bytes < self.workspaces.get(algorithm, 0) or (workspace_bytes > 0) != (workspace is not None):
            return BAD_PARAM
        if status == SUCCESS:
            steps = self.described[convolution_is.value]
            addressed(output, self.described[output_is.value]["size"]).copy_(
                functional.conv2d(
                    addressed(given, self.described[given_is.value]["size"]),
                    addressed(weight, self.described[weight_is.value]["size"]),
                    None,
                    steps["stride"],
                    steps["padding"],
                    steps["dilation"],
                    steps["groups"],
                )
            )
            self.ran.append(algorithm)
        return status
