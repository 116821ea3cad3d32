"""Peaks by name and number format; the figures are those of the data sheets, halved where these count with sparsity."""

import pytest
import torch

from experiment_core_utils.meters.host_facts import known_peaks, peaks_on


@pytest.mark.parametrize(
    ("name", "dtype", "tera_flops", "tera_bytes"),
    [
        ("NVIDIA H200", "bfloat16", 989.5, 4.8),
        ("NVIDIA H100 80GB HBM3", "float16", 989.5, 3.35),
        ("NVIDIA H100 80GB HBM3", "float8", 1979.0, 3.35),
        ("NVIDIA H100 PCIe", "tf32", 378.0, 2.0),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312.0, 1.555),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156.0, 2.039),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5, 1.935),
        ("NVIDIA L40S", "bfloat16", 362.05, 0.864),
        ("Tesla V100-SXM2-32GB", "float16", 125.0, 0.9),
    ],
)
def test_data_sheets(name: str, dtype: str, tera_flops: float, tera_bytes: float) -> None:
    peaks = known_peaks(name, dtype)
    assert peaks.flops_per_s == pytest.approx(tera_flops * 1e12)
    assert peaks.bytes_per_s == pytest.approx(tera_bytes * 1e12)
    assert (peaks.gpu_name, peaks.dtype, peaks.reason) == (name, dtype, None)


@pytest.mark.parametrize(("name", "dtype"), [("Tesla V100-SXM2-32GB", "bfloat16"), ("NVIDIA A100-SXM4-40GB", "float8")])
def test_a_number_format_without_a_peak_keeps_the_bandwidth(name: str, dtype: str) -> None:
    peaks = known_peaks(name, dtype)
    assert peaks.flops_per_s is None and peaks.bytes_per_s is not None
    assert peaks.reason == f"the data sheet of {name} has no peak for {dtype}"


def test_a_gpu_that_is_not_known_and_a_slice_of_one_have_none() -> None:
    for name in ("NVIDIA GeForce RTX 9999", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        peaks = known_peaks(name, "bfloat16")
        assert (peaks.flops_per_s, peaks.bytes_per_s) == (None, None)
        assert str(peaks.reason).startswith(f"the peaks of {name} are not known; known are NVIDIA H100")


def test_gpus_that_compute_at_the_same_time_have_more() -> None:
    two = known_peaks("NVIDIA H200", "bfloat16").times(2)
    assert (two.flops_per_s, two.bytes_per_s) == (pytest.approx(1979e12), pytest.approx(9.6e12))
    slow = known_peaks("Tesla V100-SXM2-32GB", "bfloat16").times(3)
    assert slow.flops_per_s is None and slow.bytes_per_s == pytest.approx(2.7e12)


def test_the_cpu_has_none() -> None:
    peaks = peaks_on(torch.device("cpu"), "float32")
    assert (peaks.flops_per_s, peaks.bytes_per_s) == (None, None)
    assert peaks.reason == "cpu is not a GPU: its peak speed is unknown"
