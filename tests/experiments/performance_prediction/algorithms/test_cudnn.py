"""The legacy cuDNN interface driven through a cuDNN in Python, on the CPU."""

import threading

import pytest
import torch
from torch.nn import functional

from experiment_core_utils.primitives.errors import ConfigurationError, OutOfMemory
from experiments.performance_prediction.algorithms.convolution import (
    AlgorithmName,
    AlgorithmRefused,
    ConvShape,
    Precision,
    PreparedConvolution,
)
from experiments.performance_prediction.algorithms.cudnn import ALGORITHM_NUMBERS, CudnnConvolution, prepare_cudnn
from experiments.performance_prediction.algorithms.cudnn_library import CudnnFailed, CudnnLibrary, status_error
from tests.experiments.performance_prediction.algorithms.fake_cudnn import (
    ALLOC_FAILED,
    BAD_PARAM,
    EXECUTION_FAILED,
    NOT_INITIALIZED,
    NOT_SUPPORTED,
    SUCCESS,
    FakeCudnn,
)

CPU = torch.device("cpu")
# 9x8, kernel 3x2, stride 2x1, padding 1x0, dilation 1x2: rows (9 + 2 - 3) // 2 + 1 = 5, columns 8 - 2·1 = 6.
SHAPE = ConvShape(2, 4, 9, 8, 6, (3, 2), (2, 1), (1, 0), (1, 2), 2)


def prepared(fake: FakeCudnn, algorithm: AlgorithmName = "gemm") -> PreparedConvolution:
    return prepare_cudnn(CudnnLibrary(fake), algorithm, SHAPE, torch.float32, "fma", CPU)


@pytest.mark.parametrize("algorithm", ALGORITHM_NUMBERS)
def test_a_granted_algorithm_is_the_one_that_runs(algorithm: AlgorithmName) -> None:
    number = ALGORITHM_NUMBERS[algorithm]
    fake = FakeCudnn(workspaces={number: 48})
    convolution = prepared(fake, algorithm)
    assert (convolution.requested, convolution.runs, convolution.engine) == (algorithm, algorithm, "cudnn")
    assert convolution.workspace_bytes == 48
    given, weight = torch.randn(2, 4, 9, 8), torch.randn(6, 2, 3, 2)
    expected = functional.conv2d(given, weight, None, (2, 1), (1, 0), (1, 2), 2)
    assert expected.shape == (2, 6, 5, 6)
    torch.testing.assert_close(convolution.run(given, weight), expected)
    assert fake.ran == [number, number]  # once in the trial, once here


def test_a_status_of_the_workspace_query_is_the_reason() -> None:
    fake = FakeCudnn(refused={3: NOT_SUPPORTED})
    with pytest.raises(AlgorithmRefused, match="CUDNN_STATUS_NOT_SUPPORTED to cudnnGetConvolutionForwardWorkspaceSize"):
        prepared(fake, "direct")
    assert fake.described == {} and fake.ran == []


def test_a_reported_workspace_does_not_mean_support_where_the_forward_call_refuses() -> None:
    fake = FakeCudnn(refused_when_run={4: NOT_SUPPORTED})
    with pytest.raises(AlgorithmRefused, match="CUDNN_STATUS_NOT_SUPPORTED to cudnnConvolutionForward"):
        prepared(fake, "fft")
    assert fake.described == {}


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (BAD_PARAM, AlgorithmRefused),
        (NOT_SUPPORTED, AlgorithmRefused),
        (ALLOC_FAILED, OutOfMemory),
        (EXECUTION_FAILED, CudnnFailed),
        (NOT_INITIALIZED, ConfigurationError),
    ],
)
def test_each_status_has_its_error(status: int, error: type[Exception]) -> None:
    fake = FakeCudnn(refused_when_run={2: status})
    with pytest.raises(error, match=fake.cudnnGetErrorString(status).decode()):
        prepared(fake)
    assert fake.described == {}


def test_statuses_of_older_and_newer_versions_are_compared_by_name() -> None:
    assert type(status_error("CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH", "f")) is AlgorithmRefused
    assert type(status_error("CUDNN_STATUS_ALLOC_FAILED", "f")) is OutOfMemory
    assert type(status_error("CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED", "f")) is ConfigurationError
    assert type(status_error("CUDNN_STATUS_MAPPING_ERROR", "f")) is CudnnFailed


@pytest.mark.parametrize(
    "function",
    [
        "cudnnCreateTensorDescriptor",
        "cudnnCreateConvolutionDescriptor",
        "cudnnSetFilter4dDescriptor",
        "cudnnSetConvolutionGroupCount",
        "cudnnGetConvolution2dForwardOutputDim",
    ],
)
def test_descriptors_are_destroyed_where_making_one_fails(function: str) -> None:
    fake = FakeCudnn(statuses={function: BAD_PARAM})
    with pytest.raises(AlgorithmRefused, match=function):
        prepared(fake)
    assert fake.described == {}


def test_closing_destroys_four_descriptors_once_and_keeps_the_handle() -> None:
    fake = FakeCudnn()
    convolution = prepared(fake)
    assert len(fake.described) == 4
    convolution.close()
    convolution.close()
    assert fake.described == {} and len(fake.handles) == 1
    assert sum(name.startswith("cudnnDestroy") for name in fake.calls) == 4


def test_guess_is_the_first_of_the_ranking_that_runs() -> None:
    fake = FakeCudnn(ranking=((6, NOT_SUPPORTED), (4, SUCCESS), (7, SUCCESS), (0, SUCCESS)), refused={4: NOT_SUPPORTED})
    convolution = prepared(fake, "guess")
    assert (convolution.requested, convolution.runs) == ("guess", "winograd nonfused")
    assert fake.ran == [7]


def test_guess_is_refused_where_nothing_of_the_ranking_runs() -> None:
    fake = FakeCudnn(ranking=((0, SUCCESS),), refused={0: NOT_SUPPORTED})
    with pytest.raises(AlgorithmRefused, match=r"no algorithm that runs \(implicit gemm: .*NOT_SUPPORTED"):
        prepared(fake, "guess")
    assert fake.described == {}


@pytest.mark.parametrize(
    ("dtype", "precision", "math_type", "data_type"),
    [
        (torch.float32, "fma", 3, 0),
        (torch.float32, "tf32", 0, 0),
        (torch.float16, "half", 1, 2),
        (torch.bfloat16, "half", 1, 9),
    ],
)
def test_math_and_data_type_are_passed_on(
    dtype: torch.dtype, precision: Precision, math_type: int, data_type: int
) -> None:
    fake = FakeCudnn()
    CudnnConvolution(CudnnLibrary(fake), SHAPE, dtype, precision, CPU)
    kinds = [values["kind"] for values in fake.described.values() if "kind" in values]
    (steps,) = (values for values in fake.described.values() if "mode" in values)
    assert kinds == [data_type] * 3
    # Cross-correlation, sums in float32.
    assert (steps["math_type"], steps["mode"], steps["compute"], steps["groups"]) == (math_type, 1, 0, 2)


@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float16, "fma"), (torch.float32, "half"), (torch.float64, "fma")]
)
def test_a_dtype_that_does_not_go_with_the_precision(dtype: torch.dtype, precision: Precision) -> None:
    with pytest.raises(ConfigurationError, match="does not go with"):
        CudnnConvolution(CudnnLibrary(FakeCudnn()), SHAPE, dtype, precision, CPU)


def test_what_cudnn_would_read_wrongly_is_not_given_to_it() -> None:
    convolution = prepared(FakeCudnn())
    weight, given = torch.randn(6, 2, 3, 2), torch.randn(2, 4, 9, 8)
    for wrong in (given[:1], given.double(), given.to(memory_format=torch.channels_last)):
        with pytest.raises(ConfigurationError, match="contiguous input"):
            convolution.run(wrong, weight)
    with pytest.raises(ConfigurationError, match="contiguous weight"):
        convolution.run(given, weight.transpose(2, 3))


def test_each_thread_has_a_handle_and_closes_its_own() -> None:
    fake = FakeCudnn()
    library = CudnnLibrary(fake)
    first = library.handle(CPU)
    others: list[int | None] = []

    def elsewhere() -> None:
        others.append(library.handle(CPU).value)
        library.close()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert library.handle(CPU) is first
    assert others[0] != first.value and fake.handles == {first.value}
    library.close()
    assert fake.handles == set()


def test_without_a_gpu_cudnn_says_that_it_does_not_start() -> None:
    with pytest.raises(ConfigurationError, match="NOT_INITIALIZED to cudnnCreate; cuDNN does not work here"):
        prepared(FakeCudnn(statuses={"cudnnCreate": NOT_INITIALIZED}))


def test_a_cudnn_without_this_interface_is_named() -> None:
    with pytest.raises(ConfigurationError, match="lacks a function"):
        CudnnLibrary(object())
