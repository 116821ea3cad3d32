"""Load of a window by hand: each sample stands for the time before it, what was not reported counts nowhere."""

from experiment_core_utils.records.compute import (
    LoadSample,
    LoadTrace,
    fraction_of_peak,
    memory_parts,
    memory_timeline,
    utilisation_of,
)

# 1 s, then 3 s; the second GPU is reported once, the third never.
TRACE = LoadTrace(
    (
        LoadSample(1.0, 1.0, None, (80.0, 10.0, None), 100, 7, 9),
        LoadSample(4.0, 3.0, 50.0, (40.0, None, None), 300, None, None),
    ),
    interval_s=0.5,
    reason="GPU 2: not supported",
)


def test_means_are_weighted_by_time_and_peaks_are_of_single_samples() -> None:
    assert utilisation_of(TRACE) == {
        "gpu_utilization_percent": [(80 * 1 + 40 * 3) / 4, 10.0, None],
        "gpu_utilization_percent_max": [80.0, 10.0, None],
        "cpu_usage_percent": 50.0,
        "cpu_usage_percent_max": 50.0,
        "cpu_memory_usage_bytes": (100 * 1 + 300 * 3) / 4,
        "cpu_memory_usage_bytes_max": 300,
        "num_samples": 2,
        "sample_interval_s": 0.5,
        "reason": "GPU 2: not supported",
    }


def test_of_a_window_without_length_the_last_sample_stands() -> None:
    trace = LoadTrace(
        (LoadSample(0.0, 0.0, 20.0, (), 100, None, None), LoadSample(0.0, 0.0, 60.0, (), 200, 1, 2)), 1, None
    )
    found = utilisation_of(trace)
    assert (found["cpu_usage_percent"], found["cpu_memory_usage_bytes"]) == (60.0, 200)
    assert found["gpu_utilization_percent"] == []


def test_the_timeline_keeps_every_moment() -> None:
    assert memory_timeline(TRACE).content() == {
        "interval_s": 0.5,
        "samples": [
            {"seconds": 1.0, "allocated_bytes": 7, "reserved_bytes": 9, "process_rss_bytes": 100},
            {"seconds": 4.0, "allocated_bytes": None, "reserved_bytes": None, "process_rss_bytes": 300},
        ],
    }


def test_a_fraction_of_a_peak() -> None:
    assert fraction_of_peak(300.0, 2.0, 1000.0) == 0.15
    assert fraction_of_peak(None, 2.0, 1000.0) is None
    assert fraction_of_peak(300.0, None, 1000.0) is None
    assert fraction_of_peak(300.0, 0.0, 1000.0) is None
    assert fraction_of_peak(300.0, 2.0, None) is None


def test_activations_are_the_rest_of_the_peak() -> None:
    found = memory_parts(10_000, 5000, 848, 777)
    assert found == {
        "weights_bytes": 5000,
        "kv_cache_bytes": 848,
        "activation_bytes": 4152,
        "process_rss_bytes": 777,
        "parts_reason": None,
    }


def test_without_a_peak_there_are_no_activations() -> None:
    found = memory_parts(None, 5000, 848, 777, "no CUDA device")
    assert (found["activation_bytes"], found["kv_cache_bytes"], found["parts_reason"]) == (None, 848, "no CUDA device")


def test_parts_that_are_more_than_the_peak_leave_no_rest() -> None:
    found = memory_parts(5000, 5000, 1, 777)
    assert found["activation_bytes"] is None
    assert found["parts_reason"] == "weights and cache are more than the peak of 5000 bytes on this GPU"
