"""Ticks of simulated counters: how long they are, what a reading costs, and when the next one comes."""

import pytest

from experiment_core_utils.meters.counters import EdgeWatch, calibrate_tick, wait_for_edges
from experiment_core_utils.primitives.clock import Clock, HostClock
from experiment_core_utils.records.energy import TickCalibration
from tests.scripted.simulated_meters import ScriptedClock, SimulatedCounter, SimulatedDevice, constant


@pytest.mark.parametrize("tick_s", [0.1, 0.02])
def test_the_tick_and_the_cost_of_a_reading_are_found(tick_s: float) -> None:
    device = SimulatedDevice(ScriptedClock(5.0), constant(76.0), tick_s=tick_s, phase_s=0.013, read_cost_s=0.0038)
    found = calibrate_tick(SimulatedCounter(device), device.clock)
    # A tick is seen up to a reading and a pause late: 4.3 ms.
    assert found.tick_s == pytest.approx(tick_s, abs=0.0043)
    assert found.longest_tick_s == pytest.approx(tick_s, abs=0.0044)
    assert found.read_cost_s == pytest.approx(0.0038)
    assert (found.num_ticks, found.reason) == (20, None)


def test_a_counter_that_is_slower_to_read_than_to_advance_ticks_with_every_reading() -> None:
    device = SimulatedDevice(ScriptedClock(5.0), constant(76.0), tick_s=0.001, read_cost_s=0.0038)
    found = calibrate_tick(SimulatedCounter(device), device.clock)
    assert found.tick_s == pytest.approx(0.0043)


def test_a_counter_that_stands_still_has_no_tick_but_a_reason() -> None:
    device = SimulatedDevice(ScriptedClock(5.0), constant(0.0), read_cost_s=0.001)
    found = calibrate_tick(SimulatedCounter(device), device.clock)
    assert found == TickCalibration(None, None, pytest.approx(0.001), 0, "the counter did not advance for 2 s")


def test_a_counter_that_goes_away_has_no_tick_but_a_reason() -> None:
    device = SimulatedDevice(ScriptedClock(5.0), constant(76.0), vanishes_at_s=5.35)
    found = calibrate_tick(SimulatedCounter(device), device.clock)
    assert (found.tick_s, found.reason) == (None, "the counter could not be read: GPU-simulated: GPU is lost")


def test_each_counters_next_tick_lies_between_the_readings_around_it() -> None:
    clock = ScriptedClock(5.0)
    devices = [
        SimulatedDevice(clock, constant(100.0), f"GPU-{place}", phase_s=phase_s, read_cost_s=0.004)
        for place, phase_s in enumerate((0.03, 0.07))
    ]
    edges = wait_for_edges([SimulatedCounter(each) for each in devices], clock)
    for edge, tick_at_s, joules in zip(edges, (5.03, 5.07), (503.0, 507.0), strict=True):
        assert edge.earliest_s <= tick_at_s <= edge.latest_s
        assert abs(edge.at_s - tick_at_s) <= edge.jitter_s <= 0.0085
        assert edge.joules == pytest.approx(joules)
        assert edge.reason is None


def test_ticks_are_watched_beside_the_running_code() -> None:
    clock = ScriptedClock(5.0)
    device = SimulatedDevice(clock, constant(100.0), phase_s=0.05, read_cost_s=0.002)
    watch = EdgeWatch([SimulatedCounter(device)], clock)
    device.run(0.04, 300.0)
    assert not watch.is_done
    device.run(0.04, 300.0)
    assert watch.is_done and clock.now_s() == pytest.approx(5.08)
    watch.stop()
    assert watch.edges[0].earliest_s <= 5.05 <= watch.edges[0].latest_s


def test_a_counter_without_a_next_tick_says_why() -> None:
    clock = ScriptedClock(5.0)
    still = SimulatedDevice(clock, constant(0.0))
    gone = SimulatedDevice(clock, constant(1.0), vanishes_at_s=5.01)
    first, second = wait_for_edges([SimulatedCounter(still), SimulatedCounter(gone)], clock)
    assert first.reason == "the counter did not advance from 0.000 J"
    assert second.reason == "the counter could not be read: GPU-simulated: GPU is lost"


@pytest.mark.parametrize("clock", [ScriptedClock(5.0), HostClock()])
def test_a_fault_of_the_program_in_a_poll_is_raised_and_not_waited_for(clock: Clock) -> None:
    class Slip(SimulatedCounter):
        def read_j(self) -> float:
            raise ZeroDivisionError("a slip")

    with pytest.raises(ZeroDivisionError, match="a slip"):
        wait_for_edges([Slip(SimulatedDevice(clock, constant(100.0)))], clock)
