"""Start and stop: what is written, what is reported, and what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiment_core_utils.d_energy_tracking import start_energy_tracking, stop_energy_tracking
from experiment_core_utils.i_metrics_energy import aggregate_energy_metrics
from experiment_core_utils.meters.energy_files import read_energy_windows, read_windows
from experiment_core_utils.meters.instruments import Instruments, find_instruments
from experiment_core_utils.meters.tracked_window import log_no_kwh, log_world_mean
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable, ResultsError
from tests.meters.nvml.scripted_nvml import ScriptedEnergyNvml
from tests.scripted.scripted_codecarbon import ScriptedTracker, scripted_library
from tests.scripted.simulated_energy import device_of, instruments_of, scripted_device
from tests.scripted.simulated_meters import ScriptedClock

MAIN = SimpleNamespace(process_index=0, local_process_index=0)


def test_each_start_and_stop_is_a_row_under_the_experiments_id(tmp_path: Path) -> None:
    made: list[ScriptedTracker] = []
    for _ in range(2):
        tracker = start_energy_tracking("0001", tmp_path / "new", "FRA", library=scripted_library(made))
        path = stop_energy_tracking(tracker)
    assert path == tmp_path / "new" / "emissions_0001.csv"
    header, *rows = path.read_text().splitlines()
    assert header.startswith("experiment_id,duration,") and [row[:10] for row in rows] == ["0001,36.0,", "0001,36.0,"]
    assert [each.calls[-1] for each in made] == ["stop", "stop"]


def test_without_a_gpu_the_choice_is_codecarbons(tmp_path: Path) -> None:
    made: list[ScriptedTracker] = []
    devices = [torch.device("cpu")]
    tracker = start_energy_tracking("0001", tmp_path, "FRA", devices=devices, library=scripted_library(made))
    row = read_windows(stop_energy_tracking(tracker))[0]
    assert (row["gpus_in_use"], made[0].settings["gpu_ids"]) == (0, None)


def test_a_missing_country_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log_world_mean.cache_clear()
    start_energy_tracking("0001", tmp_path, "USA", library=scripted_library())
    assert not caplog.messages
    for experiment_id in ("0001", "0002"):
        start_energy_tracking(experiment_id, tmp_path, library=scripted_library())
    (output,) = caplog.messages
    assert output.startswith("no country was given: emissions are computed with the world's mean")


def test_a_tracker_is_stopped_once(tmp_path: Path) -> None:
    tracker = start_energy_tracking("0001", tmp_path, "FRA", library=scripted_library())
    stop_energy_tracking(tracker)
    with pytest.raises(ConfigurationError, match="experiment 0001 was stopped already"):
        stop_energy_tracking(tracker)
    assert len((tmp_path / "emissions_0001.csv").read_text().splitlines()) == 2


def test_a_window_that_was_not_measured_leaves_no_file(tmp_path: Path) -> None:
    tracker = start_energy_tracking("0001", tmp_path, "FRA", library=scripted_library(silent_at="start window 2"))
    with pytest.raises(MeterUnavailable, match="measured nothing"):
        stop_energy_tracking(tracker)
    assert not list(tmp_path.iterdir())


def test_what_could_not_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    made: list[ScriptedTracker] = []
    (tmp_path / "file").write_text("")
    with pytest.raises(MeterUnavailable, match="cannot contain an emissions file"):
        start_energy_tracking("0001", tmp_path / "file", library=scripted_library(made))
    (tmp_path / "emissions_0001.csv").write_text("something,else\n1,2\n")
    with pytest.raises(ResultsError, match="not an emissions file of codecarbon"):
        start_energy_tracking("0001", tmp_path, library=scripted_library(made))
    with pytest.raises(ConfigurationError, match="experiment id 'a/b'"):
        start_energy_tracking("a/b", tmp_path, library=scripted_library(made))
    assert not made


def test_the_real_package_from_start_to_metrics(tmp_path: Path) -> None:
    tracker = start_energy_tracking("0007", tmp_path, "FRA")
    sum(range(10**6))
    stop_energy_tracking(tracker)
    metrics = aggregate_energy_metrics("0007", MAIN, tmp_path)
    assert metrics["cpu_energy_kwh"] and metrics["ram_energy_kwh"] and metrics["duration_seconds"]
    assert metrics["emissions_basis"] == "electricity mix of FRA"


def test_the_machines_own_instruments_measure_the_same_window(tmp_path: Path) -> None:
    """The published figures stay codecarbon's; a device that draws 70 W at rest runs at 300 W for 2 s."""
    device = scripted_device()
    how: dict[str, Any] = {"library": scripted_library(), "instruments": instruments_of(device), "idle_s": 5.0}
    tracker = start_energy_tracking("0001", tmp_path, "FRA", **how)
    device.run(2.0, 300.0)
    assert stop_energy_tracking(tracker).name == "emissions_0001.csv"
    metrics = aggregate_energy_metrics("0001", MAIN, tmp_path)
    assert metrics["gpu_energy_kwh"] == 3e-3
    assert metrics["gpu_counter_j"] == pytest.approx(600.0, rel=0.01)
    assert metrics["gpu_power_integral_j"] == pytest.approx(600.0, rel=0.01)
    assert metrics["gpu_source_ratio"] == pytest.approx(1.0, rel=0.01)
    assert metrics["gpu_idle_j"] == pytest.approx(140.0, rel=0.01)
    assert metrics["gpu_net_j"] == pytest.approx(460.0, rel=0.02)
    assert metrics["gpu_uncertainty_j"] is not None
    assert abs(float(metrics["gpu_counter_j"] or 0) - 600.0) <= metrics["gpu_uncertainty_j"]
    counter, power = metrics["instruments"]
    assert (counter["origin"]["basis"], power["origin"]["basis"]) == ("counter", "instant_power")


def test_several_gpus_are_separate_and_summed_over_two_windows(tmp_path: Path) -> None:
    first = scripted_device()
    second = device_of(first.clock, 80.0, "GPU-34", read_cost_s=0.001)
    using = instruments_of(first, second)
    for _ in range(2):
        tracker = start_energy_tracking("0001", tmp_path, "FRA", library=scripted_library(), instruments=using)
        first.run(3.0, 500.0)
        stop_energy_tracking(tracker)
    metrics = aggregate_energy_metrics("0001", MAIN, tmp_path)
    by_counter = {e["origin"]["device"]: e for e in metrics["instruments"] if e["origin"]["basis"] == "counter"}
    joules = {name: figure["gross_j"] for name, figure in by_counter.items()}
    # 2 x 3 s at 500 W, and at 80 W; without idle windows there is no net.
    assert joules == {
        "GPU-12": pytest.approx(3000.0, rel=0.01),
        "GPU-34": pytest.approx(480.0, rel=0.02),
        "all": pytest.approx(3480.0, rel=0.01),
    }
    assert (metrics["gpu_counter_j"], metrics["gpu_net_j"], metrics["num_periods"]) == (joules["all"], None, 2)


class _Ticking(ScriptedEnergyNvml):
    """300 W and 80 W, counted in steps of 0.1 s; a reading takes 1 ms."""

    def __init__(self, clock: ScriptedClock) -> None:
        super().__init__(energy_mj={"GPU-0": 0, "GPU-1": 0})
        self._clock = clock

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._clock.sleep(0.001)
        return round({"GPU-0": 30_000, "GPU-1": 8_000}[handle] * int(10 * self._clock.now_s()))


def test_gpus_that_this_process_does_not_see_are_measured_through_nvml(tmp_path: Path) -> None:
    """Of two GPUs that two processes see one each; NVML does not let the third be opened."""
    for uuids, expected in ((("GPU-0", "GPU-1"), pytest.approx(760.0, rel=0.02)), (("GPU-0", "GPU-1", "GPU-2"), None)):
        clock, experiment_id = ScriptedClock(), f"of_{len(uuids)}"
        using = find_instruments(uuids, clock, _Ticking(clock), tmp_path / "no_powercap").calibrated()
        how: dict[str, Any] = {"library": scripted_library(), "instruments": using, "gpu_uuids": [*uuids, "GPU-0"]}
        tracker = start_energy_tracking(experiment_id, tmp_path, "FRA", **how)
        clock.sleep(2.0)
        row = read_windows(stop_energy_tracking(tracker))[0]
        metrics = aggregate_energy_metrics(experiment_id, MAIN, tmp_path)
        assert (row["gpus_in_use"], metrics["gpu_counter_j"]) == (len(uuids), expected)
    reason = str(metrics["instruments_reason"])
    assert "no sum over GPUs: nothing is read of GPU-2" in reason and "NVML does not open GPU-2" in reason


def test_without_instruments_the_file_beside_says_why(tmp_path: Path) -> None:
    using = Instruments(HostClock(), (), (), missing={"GPU energy": "torch sees no GPU"})
    stop_energy_tracking(start_energy_tracking("0001", tmp_path, "FRA", library=scripted_library(), instruments=using))
    metrics = aggregate_energy_metrics("0001", MAIN, tmp_path)
    assert metrics["gpu_counter_j"] is None and metrics["gpu_energy_kwh"] == 3e-3
    assert "nothing on this machine measures energy" in str(metrics["instruments_reason"])


def test_a_gpu_that_vanishes_in_the_window_is_reported(tmp_path: Path) -> None:
    device = scripted_device(vanishes_at_s=9.0)
    tracker = start_energy_tracking(
        "0001", tmp_path, "FRA", library=scripted_library(), instruments=instruments_of(device)
    )
    device.run(20.0, 300.0)
    stop_energy_tracking(tracker)
    metrics = aggregate_energy_metrics("0001", MAIN, tmp_path)
    assert (metrics["gpu_counter_j"], metrics["gpu_power_integral_j"], metrics["gpu_source_ratio"]) == (None,) * 3
    assert "GPU is lost" in str(metrics["instruments_reason"])


@pytest.mark.parametrize("script", [{"fail_at": "probe"}, {"fail_at": "start window 2"}, {"fail_at": "stop window 2"}])
def test_what_the_instruments_measured_outlives_codecarbon(
    script: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails when it is made, at the start and at the stop; the device runs at 300 W for 2 s all the same."""
    log_no_kwh.cache_clear()
    device = scripted_device()
    tracker = start_energy_tracking(
        "0001", tmp_path, "FRA", library=scripted_library(**script), instruments=instruments_of(device)
    )
    device.run(2.0, 300.0)
    assert stop_energy_tracking(tracker) == tmp_path / "energy_0001.json"
    assert [path.name for path in tmp_path.iterdir()] == ["energy_0001.json"]
    metrics = aggregate_energy_metrics("0001", MAIN, tmp_path)
    assert metrics["gpu_counter_j"] == pytest.approx(600.0, rel=0.01)
    assert metrics["duration_seconds"] == pytest.approx(2.0, rel=0.02)
    assert (metrics["total_energy_kwh"], metrics["gpu_energy_kwh"], metrics["num_periods"]) == (None, None, 1)
    assert str(metrics["reason"]).startswith("codecarbon lacks 1 of 1 window: codecarbon does not track here")
    assert "codecarbon does not track here" in caplog.text and "no energy in kWh" in caplog.text


def test_rows_of_some_windows_are_not_the_energy_of_all(tmp_path: Path) -> None:
    device = scripted_device()
    for script in ({}, {"silent_at": "start window 2"}):
        library, using = scripted_library(**script), instruments_of(device)  # type: ignore[arg-type]
        tracker = start_energy_tracking("0001", tmp_path, "FRA", library=library, instruments=using)
        device.run(2.0, 300.0)
        stop_energy_tracking(tracker)
    assert len(read_windows(tmp_path / "emissions_0001.csv")) == 1
    metrics = aggregate_energy_metrics("0001", MAIN, tmp_path)
    assert (metrics["total_energy_kwh"], metrics["num_periods"]) == (None, 2)
    assert metrics["gpu_counter_j"] == pytest.approx(1200.0, rel=0.01)
    assert str(metrics["reason"]).startswith("codecarbon lacks 1 of 2 windows: codecarbon measured nothing")


def test_a_row_is_written_whether_or_not_codecarbons_threads_end(tmp_path: Path) -> None:
    tracker = start_energy_tracking("0001", tmp_path, "FRA", library=scripted_library(fail_at="stop"))
    assert len(read_windows(stop_energy_tracking(tracker))) == 1


def test_where_codecarbons_file_cannot_be_written_the_other_one_is(tmp_path: Path) -> None:
    device = scripted_device()
    tracker = start_energy_tracking(
        "0001", tmp_path, "FRA", library=scripted_library(), instruments=instruments_of(device)
    )
    device.run(2.0, 300.0)
    (tmp_path / "emissions_0001.csv").mkdir()
    with pytest.raises(ResultsError, match="emissions_0001.csv cannot be read"):
        stop_energy_tracking(tracker)
    (window,) = read_energy_windows(tmp_path / "energy_0001.json")
    assert window.has_figure and "emissions_0001.csv cannot be read" in str(window.codecarbon_reason)


def test_with_neither_source_nothing_is_started(tmp_path: Path) -> None:
    nothing = Instruments(HostClock(), (), (), missing={"GPU energy": "torch sees no GPU"})
    with pytest.raises(MeterUnavailable, match="codecarbon does not track here.*nothing on this machine measures"):
        start_energy_tracking("0001", tmp_path, "FRA", library=scripted_library(fail_at="probe"), instruments=nothing)
    assert not list(tmp_path.iterdir())


def test_idle_power_is_not_measured_where_the_devices_are_not_at_rest(tmp_path: Path) -> None:
    device = scripted_device()
    how: dict[str, Any] = {"library": scripted_library(), "instruments": instruments_of(device), "idle_s": 5.0}
    tracker = start_energy_tracking("0001", tmp_path, "FRA", **how)
    started_s = device.clock.now_s()
    stop_energy_tracking(tracker, is_at_rest=False)
    assert device.clock.now_s() - started_s < 1.0
