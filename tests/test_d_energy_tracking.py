"""Start and stop: what is written, what is said, and what is refused."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from experiment_core_utils.d_energy_tracking import _say_world_mean, start_energy_tracking, stop_energy_tracking
from experiment_core_utils.i_metrics_energy import aggregate_energy_metrics
from experiment_core_utils.meters.emissions_file import read_windows
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable, ResultsError
from tests.scripted_codecarbon import ScriptedTracker, scripted_library

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


def test_a_missing_country_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _say_world_mean.cache_clear()
    start_energy_tracking("0001", tmp_path, "USA", library=scripted_library())
    assert not caplog.messages
    for experiment_id in ("0001", "0002"):
        start_energy_tracking(experiment_id, tmp_path, library=scripted_library())
    (said,) = caplog.messages
    assert said.startswith("no country was given: emissions are computed with the world's mean")


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
    with pytest.raises(MeterUnavailable, match="cannot hold an emissions file"):
        start_energy_tracking("0001", tmp_path / "file", library=scripted_library(made))
    (tmp_path / "emissions_0001.csv").write_text("something,else\n1,2\n")
    with pytest.raises(ResultsError, match="no emissions file of codecarbon"):
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
