"""The meter with a scripted codecarbon, and the contract with the real one."""

import dataclasses
import inspect
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from experiment_core_utils.meters.codecarbon import CodecarbonMeter, codecarbon_library, gpu_missing_reason
from experiment_core_utils.meters.energy_files import REQUIRED_COLUMNS
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.scripted.scripted_codecarbon import WINDOW, ScriptedTracker, scripted_library


def test_hardware_is_probed_and_a_first_task_thrown_away_before_a_window() -> None:
    made: list[ScriptedTracker] = []
    meter = CodecarbonMeter("FRA", [3], 1, scripted_library(made))
    assert made[0].calls == ["probe", "start window 1", "stop window 1"]
    assert made[0].settings["gpu_ids"] == [3]
    meter.open()
    meter.close()
    meter.release()
    assert made[0].calls[3:] == ["start window 2", "stop window 2", "stop"]


def test_a_window_by_hand() -> None:
    meter = CodecarbonMeter("FRA", [0, 1], 2, scripted_library(rapl=True))
    meter.open()
    # Powers of this window: 1e-4, 3e-3 and 2e-4 kWh are 360, 10800 and 720 J, over 36 s.
    powers = {"cpu_power": pytest.approx(10.0), "gpu_power": pytest.approx(300.0), "ram_power": pytest.approx(20.0)}
    assert meter.close() == {
        **WINDOW,
        **powers,
        "cpu_energy_source": "rapl",
        "emissions_basis": "electricity mix of FRA",
        "gpus_in_use": 2,
    }


def test_what_was_never_sampled_is_absent() -> None:
    window = WINDOW | {"ram_used_gb": 0, "ram_utilization_percent": 0, "gpu_utilization_percent": 0, "duration": 0.0}
    meter = CodecarbonMeter(None, [], 0, scripted_library(window=window))
    meter.open()
    row = meter.close()
    assert row is not None
    assert [row[name] for name in ("cpu_utilization_percent", "ram_used_gb", "cpu_power")] == [None, None, None]
    assert (row["cpu_energy_source"], row["emissions_basis"]) == (
        "codecarbon_estimate",
        "world mean (no country given)",
    )


def test_nothing_that_could_open_a_connection_is_left_to_a_configuration_file() -> None:
    made: list[ScriptedTracker] = []
    CodecarbonMeter(None, [], 0, scripted_library(made))
    settings = made[0].settings
    assert (settings["output_methods"], settings["emissions_endpoint"], settings["cloud_provider"]) == ([], None, None)
    assert settings["electricitymaps_api_token"] == "" and settings["gpu_ids"] is None
    assert settings["allow_multiple_runs"] is True and settings["log_level"] == "error"


@pytest.mark.parametrize("fail_at", ["probe", "start window 1", "stop window 1"])
def test_a_codecarbon_that_does_not_start_is_one_line(fail_at: str) -> None:
    meter = CodecarbonMeter(None, [], 0, scripted_library(fail_at=fail_at))
    reason = "codecarbon does not track here: 'OfflineEmissionsTracker' object has no attribute '_hardware'"
    assert meter.reason == reason
    # Nor does it later.
    meter.open()
    assert meter.close() is None and meter.reason == reason


def test_a_window_that_codecarbon_did_not_begin_is_no_silence() -> None:
    meter = CodecarbonMeter(None, [], 0, scripted_library(silent_at="start window 2"))
    meter.open()
    assert meter.close() is None and str(meter.reason).startswith("codecarbon measured nothing")
    # The next window is another one.
    meter.open()
    assert meter.close() is not None and meter.reason is None


def test_windows_are_opened_and_closed_in_turn() -> None:
    meter = CodecarbonMeter(None, [], 0, scripted_library())
    with pytest.raises(ConfigurationError, match="no open window"):
        meter.close()
    meter.open()
    with pytest.raises(ConfigurationError, match="has an open window"):
        meter.open()


def test_a_country_that_codecarbon_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no electricity mix of country 'XXX'"):
        CodecarbonMeter("XXX", [], 0, scripted_library())


def test_the_real_package_takes_every_setting_and_has_every_column() -> None:
    made: list[ScriptedTracker] = []
    CodecarbonMeter(None, [], 0, scripted_library(made))
    from codecarbon.output_methods.emissions_data import EmissionsData

    real = codecarbon_library()
    accepted = {name for each in real.new_tracker.__mro__ for name in inspect.signature(each.__init__).parameters}  # type: ignore[attr-defined]
    assert not set(made[0].settings) - accepted
    assert not set(REQUIRED_COLUMNS) - {field.name for field in dataclasses.fields(EmissionsData)}
    assert {"FRA", "DEU", "USA"} <= set(real.countries())
    for method in ("start_task", "stop_task"):
        inspect.signature(getattr(real.new_tracker, method)).bind(None, "a name")


@pytest.mark.parametrize(("given", "found"), [([1], [1]), ([0, 1], [0, 1]), (["GPU-4e817856"], [])])
def test_the_real_package_finds_gpus_by_number_alone(given: list[Any], found: list[int]) -> None:
    """The last case is why numbers are given; where it fails, ids can be."""
    from codecarbon.external.hardware import GPU

    listed = [{"uuid": "GPU-9d1b0000", "gpu_index": 0}, {"uuid": "GPU-4e817856", "gpu_index": 1}]
    machine = SimpleNamespace(
        gpu_ids=given,
        num_gpus=2,
        devices=SimpleNamespace(get_gpu_static_info=lambda: listed),
        _emit_selection_warning_for_gpu_id=lambda _: None,
    )
    assert GPU._get_gpu_ids(machine) == found


@pytest.fixture(scope="module")
def real_window() -> tuple[dict[str, Any], list[Any]]:
    """One window of the real package on this machine, and the connections and look-ups that it tried."""
    tried: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> None:
        tried.append(arguments)
        raise OSError("there is no network")

    patch = pytest.MonkeyPatch()
    patch.setattr(socket, "getaddrinfo", refuse)
    patch.setattr(socket.socket, "connect", refuse)
    patch.setenv("CODECARBON_EMISSIONS_ENDPOINT", "http://localhost:1")
    patch.setenv("CODECARBON_CO2_SIGNAL_API_TOKEN", "a token")
    patch.setenv("CODECARBON_SAVE_TO_API", "true")
    patch.setenv("CODECARBON_PUE", "3")
    try:
        meter = CodecarbonMeter("FRA", [], 0)
        meter.open()
        sum(range(10**6))
        row = meter.close()
        assert row is not None
        meter.release()
    finally:
        patch.undo()
    return row, tried


def test_no_connection_is_opened_whatever_the_environment_says(real_window: tuple[dict[str, Any], list[Any]]) -> None:
    assert real_window[1] == []


def test_a_real_window_adds_up(real_window: tuple[dict[str, Any], list[Any]]) -> None:
    real_row, _ = real_window
    parts = real_row["cpu_energy"] + real_row["gpu_energy"] + real_row["ram_energy"]
    assert real_row["energy_consumed"] == pytest.approx(parts) and parts > 0
    assert real_row["cpu_power"] * real_row["duration"] == pytest.approx(real_row["cpu_energy"] * 3.6e6)
    # France's mix is far below the world's mean of 475 g/kWh.
    assert 0 < real_row["emissions"] / real_row["energy_consumed"] < 0.2
    assert (real_row["tracking_mode"], real_row["pue"], real_row["country_iso_code"]) == ("machine", 1.0, "FRA")


@pytest.mark.parametrize(
    ("window", "output", "is_whole"),
    [
        ({"gpu_energy": 0.0, "gpu_count": 0, "gpus_in_use": 2}, "no GPU here, 2 in use; it needs nvidia-smi", False),
        ({"gpu_energy": 1e-3, "gpu_count": 1, "gpus_in_use": 2}, "tracks 1 of the 2 GPUs in use", False),
        ({"gpu_energy": 0.0, "gpu_count": 0, "gpus_in_use": 0}, "none is in use", True),
    ],
)
def test_a_gpu_that_it_did_not_read_has_a_reason(window: dict[str, Any], output: str, is_whole: bool) -> None:
    reason, whole = gpu_missing_reason(WINDOW | window)
    assert output in str(reason) and whole is is_whole
