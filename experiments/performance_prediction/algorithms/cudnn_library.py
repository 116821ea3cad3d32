"""The cuDNN library that torch has loaded: its functions with checked statuses, and one handle per thread and GPU."""

import ctypes
import threading
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

from experiment_core_utils.primitives.errors import ConfigurationError, OutOfMemory, SettingError
from experiments.performance_prediction.algorithms.convolution import AlgorithmRefused

SUCCESS = 0
MAPPED_FILES = Path("/proc/self/maps")


class CudnnFailed(SettingError):
    """An error of cuDNN for another reason than that the algorithm does not cover the convolution."""


class AlgorithmPerformance(ctypes.Structure):
    """A row of the heuristic's ranking: cudnnConvolutionFwdAlgoPerf_t."""

    _fields_ = (
        ("algorithm", c_int),
        ("status", c_int),
        ("time_ms", c_float),
        ("memory", c_size_t),
        ("determinism", c_int),
        ("math_type", c_int),
        ("reserved", c_int * 3),
    )


_PROTOTYPES: Mapping[str, tuple[Any, ...]] = {
    "cudnnCreate": (POINTER(c_void_p),),
    "cudnnDestroy": (c_void_p,),
    "cudnnSetStream": (c_void_p, c_void_p),
    "cudnnCreateTensorDescriptor": (POINTER(c_void_p),),
    "cudnnSetTensor4dDescriptor": (c_void_p, *[c_int] * 6),
    "cudnnDestroyTensorDescriptor": (c_void_p,),
    "cudnnCreateFilterDescriptor": (POINTER(c_void_p),),
    "cudnnSetFilter4dDescriptor": (c_void_p, *[c_int] * 6),
    "cudnnDestroyFilterDescriptor": (c_void_p,),
    "cudnnCreateConvolutionDescriptor": (POINTER(c_void_p),),
    "cudnnSetConvolution2dDescriptor": (c_void_p, *[c_int] * 8),
    "cudnnSetConvolutionMathType": (c_void_p, c_int),
    "cudnnSetConvolutionGroupCount": (c_void_p, c_int),
    "cudnnDestroyConvolutionDescriptor": (c_void_p,),
    "cudnnGetConvolution2dForwardOutputDim": (*[c_void_p] * 3, *[POINTER(c_int)] * 4),
    "cudnnGetConvolutionForwardWorkspaceSize": (*[c_void_p] * 5, c_int, POINTER(c_size_t)),
    "cudnnGetConvolutionForwardAlgorithm_v7": (*[c_void_p] * 5, c_int, POINTER(c_int), POINTER(AlgorithmPerformance)),
    "cudnnConvolutionForward": (*[c_void_p] * 7, c_int, c_void_p, c_size_t, *[c_void_p] * 3),
}


def loaded_library_path() -> Path | None:
    """The libcudnn that this process has mapped; None where there is none."""
    for line in MAPPED_FILES.read_text().splitlines():
        path = Path(line.rpartition(" ")[2])
        if path.name.startswith("libcudnn.so"):
            return path
    return None


class CudnnLibrary:
    """The functions of cuDNN, each status turned into an error.

    Args:
        functions: the loaded library, or an object with functions of the same names in its place.

    Raises:
        ConfigurationError: a function is not there (a cuDNN that has dropped this interface).
    """

    def __init__(self, functions: Any) -> None:
        try:
            self._functions = {name: getattr(functions, name) for name in _PROTOTYPES}
            self._error_string = functions.cudnnGetErrorString
            self.version = int(functions.cudnnGetVersion())
        except AttributeError as error:
            raise ConfigurationError(f"this cuDNN lacks a function of its legacy interface: {error}") from error
        self._of_thread = threading.local()

    def call(self, name: str, *arguments: Any) -> None:
        """Call one function of the library.

        Raises:
            AlgorithmRefused: not supported, or not with these parameters.
            OutOfMemory: cuDNN could not allocate.
            ConfigurationError: cuDNN does not start here, such as without a GPU.
            CudnnFailed: any other status.
        """
        status = self._functions[name](*arguments)
        if status != SUCCESS:
            raise status_error(bytes(self._error_string(status)).decode(), name)

    def handle(self, device: torch.device) -> c_void_p:
        """This thread's handle on `device`, which must be the current one; created once, destroyed by `close`."""
        handles = self._handles()
        if device not in handles:
            created = c_void_p()
            self.call("cudnnCreate", ctypes.byref(created))
            handles[device] = created
        return handles[device]

    def close(self) -> None:
        """Destroy the handles of this thread."""
        handles = self._handles()
        while handles:
            self.call("cudnnDestroy", handles.popitem()[1])

    def _handles(self) -> dict[torch.device, c_void_p]:
        # Each thread sees only the attributes that it has set itself.
        handles: dict[torch.device, c_void_p] = self._of_thread.__dict__.setdefault("handles", {})
        return handles


def status_error(status: str, function: str) -> Exception:
    """The error for a status other than success."""
    message = f"cuDNN answers {status} to {function}"
    if "ALLOC" in status:
        return OutOfMemory(message)
    if "NOT_SUPPORTED" in status or "BAD_PARAM" in status:
        return AlgorithmRefused(message)
    if "NOT_INITIALIZED" in status or "MISMATCH" in status or "LOADING_FAILED" in status:
        return ConfigurationError(f"{message}; cuDNN does not work here")
    return CudnnFailed(message)


@cache
def loaded_cudnn() -> CudnnLibrary:
    """The cuDNN that torch uses, one object for the process.

    Raises:
        ConfigurationError: this torch has none, it cannot be opened, or it is not the one that torch uses.
    """
    used = torch.backends.cudnn.version()
    if used is None:
        raise ConfigurationError("this torch has no cuDNN; on the CPU take --device cpu")
    path = loaded_library_path()
    try:
        functions = ctypes.CDLL(str(path) if path else f"libcudnn.so.{used // 10000}")
    except OSError as error:
        raise ConfigurationError(f"the cuDNN that torch uses cannot be opened: {error}") from error
    library = CudnnLibrary(with_prototypes(functions))
    if library.version != used:
        raise ConfigurationError(f"found cuDNN {library.version}, torch uses {used}; remove the other from the path")
    return library


def with_prototypes(functions: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the arguments of the functions that are called; a missing one raises an error when it is called."""
    functions.cudnnGetVersion.restype = c_size_t
    functions.cudnnGetErrorString.argtypes = (c_int,)
    functions.cudnnGetErrorString.restype = c_char_p
    for name, arguments in _PROTOTYPES.items():
        if hasattr(functions, name):
            getattr(functions, name).argtypes = arguments
    return functions
