"""The check's rows on the CPU, where GPU algorithms are refused and the others run."""

import math
from time import monotonic

import torch

from experiments.performance_prediction.algorithms.convolution import ALGORITHMS, ConvShape
from experiments.performance_prediction.check_gpu import TIME_OVER, layer_line, layer_rows, model_line, model_rows
from experiments.performance_prediction.profiling.passes import kernel_names

CPU = torch.device("cpu")
LAYERS = {"strided": ConvShape(1, 4, 12, 12, 4, (3, 3), (2, 2))}


def test_every_algorithm_has_a_row_with_an_error_or_a_reason() -> None:
    rows = list(layer_rows(LAYERS, CPU, "fma", math.inf))
    assert [row.requested for row in rows] == list(ALGORITHMS)
    granted = [row for row in rows if row.reason is None]
    assert [row.requested for row in granted] == ["direct", "gemm", "guess", "torch"]
    for row in granted:
        assert row.ms is not None and row.ms > 0
        assert row.relative_error is not None and row.error_bound is not None and row.relative_error <= row.error_bound
        assert "BEYOND" not in layer_line(row)
    (fft,) = (row for row in rows if row.requested == "fft")
    assert layer_line(fft).endswith("- AlgorithmRefused: fft takes stride 1, this is 2x2")


def test_after_the_deadline_rows_say_so() -> None:
    assert {row.reason for row in layer_rows(LAYERS, CPU, "fma", monotonic() - 1)} == {TIME_OVER}
    rows = list(model_rows("alexnet", 63, CPU, monotonic() - 1))
    assert {row.reason for row in rows} == {TIME_OVER} and model_line(rows[0]).endswith(TIME_OVER)


def test_there_are_no_kernels_without_a_gpu() -> None:
    assert kernel_names(lambda: torch.zeros(1), CPU) == ()
