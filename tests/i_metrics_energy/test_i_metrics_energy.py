"""Published figures from windows by hand: what is summed, what is None and why."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiment_core_utils.i_metrics_energy import aggregate_energy_metrics, allocated_energy_metrics
from experiment_core_utils.meters.codecarbon import sum_windows
from experiment_core_utils.meters.energy_files import append_energy_window, append_window, emissions_path, energy_path
from experiment_core_utils.meters.energy_statistics import instrument_energy
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.records.energy import DeviceEnergy, EnergyOrigin, EnergyReading, EnergyWindow
from experiment_core_utils.records.text import EnergyFigures, EnergyMetrics
from tests.scripted.scripted_codecarbon import WINDOW

READ_WINDOW = WINDOW | {"cpu_energy_source": "rapl", "emissions_basis": "electricity mix of FRA", "gpus_in_use": 1}


BESIDE = instrument_energy((), "none here")


def whole(windows: Any) -> EnergyMetrics:
    return sum_windows(windows, BESIDE)


def place(rank: int, local_rank: int) -> Any:
    return SimpleNamespace(process_index=rank, local_process_index=local_rank)


def test_two_windows_are_summed(tmp_path: Path) -> None:
    for window in (READ_WINDOW, READ_WINDOW | {"duration": 4.0, "cpu_energy": 3e-4, "energy_consumed": 3.5e-3}):
        append_window(window, emissions_path("0001", tmp_path))
    estimate = {"source": "rapl + nvml_counter + codecarbon_estimate", "kind": "estimated"}
    assert aggregate_energy_metrics("0001", place(0, 0), tmp_path) == {
        **instrument_energy((), f"there is no {tmp_path}/energy_0001.json"),
        "total_energy_kwh": pytest.approx(6.8e-3),  # 3.3e-3 + 3.5e-3
        "cpu_energy_kwh": pytest.approx(4e-4),
        "gpu_energy_kwh": pytest.approx(6e-3),
        "ram_energy_kwh": pytest.approx(4e-4),
        "total_emissions_kg_co2": pytest.approx(0.003135),
        "duration_seconds": 40.0,
        "sources": {
            "cpu_energy_kwh": {"source": "rapl", "kind": "measured"},
            "gpu_energy_kwh": {"source": "nvml_counter", "kind": "measured"},
            "ram_energy_kwh": {"source": "codecarbon_estimate", "kind": "estimated"},
            "total_energy_kwh": estimate,
            "total_emissions_kg_co2": estimate,
        },
        "num_periods": 2,
        "tracking_mode": "machine",
        "cpu_model": "a CPU",
        "gpu_model": "1 x H200",
        "emissions_basis": "electricity mix of FRA",
        "reason": None,
    }


@pytest.mark.parametrize(
    ("window", "output", "has_total"),
    [
        ({"gpu_energy": 0.0, "gpu_count": 0, "gpus_in_use": 0}, "no GPU here, and none is in use", True),
        ({"gpu_energy": 0.0, "gpu_count": 2, "gpus_in_use": 0}, "no GPU here, and none is in use", True),
        ({"gpu_energy": 0.0, "gpu_count": 0, "gpus_in_use": 2}, "no GPU here, 2 in use; it needs nvidia-smi", False),
        ({"gpu_energy": 1e-3, "gpu_count": 1, "gpus_in_use": 2}, "tracks 1 of the 2 GPUs in use", False),
        ({"gpu_energy": 0.0, "gpu_count": 1, "gpus_in_use": 1}, "read no energy from the 1 GPUs in use", False),
    ],
)
def test_gpu_energy_that_was_not_read_is_none(window: dict[str, Any], output: str, has_total: bool) -> None:
    metrics = whole([READ_WINDOW | window])
    assert metrics["gpu_energy_kwh"] is None and "gpu_energy_kwh" not in metrics["sources"]
    assert output in str(metrics["reason"])
    assert (metrics["total_energy_kwh"] is not None) is has_total
    assert (metrics["total_emissions_kg_co2"] is not None) is has_total
    assert ("total_energy_kwh: GPUs in use are not in it" in str(metrics["reason"])) is not has_total
    assert metrics["cpu_energy_kwh"] == 1e-4


def test_one_window_without_its_gpu_leaves_none_for_all() -> None:
    assert whole([READ_WINDOW, READ_WINDOW | {"gpu_energy": 0.0}])["gpu_energy_kwh"] is None


def test_a_zero_is_not_a_measurement() -> None:
    metrics = whole([READ_WINDOW | {"cpu_energy": 0.0}])
    assert metrics["cpu_energy_kwh"] is None and metrics["reason"] == "cpu_energy_kwh: codecarbon read nothing"


def test_a_file_that_codecarbon_wrote_itself_does_not_say_how_the_cpu_was_read() -> None:
    metrics = whole([WINDOW])
    assert metrics["sources"]["cpu_energy_kwh"] == {"source": None, "kind": None}
    assert metrics["sources"]["total_energy_kwh"] == {"source": None, "kind": "estimated"}
    assert metrics["emissions_basis"] == "world mean (no country given)"
    assert whole([WINDOW | {"country_iso_code": "DEU"}])["emissions_basis"] == "electricity mix of DEU"


def test_windows_of_two_countries_say_both() -> None:
    windows = [
        READ_WINDOW,
        READ_WINDOW | {"emissions_basis": "electricity mix of USA", "cpu_energy_source": "codecarbon_estimate"},
    ]
    metrics = whole(windows)
    assert metrics["emissions_basis"] == "electricity mix of FRA, electricity mix of USA"
    assert metrics["sources"]["cpu_energy_kwh"]["kind"] == "estimated"


def test_a_process_that_did_not_track_has_no_figure_and_says_why(tmp_path: Path) -> None:
    append_window(READ_WINDOW, emissions_path("0001", tmp_path))
    shares = aggregate_energy_metrics("0001", place(5, 1), tmp_path)
    absent = aggregate_energy_metrics("0002", place(0, 0), tmp_path)
    for metrics in (shares, absent):
        assert {metrics[name] for name in EnergyFigures.__required_keys__} == {None}  # type: ignore[literal-required]
    assert shares["reason"] == "process 5 shares its machine: the first process there tracks for all"
    assert absent["reason"] == f"energy was not tracked: there is no {tmp_path}/emissions_0002.csv"


def test_a_torn_file_is_no_absence(tmp_path: Path) -> None:
    emissions_path("0001", tmp_path).write_text("duration\n")
    with pytest.raises(ResultsError, match="emissions_0001.csv"):
        aggregate_energy_metrics("0001", place(0, 0), tmp_path)


def test_what_the_instruments_measured_is_beside(tmp_path: Path) -> None:
    append_window(READ_WINDOW, emissions_path("0001", tmp_path))
    origin = EnergyOrigin("GPU-1", "gpu", "nvml_counter", "measured", "counter")
    reading = EnergyReading(36.0, (DeviceEnergy(origin, 10700.0, 40.0, None),))
    append_energy_window(EnergyWindow(reading, (), (), {}, None), "0001", energy_path("0001", tmp_path))
    metrics = aggregate_energy_metrics("0001", place(0, 0), tmp_path)
    # codecarbon's 3e-3 kWh are 10800 J; the published figure stays its own.
    assert (metrics["gpu_energy_kwh"], metrics["gpu_counter_j"], metrics["gpu_uncertainty_j"]) == (3e-3, 10700.0, 40.0)
    assert aggregate_energy_metrics("0001", place(3, 1), tmp_path)["gpu_counter_j"] is None
    # The first process of the second machine speaks for that one.
    assert aggregate_energy_metrics("0001", place(2, 0), tmp_path) == metrics


def test_joules_of_a_text_run_are_of_all_batches_or_of_none() -> None:
    batches = [{"energy_j": 6.0, "energy_reason": None}, {"energy_j": 2.0, "energy_reason": None}]
    queries = [{"energy_j": 3.0}, {"energy_j": 3.0}, {"energy_j": 2.0}]
    results: Any = {"batches": batches, "queries": queries, "total_output_tokens": 16}
    found = allocated_energy_metrics(results)
    assert found["energy_per_batch_j"] is not None and found["energy_per_query_j"] is not None
    assert (found["energy_per_batch_j"]["mean"], found["energy_per_query_j"]["n"]) == (4.0, 3)
    assert (found["energy_per_output_token_j"], found["energy_method"]) == (0.5, "apportioned")
    assert found["energy_reason"] is None
    batches[1] = {"energy_j": None, "energy_reason": "no reading"}
    lacking = allocated_energy_metrics(results)
    assert lacking.pop("energy_reason") == "no reading"
    assert set(lacking.values()) == {None} and len(lacking) == 4
