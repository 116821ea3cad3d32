"""An experiment's windows by hand: what adds up, what is idle, and what a missing source leaves."""

from dataclasses import replace

import pytest

from experiment_core_utils.meters.energy_statistics import instrument_energy, window_figures
from experiment_core_utils.records.energy import (
    Basis,
    DeviceEnergy,
    EnergyOrigin,
    EnergyReading,
    EnergyWindow,
    IdlePower,
)


def origin(device: str, basis: Basis = "counter") -> EnergyOrigin:
    return EnergyOrigin(device, "gpu", "nvml_counter" if basis == "counter" else "power_integral", "measured", basis)


def measured(joules: float | None, of: EnergyOrigin, bound_j: float | None = 2.0) -> DeviceEnergy:
    return DeviceEnergy(of, joules, bound_j, None if joules is not None else "GPU is lost")


def window(*energies: DeviceEnergy, seconds: float = 10.0, idle_w: tuple[float, float] | None = None) -> EnergyWindow:
    before, after = (
        ((), ())
        if idle_w is None
        else (tuple(IdlePower(e.origin, watts, 0.5, 5.0, None) for e in energies) for watts in idle_w)
    )
    return EnergyWindow(EnergyReading(seconds, energies), before, after, {}, None)


def test_two_sources_of_one_gpu_stand_side_by_side() -> None:
    found = instrument_energy(
        [window(measured(3000.0, origin("GPU-1")), measured(3030.0, origin("GPU-1", "instant_power")), idle_w=(70, 74))]
    )
    assert (found["gpu_counter_j"], found["gpu_power_integral_j"]) == (3000.0, 3030.0)
    assert found["gpu_source_ratio"] == pytest.approx(1.01)
    # 72 W over 10 s, mean of before and after.
    assert (found["gpu_idle_j"], found["gpu_net_j"], found["gpu_uncertainty_j"]) == (720.0, 2280.0, 2.0)
    counter = found["instruments"][0]
    # Half of the drift is 2 W, the bound 0.5 W: sqrt(4.25) W over 10 s beside the window's 2 J.
    assert counter["net_uncertainty_j"] == pytest.approx((4.25 * 100 + 4) ** 0.5)
    assert counter["origin"]["source"] == "nvml_counter" and found["instruments_reason"] is None


def test_windows_and_devices_add_up() -> None:
    one = window(measured(100.0, origin("GPU-1")), measured(50.0, origin("GPU-2")))
    first, second, both = window_figures([one, one])
    assert [(each.origin.device, each.gross_j, each.seconds) for each in (first, second, both)] == [
        ("GPU-1", 200.0, 20.0),
        ("GPU-2", 100.0, 20.0),
        ("all", 300.0, 20.0),
    ]
    assert (both.uncertainty_j, both.idle_j, both.net_j) == (8.0, None, None)


def test_a_gpu_that_nothing_reads_leaves_no_sum() -> None:
    one = window(measured(100.0, origin("GPU-1")), measured(50.0, origin("GPU-2")))
    two = window(measured(100.0, origin("GPU-1")), measured(30.0, origin("GPU-1", "instant_power")))
    assert instrument_energy([replace(one, gpus=("GPU-1", "GPU-2"))])["gpu_counter_j"] == 150.0
    for each in (replace(one, gpus=("GPU-1", "GPU-2", "GPU-3")), replace(two, gpus=("GPU-1", "GPU-3"))):
        found = instrument_energy([each])
        assert (found["gpu_counter_j"], found["gpu_power_integral_j"], found["gpu_net_j"]) == (None, None, None)
        assert found["instruments_reason"] == "no sum over GPUs: nothing is read of GPU-3"
        assert {figure["origin"]["device"] for figure in found["instruments"]} <= {"GPU-1", "GPU-2"}


def test_the_idle_power_of_a_sum_is_that_of_all_its_devices() -> None:
    one = window(measured(1000.0, origin("GPU-1")), measured(900.0, origin("GPU-2")), idle_w=(20, 30))
    # 25 W of each over 10 s; after the window the second one was not read, so that of before counts.
    assert [each.idle_j for each in window_figures([one])] == [250.0, 250.0, 500.0]
    lost = replace(one, idle_after=one.idle_after[:1])
    assert [each.idle_j for each in window_figures([lost])] == [250.0, 200.0, 400.0]


def test_net_energy_may_be_negative() -> None:
    assert instrument_energy([window(measured(500.0, origin("GPU-1")), idle_w=(70, 70))])["gpu_net_j"] == -200.0


def test_a_device_that_was_lost_leaves_no_sum() -> None:
    found = instrument_energy([window(measured(100.0, origin("GPU-1")), measured(None, origin("GPU-2")))])
    assert found["gpu_counter_j"] is None and "GPU-2: GPU is lost" in str(found["instruments_reason"])
    assert found["instruments"][0]["gross_j"] == 100.0


def test_a_source_that_one_window_lacks_has_no_figure() -> None:
    windows = [
        window(measured(100.0, origin("GPU-1")), measured(101.0, origin("GPU-1", "instant_power"))),
        window(measured(100.0, origin("GPU-1"))),
    ]
    found = instrument_energy(windows)
    assert (found["gpu_counter_j"], found["gpu_power_integral_j"], found["gpu_source_ratio"]) == (200.0, None, None)
    assert found["instruments_reason"] == "1 of 2 windows lack it"


def test_a_window_without_its_instruments_leaves_no_sum() -> None:
    there = window(measured(1000.0, origin("GPU-1")), measured(50.0, origin("GPU-2")), idle_w=(70, 70))
    gone = EnergyWindow(None, (), (), {}, "GPU-1: GPU is lost")
    found = instrument_energy([there, gone])
    for figure in found["instruments"]:
        assert [figure[key] for key in ("gross_j", "uncertainty_j", "idle_j", "net_j", "net_uncertainty_j")] == [
            None
        ] * 5
        assert figure["reason"] == "1 of 2 windows lack it"
    assert (found["gpu_counter_j"], found["gpu_idle_j"], found["gpu_uncertainty_j"]) == (None, None, None)
    assert found["instruments_reason"] == "GPU-1: GPU is lost; 1 of 2 windows lack it"


def test_different_gpus_have_no_ratio() -> None:
    energies = (measured(100.0, origin("GPU-1")), measured(101.0, origin("GPU-2", "instant_power")))
    assert instrument_energy([window(*energies)])["gpu_source_ratio"] is None


def test_gpus_whose_power_is_read_in_different_ways_leave_no_sum_of_it() -> None:
    energies = [
        *(measured(joules, origin(device)) for device, joules in (("GPU-2", 50.0), ("GPU-1", 100.0))),
        measured(101.0, origin("GPU-1", "instant_power")),
        measured(49.0, origin("GPU-2", "averaged_power")),
    ]
    found = instrument_energy([window(*energies)])
    assert (found["gpu_counter_j"], found["gpu_power_integral_j"], found["gpu_source_ratio"]) == (150.0, None, None)


def test_without_instruments_everything_is_none_with_the_reason() -> None:
    nothing = EnergyWindow(None, (), (), {"GPU energy": "no GPU"}, "nothing here measures energy (GPU energy: no GPU)")
    found = instrument_energy([nothing])
    assert found["instruments"] == [] and found["gpu_counter_j"] is None
    assert found["instruments_reason"] == "nothing here measures energy (GPU energy: no GPU)"
    assert instrument_energy((), "not tracked")["instruments_reason"] == "not tracked"


def test_what_is_missing_beside_what_is_there_is_named() -> None:
    some = replace(window(measured(100.0, origin("GPU-1"))), missing={"RAPL": "not readable"})
    assert instrument_energy([some])["instruments_reason"] == "RAPL: not readable"
