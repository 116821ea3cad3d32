"""The energy of a run from its processes' figures, by hand; a figure that one machine lacks is not a sum of the
others.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.k_results_aggregation import load_and_aggregate_per_process_energy_results, pool_energy
from experiment_core_utils.primitives.errors import ResultsRefused
from experiment_core_utils.records.result_files import local_energy_type, raw_result_path
from experiment_core_utils.records.text import EnergyFigures

FIGURES = (
    "total_energy_kwh", "cpu_energy_kwh", "gpu_energy_kwh", "ram_energy_kwh", "total_emissions_kg_co2",
    "duration_seconds", "gpu_counter_j", "gpu_power_integral_j",
)  # fmt: skip


def machine(*figures: float | None, **others: str) -> dict[str, Any]:
    return dict(zip(FIGURES, figures, strict=True)) | others


FIRST = machine(10.0, 1.0, 7.0, 2.0, 4.0, 60.0, 700.0, 710.0)
SECOND = machine(6.0, 2.0, 3.0, 1.0, 2.0, 90.0, 300.0, 310.0)
# Another process counts for it, so it tracks nothing itself.
SILENT = machine(*[None] * 8, reason="process 0 tracks this machine")
# A machine without GPUs has a whole total; its GPU figures are absent for good.
WITHOUT_GPU = machine(5.0, 4.0, None, 1.0, 1.0, 30.0, None, None)
# One whose GPUs are not read has none.
UNREAD = machine(None, 4.0, None, 1.0, 1.0, 30.0, None, 5.0, reason="no right", instruments_reason="no counter")


def test_figures_are_summed_over_machines_and_parted_among_all_processes() -> None:
    pooled = pool_energy([FIRST, SILENT, SECOND])
    assert pooled["total_energy_kwh"] == 16.0
    assert pooled["avg_energy_per_process_kwh"] == 16.0 / 3
    assert (pooled["cpu_energy_kwh"], pooled["gpu_energy_kwh"], pooled["ram_energy_kwh"]) == (3.0, 10.0, 3.0)
    assert (pooled["gpu_counter_j"], pooled["gpu_power_integral_j"]) == (1000.0, 1020.0)
    # At the same time, so the longest; the sum is of machine time.
    assert (pooled["duration_seconds"], pooled["total_duration_seconds"]) == (90.0, 150.0)
    assert (pooled["num_processes"], pooled["num_tracking_processes"], pooled["reason"]) == (3, 2, None)
    assert [each["process"] for each in pooled["per_process_breakdown"]] == [0, 1, 2]


def test_a_machine_without_gpus_does_not_take_the_others_figures_away() -> None:
    pooled = pool_energy([FIRST, WITHOUT_GPU])
    assert (pooled["total_energy_kwh"], pooled["gpu_energy_kwh"], pooled["gpu_counter_j"]) == (15.0, 7.0, 700.0)


def test_a_machine_that_could_not_be_read_does_and_says_why() -> None:
    pooled = pool_energy([FIRST, UNREAD])
    assert pooled["total_energy_kwh"] is pooled["gpu_energy_kwh"] is pooled["gpu_counter_j"] is None
    assert pooled["avg_energy_per_process_kwh"] is None
    assert (pooled["cpu_energy_kwh"], pooled["gpu_power_integral_j"]) == (5.0, 715.0)
    assert pooled["reason"] == "process 1: no right; no counter"


def test_where_nothing_tracked_every_process_says_why_each_reason_once() -> None:
    nothing = machine(*[None] * 8, reason="no meter", instruments_reason="no meter")
    pooled = pool_energy([nothing, SILENT])
    assert pooled["duration_seconds"] is pooled["total_energy_kwh"] is None
    assert pooled["reason"] == "process 0: no meter; process 1: process 0 tracks this machine"


@pytest.mark.parametrize("value", ["x", -1, [], 10**400, True])
@pytest.mark.parametrize("field", ["total_energy_kwh", "duration_seconds", "gpu_counter_j"])
def test_an_edited_figure_is_named_with_its_file(tmp_path: Path, field: str, value: object) -> None:
    path = raw_result_path("0001", local_energy_type(0), tmp_path)
    path.parent.mkdir(parents=True)
    figures = dict.fromkeys(EnergyFigures.__required_keys__, 1.5) | {"sources": {}, field: value}
    path.write_text(json.dumps(figures))
    with pytest.raises(ResultsRefused, match=rf"process 0 \(.*\) is broken: {field} is ") as caught:
        load_and_aggregate_per_process_energy_results("0001", 1, results_dir=tmp_path)
    assert str(path) in str(caught.value)
