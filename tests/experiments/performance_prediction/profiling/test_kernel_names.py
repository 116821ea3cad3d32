"""Lists of kernels: parted at a known one, counted, shortened. What a GPU lists needs a GPU."""

import torch

from experiments.performance_prediction.profiling.passes import counted, kernel_names_of_each, parted, without_arguments


def test_a_list_is_parted_at_its_first_name() -> None:
    assert parted(["mark", "a", "b", "mark", "mark", "a"], 3) == [("a", "b"), (), ("a",)]
    assert parted(["mark", "a"], 2) is None
    assert parted([], 0) is None


def test_a_repeated_name_is_listed_once_with_its_count() -> None:
    assert counted(["fft", "gemv", "gemv", "fft", "gemv"]) == "fft x2 + gemv x3"
    assert counted(["one"]) == "one"


def test_a_name_loses_what_the_kernel_is_called_with() -> None:
    assert without_arguments("void a::b<float, (int)3>(int, float*)") == "a::b<float, (int)3>"
    assert without_arguments("(anonymous namespace)::k<1>(int)") == "(anonymous namespace)::k<1>"
    assert without_arguments("sm80_xmma_fprop__5x_cudnn") == "sm80_xmma_fprop__5x_cudnn"


def test_there_are_no_lists_without_a_gpu() -> None:
    assert kernel_names_of_each([lambda: torch.zeros(1)], torch.device("cpu")) is None
