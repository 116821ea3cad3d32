"""codecarbon as one of the energy meters: joules by hand, and a reason for what it did not read."""

from typing import Any

import pytest

from experiment_core_utils.meters.codecarbon import CodecarbonEnergy, CodecarbonMeter
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.energy import EnergyReading
from tests.scripted_codecarbon import WINDOW, scripted_library
from tests.simulated_meters import ScriptedClock


def reading(seconds: float = 36.0, gpus: int = 1, **script: Any) -> EnergyReading:
    clock = ScriptedClock(1.0)
    meter = CodecarbonEnergy(CodecarbonMeter("FRA", [], gpus, scripted_library(**script)), clock)
    meter.open()
    clock.sleep(seconds)
    found = meter.close()
    meter.release()
    return found


def test_kilowatt_hours_become_joules_with_their_origin() -> None:
    found = reading()
    assert found.seconds == 36.0
    # 1e-4, 3e-3 and 2e-4 kWh.
    assert [each.joules for each in found.devices] == pytest.approx([360.0, 10800.0, 720.0])
    assert [(each.origin.component, each.origin.source, each.origin.kind) for each in found.devices] == [
        ("cpu", "codecarbon_estimate", "estimated"),
        ("gpu", "nvml_counter", "measured"),
        ("ram", "codecarbon_estimate", "estimated"),
    ]
    assert {each.bound_j for each in found.devices} == {None}


def test_a_cpu_with_its_own_counters_is_measured() -> None:
    origin = reading(rapl=True).devices[0].origin
    assert (origin.source, origin.kind, origin.basis) == ("rapl", "measured", "counter")


@pytest.mark.parametrize(
    ("window", "gpus", "said"),
    [
        ({"gpu_energy": 0.0, "gpu_count": 0}, 2, "no GPU here, 2 in use; it needs nvidia-smi"),
        ({"gpu_energy": 1e-3, "gpu_count": 1}, 2, "tracks 1 of the 2 GPUs in use"),
        ({"gpu_energy": 0.0, "gpu_count": 0}, 0, "none is in use"),
    ],
)
def test_a_gpu_that_it_did_not_read_is_none_with_the_reason(window: dict[str, Any], gpus: int, said: str) -> None:
    cpu, gpu, _ = reading(gpus=gpus, window=WINDOW | window).devices
    assert gpu.joules is None and said in str(gpu.reason)
    assert cpu.joules == pytest.approx(360.0) and cpu.reason is None


def test_a_zero_is_not_a_measurement() -> None:
    assert reading(window=WINDOW | {"ram_energy": 0.0}).devices[2].reason == "codecarbon read nothing"


@pytest.mark.parametrize(
    "script", [{"silent_at": "start window 2"}, {"fail_at": "start window 2"}, {"fail_at": "stop window 2"}]
)
def test_what_fails_in_a_window_is_the_reason_of_its_figures(script: dict[str, str]) -> None:
    found = reading(**script)
    assert [each.joules for each in found.devices] == [None, None, None]
    assert all("codecarbon" in str(each.reason) for each in found.devices)


def test_windows_are_opened_and_closed_in_turn() -> None:
    meter = CodecarbonEnergy(CodecarbonMeter(None, [], 0, scripted_library()), ScriptedClock())
    with pytest.raises(ConfigurationError, match="no open window"):
        meter.close()
    meter.open()
    with pytest.raises(ConfigurationError, match="has an open window"):
        meter.open()
