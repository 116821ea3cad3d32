"""The scripted clock and devices, by hand."""

import pytest

from experiment_core_utils.primitives.errors import MeterUnavailable
from tests.scripted.simulated_meters import (
    PowerCurve,
    ScriptedClock,
    SimulatedCounter,
    SimulatedDevice,
    SimulatedPower,
    constant,
)


def test_repeated_calls_come_at_their_times_and_what_they_take_passes_for_them_alone() -> None:
    clock = ScriptedClock()
    moments = list[tuple[str, float]]()

    def slow() -> None:
        moments.append(("slow", clock.now_s()))
        clock.sleep(0.5)

    # Every 1 s after the end of the last: at 1, 2.5, 4.
    repeating = clock.every(1.0, slow)
    clock.every(2.0, lambda: moments.append(("quick", clock.now_s())))
    clock.sleep(4.5)
    assert moments == [("slow", 1.0), ("quick", 2.0), ("slow", 2.5), ("slow", 4.0), ("quick", 4.0)]
    assert clock.now_s() == 4.5
    repeating.stop()
    clock.sleep(1.0)
    assert len(moments) == 5


def test_what_a_call_raises_is_raised_when_it_is_stopped_not_where_time_passes() -> None:
    clock, calls = ScriptedClock(), list[float]()

    def call() -> None:
        calls.append(clock.now_s())
        raise ZeroDivisionError("a slip")

    repeating = clock.every(1.0, call)
    clock.sleep(5.0)
    assert (calls, repeating.has_failed, clock.now_s()) == ([1.0], True, 5.0)
    with pytest.raises(ZeroDivisionError, match="a slip"):
        repeating.stop()
    repeating.stop()


def test_a_curve_is_integrated_along_its_lines_and_jumps() -> None:
    # 100 W to second 1, a line up to 300 W at second 3, a jump to 50 W that stays.
    curve = PowerCurve([(0.0, 100.0), (1.0, 100.0), (3.0, 300.0), (3.0, 50.0)])
    assert [curve.watts(at) for at in (-1.0, 0.5, 2.0, 3.0, 9.0)] == [100.0, 100.0, 200.0, 50.0, 50.0]
    assert curve.joules(1.0) == 100.0
    assert curve.joules(2.0) == 100.0 + 150.0
    assert curve.joules(3.0) == 100.0 + 400.0
    assert curve.joules(5.0) == 500.0 + 100.0
    assert curve.joules(-2.0) == -200.0


def test_what_runs_on_a_device_takes_the_place_of_its_idle_power() -> None:
    clock = ScriptedClock()
    device = SimulatedDevice(clock, constant(50.0))
    clock.sleep(1.0)
    device.run(2.0, 300.0)
    device.run(1.0, 100.0)
    clock.sleep(1.0)
    # 50 W for 1 s, 300 W for 2 s, 100 W for 1 s, 50 W for 1 s.
    assert device.true_j(0.0, 5.0) == 50 + 600 + 100 + 50
    assert device.true_j(0.5, 1.5) == 25 + 150
    assert device.true_j(2.0, 3.5) == 300 + 50
    assert [device.true_watts(at) for at in (0.5, 1.0, 2.9, 3.0, 4.0)] == [50.0, 300.0, 300.0, 100.0, 50.0]


def test_the_counter_shows_the_last_tick_in_millijoules_in_the_middle_of_the_reading() -> None:
    clock = ScriptedClock(start_s=10.0)
    device = SimulatedDevice(clock, constant(100.0), tick_s=0.1, phase_s=0.03, read_cost_s=0.02, starts_at_j=7.0)
    counter = SimulatedCounter(device)
    # The value of second 10.01; the last tick was at 9.93: 993 J and the 7 it began with.
    assert counter.read_j() == 1000.0
    assert clock.now_s() == pytest.approx(10.02)
    # The tick at 10.03 adds 0.1 s of 100 W.
    assert counter.read_j() == 1010.0
    assert SimulatedPower(device).read_w() == 100.0


def test_wrap_reset_missing_and_vanishing_are_scripted() -> None:
    clock = ScriptedClock(start_s=1.0)
    device = SimulatedDevice(clock, constant(100.0), wraps_at_j=250.0, resets_at_s=(5.0,), vanishes_at_s=7.0)
    counter = SimulatedCounter(device)
    shown = []
    for _ in range(6):
        shown.append(counter.read_j())
        clock.sleep(1.0)
    assert shown == [100.0, 200.0, 50.0, 150.0, 0.0, 100.0]
    with pytest.raises(MeterUnavailable, match="GPU is lost"):
        counter.read_j()
    with pytest.raises(MeterUnavailable, match="Not Supported"):
        SimulatedCounter(SimulatedDevice(clock, constant(1.0), missing=frozenset({"energy"}))).read_j()
    with pytest.raises(MeterUnavailable, match="Not Supported"):
        SimulatedPower(SimulatedDevice(clock, constant(1.0), missing=frozenset({"power"}))).read_w()


def test_an_averaged_power_reading_lags_behind_a_step() -> None:
    clock = ScriptedClock(start_s=1.0)
    device = SimulatedDevice(clock, PowerCurve([(0.0, 100.0), (2.0, 100.0), (2.0, 500.0)]), averaged_over_s=1.0)
    probe = SimulatedPower(device)
    assert probe.origin.basis == "averaged_power"
    clock.sleep(1.25)
    # A quarter of the last second at 500 W, three quarters at 100 W.
    assert probe.read_w() == pytest.approx(200.0)
