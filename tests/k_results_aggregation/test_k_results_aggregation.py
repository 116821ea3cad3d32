"""The energy of processes, and their memory, become one whole."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.k_results_aggregation import load_and_aggregate_per_process_energy_results
from experiment_core_utils.primitives.device import MemoryReading
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.records.requests import merge_memory, whole_window


def test_memory_is_the_largest_of_each_figure() -> None:
    readings = [MemoryReading(10, 40, 3, None), MemoryReading(30, 20, 5, None)]
    assert merge_memory(readings) == MemoryReading(30, 40, 5, None)
    assert merge_memory([MemoryReading(None, None, 2, "cpu")]) == MemoryReading(None, None, 2, "cpu")
    assert merge_memory([]) is None


def test_memory_of_one_process_is_its_peaks_and_its_end(tmp_path: Path) -> None:
    readings = [MemoryReading(10, 40, 9, None), MemoryReading(30, 20, 5, None)]
    assert whole_window(readings) == MemoryReading(30, 40, 5, None)
    assert whole_window([]) is None


def energy(total: float | None, gpu: float | None = None, reason: str | None = None, **others: float | None) -> Any:
    """One machine's: of the total, a quarter is memory and the rest the CPU's and the GPU's."""
    rest = {"cpu_energy_kwh": None, "ram_energy_kwh": None, "total_emissions_kg_co2": None, "duration_seconds": None}
    if total is not None:
        rest = {
            "cpu_energy_kwh": total * 0.75 - (gpu or 0),
            "ram_energy_kwh": total * 0.25,
            "total_emissions_kg_co2": total / 2,
            "duration_seconds": 60.0,
        }
    rest |= {"gpu_counter_j": None, "gpu_power_integral_j": None}
    return {"total_energy_kwh": total, "gpu_energy_kwh": gpu, **rest, "reason": reason, **others}


def save_energy(folder: Path, *processes: Any) -> None:
    (folder / "raw_results" / "7").mkdir(parents=True)
    for rank, content in enumerate(processes):
        path = folder / "raw_results" / "7" / f"7_6_local_energy_results_process_{rank}.json"
        path.write_text(json.dumps(content))


def test_the_energy_of_two_machines_with_two_processes_each(tmp_path: Path) -> None:
    shards = energy(None, reason="shares its machine")
    machines = (
        energy(4.0, 2.0, gpu_counter_j=7.1e6, gpu_power_integral_j=7.2e6),
        shards,
        energy(8.0, 4.0, duration_seconds=90.0, gpu_counter_j=14e6, gpu_power_integral_j=None),
        shards,
    )
    save_energy(tmp_path, *machines)
    pooled = load_and_aggregate_per_process_energy_results("7", 4, results_dir=tmp_path)
    assert pooled == {
        "total_energy_kwh": 12.0,
        "avg_energy_per_process_kwh": 3.0,
        "cpu_energy_kwh": 3.0,  # 4 * 0.75 - 2, 8 * 0.75 - 4
        "gpu_energy_kwh": 6.0,
        "ram_energy_kwh": 3.0,
        "total_emissions_kg_co2": 6.0,
        "duration_seconds": 90.0,
        "total_duration_seconds": 150.0,
        "gpu_counter_j": 21.1e6,
        "gpu_power_integral_j": None,
        "num_processes": 4,
        "num_tracking_processes": 2,
        "per_process_breakdown": [{"process": rank, **each} for rank, each in enumerate(machines)],
        "reason": None,
    }


def test_a_machine_without_gpu_does_not_hide_the_others(tmp_path: Path) -> None:
    save_energy(tmp_path, energy(4.0, 2.0), energy(1.0, reason="gpu_energy_kwh: none in use"))
    pooled = load_and_aggregate_per_process_energy_results("7", 2, results_dir=tmp_path)
    assert (pooled["total_energy_kwh"], pooled["gpu_energy_kwh"]) == (5.0, 2.0)
    assert pooled["reason"] == "process 1: gpu_energy_kwh: none in use"


def test_a_machine_whose_gpus_were_not_read_leaves_no_total(tmp_path: Path) -> None:
    lost = energy(4.0, reason="GPUs in use are not in it") | {"total_energy_kwh": None, "total_emissions_kg_co2": None}
    save_energy(tmp_path, energy(4.0, 2.0), lost)
    pooled = load_and_aggregate_per_process_energy_results("7", 2, results_dir=tmp_path)
    for figure in ("total_energy_kwh", "avg_energy_per_process_kwh", "gpu_energy_kwh", "total_emissions_kg_co2"):
        assert pooled[figure] is None, figure  # type: ignore[literal-required]
    assert pooled["cpu_energy_kwh"] == 1.0 + 3.0
    assert pooled["reason"] == "process 1: GPUs in use are not in it"


def test_the_instruments_reasons_are_reported_too(tmp_path: Path) -> None:
    lost = energy(4.0, 2.0) | {"instruments_reason": "GPU is lost"}
    untracked = energy(4.0, 2.0, reason="no file") | {"instruments_reason": "no file"}
    save_energy(tmp_path, lost, untracked)
    pooled = load_and_aggregate_per_process_energy_results("7", 2, results_dir=tmp_path)
    assert pooled["reason"] == "process 0: GPU is lost; process 1: no file"


def test_energy_that_nobody_tracked_is_none_with_the_reason(tmp_path: Path) -> None:
    save_energy(tmp_path, energy(None, reason="not tracked"), energy(None, reason="shares"))
    pooled = load_and_aggregate_per_process_energy_results("7", 2, results_dir=tmp_path)
    assert (pooled["total_energy_kwh"], pooled["duration_seconds"], pooled["num_tracking_processes"]) == (None, None, 0)
    assert pooled["reason"] == "process 0: not tracked; process 1: shares"


def test_the_six_published_figures_are_enough(tmp_path: Path) -> None:
    published = {key: value for key, value in energy(4.0, 2.0).items() if key != "reason"}
    save_energy(tmp_path, published)
    assert load_and_aggregate_per_process_energy_results("7", 1, results_dir=tmp_path)["total_energy_kwh"] == 4.0


@pytest.mark.parametrize(
    ("num_processes", "error", "output"),
    [
        (0, ConfigurationError, "0 processes"),
        (2, ResultsError, r"the energy of process 1 \(.*\) lacks 'cpu_energy_kwh'"),
        (5, ResultsError, "no energy results of process 3, 4 in"),
    ],
)
def test_missing_energy_names_the_process(num_processes: int, error: Any, output: str, tmp_path: Path) -> None:
    save_energy(tmp_path, energy(4.0), {"total_energy_kwh": 1.0, "ram_energy_kwh": 1.0}, energy(4.0))
    with pytest.raises(error, match=output) as caught:
        load_and_aggregate_per_process_energy_results("7", num_processes, results_dir=tmp_path)
    assert "\n" not in str(caught.value)
