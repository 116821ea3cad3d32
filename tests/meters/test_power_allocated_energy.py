from dataclasses import replace
from typing import Any

import pytest

from experiment_core_utils.meters.power import (
    ESTIMATE_TOO_COARSE,
    allocated_to_query,
    allocated_to_runs,
    energies_of_runs,
    energy_of_part,
)
from experiment_core_utils.records.energy import ActEnergy, EnergyOrigin, PowerTrace

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


def act(joules: float | None, bound_j: float | None = None, **origin: Any) -> ActEnergy:
    reason = None if joules else "GPU is lost"
    return ActEnergy(replace(ORIGIN, **origin), joules, bound_j, 1.0, 2.0, 2.0, "acts", reason)


def test_runs_shorter_than_the_readings_have_the_mean_power_of_those_around_them() -> None:
    """100 W at 0 s, 300 W at 1 s, 300 W at 2 s: 200 J in the first second, 300 J in the second."""
    readings = PowerTrace(ORIGIN, (0.0, 1.0, 2.0), (100.0, 300.0, 300.0), 0, False, None)
    joules, bounds = energies_of_runs(readings, [[(0.0, 0.5)], [(0.5, 1.5)], [(1.5, 1.75), (1.75, 2.0)]])
    assert joules == pytest.approx([100.0, 250.0, 150.0])
    # A step of 200 W for half a second each.
    assert bounds == pytest.approx([100.0, 100.0, 0.0])


def test_the_parts_of_a_window_add_up_to_it() -> None:
    """By power 100, 200 and 300 J are read; the counter says 1400 J."""
    readings = PowerTrace(ORIGIN, (0.0, 1.0, 2.0, 3.0, 4.0), (100.0, 100.0, 300.0, 300.0, 300.0), 0, False, None)
    runs = [[(0.0, 1.0)], [(1.0, 2.0)], [(2.0, 3.0)]]
    found = allocated_to_runs(act(1400.0, 70.0, source="nvml_counter", basis="counter"), [readings], runs)
    assert [each.joules for each in found] == [
        pytest.approx(1400 / 6), pytest.approx(2800 / 6), pytest.approx(700.0),
    ]  # fmt: skip
    # The step of 200 W in the second run, and each one's part of the window's 70 J.
    assert [each.bound_j for each in found] == [
        pytest.approx(70 / 6), pytest.approx(1400 * 200 / 600 + 140 / 6), pytest.approx(35.0),
    ]  # fmt: skip
    assert {(each.method, each.origin and each.origin.source) for each in found} == {("apportioned", "nvml_counter")}


def test_without_power_of_its_devices_a_window_is_divided_by_time() -> None:
    runs = [[(0.0, 1.0), (4.0, 5.0)], [(1.0, 4.0), (5.0, 8.0)]]
    # Power of a GPU says nothing of a CPU's energy.
    found = allocated_to_runs(act(80.0, 1.0, component="cpu"), [trace([0.0, 2.0, 4.0, 6.0, 8.0])], runs)
    assert [(each.joules, each.bound_j, each.method) for each in found] == [
        (20.0, None, "apportioned by time"), (60.0, None, "apportioned by time"),
    ]  # fmt: skip
    # Nor do readings of which most are missing.
    gone = replace(trace([0.0, 8.0]), num_failed=9, failure="lost")
    assert [each.method for each in allocated_to_runs(act(80.0), [gone], runs)] == ["apportioned by time"] * 2


@pytest.mark.parametrize(
    ("total", "reason"),
    [
        (None, "the window has no energy"),
        (act(None), "GPU is lost"),
        (act(5.0, kind="estimated"), ESTIMATE_TOO_COARSE),
    ],
)
def test_what_is_not_measured_is_not_divided(total: ActEnergy | None, reason: str) -> None:
    found = allocated_to_runs(total, [], [[(0.0, 1.0)], [(1.0, 2.0)]])
    assert [(each.joules, each.bound_j, each.method, each.reason) for each in found] == [(None, None, None, reason)] * 2
