"""The figures of a row, from hand-made passes."""

from math import prod

import pytest

from experiment_core_utils.records.requests import MemoryReading
from experiments.performance_prediction.algorithms.convolution import ConvShape
from experiments.performance_prediction.algorithms.support import CombinationReport, LayerSupport
from experiments.performance_prediction.profiling.records import (
    InferenceEnergy,
    LayerError,
    LayerPass,
    SizeProfile,
    WholeTimes,
)
from experiments.performance_prediction.profiling.tables import (
    APPORTIONED,
    LAYER_COLUMNS,
    OVERALL_COLUMNS,
    complete_row,
    layer_rows,
    measured_row,
    unmeasured_row,
)

FIRST = ConvShape(2, 3, 16, 16, 8, (3, 3), (2, 2), (1, 1))
SECOND = ConvShape(2, 8, 8, 8, 8, (3, 3), padding=(1, 1))
# 2 images of 8 channels of 8x8, from 27 and from 72 products each.
FIRST_FLOPS, SECOND_FLOPS = 2 * prod((2, 8, 8, 8)) * 27, 2 * prod((2, 8, 8, 8)) * 72
IDENTITY_CELLS = {"model": "small", "device_name": "NVIDIA H200", "precision": "fma"}
PROFILE = SizeProfile(
    input_size=16,
    report=CombinationReport(
        "small",
        "winograd",
        (
            LayerSupport("a", FIRST, "winograd", "guess", "cudnn", True, "winograd takes stride 1, this is 2x2", 1024),
            LayerSupport("b", SECOND, "winograd", "winograd", "triton", False, None, 0),
        ),
    ),
    whole=WholeTimes((0.010, 0.014), 5, True, MemoryReading(4096, 8192, 1, None)),
    layers=LayerPass((0.007, 0.009), {"a": (0.001, 0.003), "b": (0.004, 0.004)}, True, frozenset("b")),
    energy=InferenceEnergy(1.6, 0.1, 200.0, 2.0, "nvml_counter", "counter", None),
    errors={"a": LayerError(2e-7, None), "b": LayerError(None, "the reference is zero everywhere")},
    kernels={"a": ("void fill(float*)", "gemm", "gemm"), "b": ("winograd_kernel",)},
)


def test_the_whole_model_and_its_layers_stand_side_by_side() -> None:
    row = measured_row(PROFILE, batch_size=2)
    assert (row["mean"], row["min"], row["max"], row["median"]) == pytest.approx((12.0, 10.0, 14.0, 12.0))
    # Two values 4 apart: sqrt(2 * 2^2 / 1).
    assert row["std"] == pytest.approx(8**0.5)
    # Layers: 2 + 4 ms of 12.
    assert row["layers_sum_ms"] == pytest.approx(6.0) and row["uncovered_ms"] == pytest.approx(6.0)
    assert row["uncovered_share"] == pytest.approx(0.5) and row["layer_pass_mean_ms"] == pytest.approx(8.0)
    # 2 images in 12 ms.
    assert row["images_per_s"] == pytest.approx(2 / 0.012)
    assert (row["num_layers"], row["layers_fell_back"]) == (2, 1)
    assert row["fell_back_time_share"] == pytest.approx(2 / 6)
    assert row["fell_back_flops_share"] == pytest.approx(27 / 99)
    assert (row["power_mean_w"], row["energy_per_inference_j"]) == (200.0, 1.6)
    assert row["numerical_error_max"] == 2e-7 and row["conv_flops"] == FIRST_FLOPS + SECOND_FLOPS
    assert (row["peak_memory_bytes"], row["status"]) == (4096, "ok")
    assert row["launch_bound"] is True


def test_a_layer_has_its_shape_its_time_and_its_fraction() -> None:
    first, second = layer_rows(PROFILE, 4, 67e12, IDENTITY_CELLS)
    assert tuple(first) == LAYER_COLUMNS
    assert (first["layer"], first["kernel_size"], first["stride"], first["padding"]) == ("a", "3x3", "2x2", "1x1")
    assert (first["algorithm_asked"], first["algorithm_run"], first["fell_back"]) == ("winograd", "guess", True)
    assert first["kernel_names"] == "fill + gemm x2" and first["workspace_bytes"] == 1024
    assert first["mean_ms"] == pytest.approx(2.0) and second["mean_ms"] == pytest.approx(4.0)
    assert first["percentage"] == pytest.approx(100 * 2 / 6) and second["percentage"] == pytest.approx(100 * 4 / 6)
    # Of the 8 ms of an inference in the same pass, and so of its 1.6 J.
    assert first["percentage_of_inference"] == pytest.approx(25.0)
    assert (first["energy_j"], first["energy_method"]) == (pytest.approx(0.4), APPORTIONED)
    assert first["flops"] == FIRST_FLOPS and first["flops_per_s"] == pytest.approx(FIRST_FLOPS / 0.002)
    assert first["share_of_peak"] == pytest.approx(FIRST_FLOPS / 0.002 / 67e12)
    moved = 4 * (2 * 3 * 16 * 16 + 8 * 3 * 9 + 2 * 8 * 8 * 8)
    assert first["bytes"] == moved and first["arithmetic_intensity"] == pytest.approx(FIRST_FLOPS / moved)
    assert (first["launch_bound"], second["launch_bound"]) == (False, True)
    assert second["numerical_error"] is None and second["numerical_error_reason"] == "the reference is zero everywhere"


def test_what_is_not_known_is_none() -> None:
    row = layer_rows(PROFILE, 4, None, IDENTITY_CELLS)[0]
    assert row["share_of_peak"] is None
    empty = complete_row(unmeasured_row(16, "out_of_memory", "CUDA out of memory"), {"model": "small"})
    assert tuple(empty) == OVERALL_COLUMNS
    known = {name: value for name, value in empty.items() if value is not None}
    assert known == {"model": "small", "input_size": 16, "status": "out_of_memory", "reason": "CUDA out of memory"}
