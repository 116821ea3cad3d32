from dataclasses import replace

import pytest

from experiment_core_utils.meters.power import allocated_to_query, energy_of_part
from experiment_core_utils.records.energy import EnergyOrigin, PowerTrace

ORIGIN = EnergyOrigin("GPU-a", "gpu", "power_integral", "measured", "instant_power")


def trace(times_s: list[float], watts: float = 100.0) -> PowerTrace:
    return PowerTrace(ORIGIN, tuple(times_s), (watts,) * len(times_s), 0, False, None)


def test_a_window_with_readings_has_their_integral() -> None:
    part = energy_of_part([trace([0.0, 0.05, 0.1, 0.15, 0.2])], 0.04, 0.16, None)
    assert part["energy_j"] == pytest.approx(100 * 0.12) and part["energy_method"] == "apportioned"
    assert part["energy_reason"] is None


def test_a_window_between_two_readings_has_no_figure() -> None:
    part = energy_of_part([trace([0.0, 0.05, 0.1, 0.15])], 0.06, 0.07, None)
    assert part["energy_j"] is None and part["energy_bound_j"] is None
    assert part["energy_reason"] == "GPU-a: there is no power reading in a window of 0.01 s"


def test_missing_readings_are_not_bridged() -> None:
    times = [0.0, 0.05, 0.1, 0.15, 0.2, 1.2, 1.25, 1.3, 1.35, 1.4]
    part = energy_of_part([trace(times)], 0.18, 1.22, None)
    assert part["energy_j"] is None
    assert part["energy_reason"] == "GPU-a: power readings are missing: 1 s lie between two, 0.05 s as a rule"
    assert energy_of_part([trace(times)], 1.22, 1.38, None)["energy_j"] == pytest.approx(16.0)


def test_devices_that_tell_in_several_ways_are_labelled_by_all_of_them() -> None:
    first = trace([0.0, 0.05, 0.1, 0.15, 0.2])
    averaged = replace(first, origin=replace(ORIGIN, device="GPU-b", basis="averaged_power"))
    other = replace(first, origin=replace(ORIGIN, device="GPU-c", source="simulated"))
    part = energy_of_part([first, averaged, other], 0.04, 0.16, None)
    assert part["energy_j"] == pytest.approx(3 * 100 * 0.12)
    assert part["energy_source"] == "power_integral+simulated"
    assert part["energy_basis"] == "instant_power+averaged_power"
    alike = energy_of_part([first, replace(first, origin=replace(ORIGIN, device="GPU-b"))], 0.04, 0.16, None)
    assert (alike["energy_source"], alike["energy_basis"]) == ("power_integral", "instant_power")


def test_without_a_trace_the_reason_stands() -> None:
    assert energy_of_part([], 0.0, 1.0, "no probe")["energy_reason"] == "no probe"


def test_a_query_has_its_tokens_share() -> None:
    assert allocated_to_query(12.0, 30, 120) == 3.0
    assert allocated_to_query(None, 30, 120) is None
