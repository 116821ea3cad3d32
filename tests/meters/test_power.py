"""The trapezoid rule by hand, and power meters of simulated devices."""

import itertools
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiment_core_utils.meters.power import PowerIntegralMeter, energy_of_trace, jittered, trapezoid_j
from experiment_core_utils.primitives.clock import Clock, HostClock
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable
from experiment_core_utils.records.energy import EnergyOrigin, PowerTrace
from tests.scripted.simulated_meters import PowerCurve, ScriptedClock, SimulatedDevice, SimulatedPower, constant

ORIGIN = EnergyOrigin("GPU-0", "gpu", "power_integral", "measured", "instant_power")


def test_trapezoids_by_hand() -> None:
    times, watts = [0.0, 1.0, 3.0], [100.0, 200.0, 100.0]
    # (100 + 200) / 2 * 1 + (200 + 100) / 2 * 2; the bound is half of 100 * 1 + 100 * 2.
    assert trapezoid_j(times, watts, 0.0, 3.0) == (450.0, 150.0)
    # From 0.5 (150 W) to 2 (150 W): 175 * 0.5 + 175 * 1.
    assert trapezoid_j(times, watts, 0.5, 2.0) == (262.5, 0.5 * (0.5 * 50 + 1.0 * 50))
    # Outside the readings power stays as it was: 2 s of 100 W before and 1 s behind.
    assert trapezoid_j(times, watts, -2.0, 4.0) == (450.0 + 200.0 + 100.0, 150.0)
    assert trapezoid_j([1.0], [70.0], 0.0, 2.0) == (140.0, 0.0)


def test_with_steps_at_its_ends_a_window_is_as_its_readings_inside() -> None:
    times, watts = [0.0, 1.0, 3.0, 4.0], [70.0, 200.0, 100.0, 70.0]
    # 200 W from 0, 150 W on average from 1 to 3, 100 W to 4; the bound is 130 * 1 + half of 100 * 2 + 30 * 1.
    assert trapezoid_j(times, watts, 0.0, 4.0, has_steps_at_ends=True) == (600.0, 260.0)
    # Without a reading inside there is a line between those around it.
    assert trapezoid_j(times, watts, 1.0, 3.0, has_steps_at_ends=True) == (300.0, 100.0)


@given(
    st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.0, 700.0)), min_size=1, max_size=30),
    st.floats(0.0, 0.5),
)
@settings(max_examples=100, deadline=None)
def test_on_its_own_points_a_curve_is_integrated_exactly(steps: list[tuple[float, float]], cut: float) -> None:
    points = [(0.0, 100.0)]
    for gap_s, watts in steps:
        points.append((points[-1][0] + gap_s, watts))
    begin_s, end_s = cut * points[-1][0], points[-1][0]
    joules, _ = trapezoid_j(*zip(*points, strict=True), begin_s, end_s)
    curve = PowerCurve(points)
    assert joules == pytest.approx(curve.joules(end_s) - curve.joules(begin_s), rel=1e-9, abs=1e-9)


def metered(device: SimulatedDevice, clock: ScriptedClock, seconds: float, interval_s: float = 0.05):  # type: ignore[no-untyped-def]
    meter = PowerIntegralMeter([SimulatedPower(device)], clock, itertools.repeat(interval_s))
    meter.open()
    clock.sleep(seconds)
    return meter.close()


def test_power_is_integrated_over_the_window() -> None:
    clock = ScriptedClock()
    # A line from 0 to 400 W in 4 s; from 1 to 3: mean 200 W.
    device = SimulatedDevice(clock, PowerCurve([(0.0, 0.0), (4.0, 400.0)]), power_read_cost_s=0.001)
    clock.sleep(1.0)
    reading = metered(device, clock, 2.0)
    (energy,) = reading.devices
    assert (energy.origin.source, energy.origin.kind, energy.reason) == ("simulated", "measured", None)
    # The window begins after two readings of 1 ms, one when the meter is made: at 1.002, 100.2 W; it ends at 300.2 W.
    # To the first reading inside it and from the last, up to 51 ms each, power is as at those: 5 W more, 5 W less.
    assert reading.seconds == pytest.approx(2.0)
    assert energy.joules == pytest.approx(2.0 * (100.2 + 300.2) / 2, abs=0.15)
    assert energy.bound_j is not None and abs(energy.joules - 400.4) <= energy.bound_j < 8.0


def test_a_step_between_two_readings_is_within_the_bound() -> None:
    clock = ScriptedClock()
    device = SimulatedDevice(clock, PowerCurve([(0.0, 100.0), (1.02, 100.0), (1.02, 500.0)]))
    (energy,) = metered(device, clock, 2.0).devices
    true_j = device.true_j(0.0, 2.0)
    assert energy.joules is not None and energy.bound_j is not None
    # The step lies in an interval of 50 ms: half of 400 W * 0.05 s.
    assert energy.bound_j == pytest.approx(10.0, rel=1e-6)
    # True: 30 ms of the interval at 500 W and 20 at 100 W; the trapezoid takes 25 of each.
    assert energy.joules - true_j == pytest.approx(-400.0 * 0.005)


def square_wave(period_s: float, until_s: float) -> PowerCurve:
    """500 W in the first half of each period, 100 W in the second."""
    points = [(0.0, 500.0)]
    for place in range(round(until_s / period_s)):
        middle_s, end_s = (place + 0.5) * period_s, (place + 1) * period_s
        points += [(middle_s, 500.0), (middle_s, 100.0), (end_s, 100.0), (end_s, 500.0)]
    return PowerCurve(points)


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.999, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_what_repeats_itself_with_the_readings_is_integrated_all_the_same(fraction: float, seed: int) -> None:
    """60 s at 300 W on average are 18 kJ, read each 50 ms: some 1200 readings of 300 +- 200 W, each right by chance."""
    clock = ScriptedClock(0.01)
    device = SimulatedDevice(clock, square_wave(0.05 * fraction, 61.0))
    begin_s = clock.now_s()
    meter = PowerIntegralMeter([SimulatedPower(device)], clock, jittered(0.05, Random(seed)))
    meter.open()
    clock.sleep(60.0)
    (energy,) = meter.close().devices
    true_j = device.true_j(begin_s, begin_s + 60.0)
    assert true_j == pytest.approx(18_000.0, rel=0.01)
    assert energy.joules == pytest.approx(true_j, rel=0.06)
    assert energy.bound_j is not None and abs(energy.joules - true_j) <= energy.bound_j


def test_at_equal_distances_the_same_wave_is_tens_of_percent_off() -> None:
    clock = ScriptedClock(0.01)
    device = SimulatedDevice(clock, square_wave(0.05, 61.0))
    (energy,) = metered(device, clock, 60.0).devices
    # All readings are of 500 W, or all of 100 W.
    assert energy.joules is not None and abs(energy.joules / device.true_j(0.01, 60.01) - 1) > 0.5


def test_intervals_are_spread_around_their_mean_and_drawn_by_the_seed() -> None:
    found = list(itertools.islice(jittered(0.05, Random(7)), 10_000))
    assert min(found) >= 0.025 and max(found) <= 0.075
    # Evenly spread over 50 ms: 14.4 ms of deviation, 0.14 ms of the mean of 10,000.
    assert sum(found) / len(found) == pytest.approx(0.05, abs=0.0006)
    assert found == list(itertools.islice(jittered(0.05, Random(7)), 10_000))


def test_a_device_that_vanishes_leaves_no_energy_but_a_reason() -> None:
    clock = ScriptedClock()
    device = SimulatedDevice(clock, constant(100.0), vanishes_at_s=1.0)
    (energy,) = metered(device, clock, 2.0).devices
    assert (energy.joules, energy.bound_j) == (None, None)
    assert energy.reason == "power could not be read at the close: GPU-simulated: GPU is lost"


def test_one_device_that_vanishes_leaves_the_other_its_figure() -> None:
    clock = ScriptedClock()
    devices = [
        SimulatedDevice(clock, constant(100.0), "GPU-0", vanishes_at_s=1.0),
        SimulatedDevice(clock, constant(30.0)),
    ]
    meter = PowerIntegralMeter([SimulatedPower(each) for each in devices], clock)
    meter.open()
    clock.sleep(2.0)
    gone, there = meter.close().devices
    assert gone.joules is None and there.joules == pytest.approx(60.0)


def test_a_power_that_cannot_be_read_at_all_is_reported_at_once() -> None:
    clock = ScriptedClock()
    with pytest.raises(MeterUnavailable, match="Not Supported"):
        PowerIntegralMeter([SimulatedPower(SimulatedDevice(clock, constant(1.0), missing=frozenset({"power"})))], clock)


def test_a_window_between_two_readings_has_no_figure() -> None:
    clock = ScriptedClock()
    device = SimulatedDevice(clock, constant(70.0), power_read_cost_s=0.0003)
    meter = PowerIntegralMeter([SimulatedPower(device)], clock, itertools.repeat(0.05))
    meter.open()
    # 14 J, all of it between the reading before and the one behind, which both say 70 W.
    device.run(0.02, 700.0)
    (energy,) = meter.close().devices
    assert (energy.joules, energy.bound_j) == (None, None)
    assert energy.reason == "there is no power reading in a window of 0.02 s"


def test_short_windows_of_a_load_have_their_energy_within_the_bound_or_none() -> None:
    random, contained, absent = Random(3), 0, 0
    for _ in range(300):
        clock = ScriptedClock(1.0)
        device = SimulatedDevice(clock, constant(random.uniform(60, 120)), power_read_cost_s=0.001)
        meter = PowerIntegralMeter([SimulatedPower(device)], clock, jittered(0.05, random))
        meter.open()
        begin_s = clock.now_s()
        device.run(random.uniform(0.005, 0.1), random.uniform(200, 700))
        true_j = device.true_j(begin_s, clock.now_s())
        (energy,) = meter.close().devices
        absent += energy.joules is None
        if energy.joules is not None and energy.bound_j is not None:
            contained += abs(energy.joules - true_j) <= energy.bound_j + 1e-9
    assert 0 < absent < 300 and contained >= 0.95 * (300 - absent)


class Gap(SimulatedPower):
    """Cannot be read between two moments."""

    from_s, until_s = 0.0, 0.0

    def read_w(self) -> float:
        if self.from_s <= self._device.clock.now_s() < self.until_s:
            raise MeterUnavailable("gone for a while")
        return super().read_w()


@pytest.mark.parametrize(("gap_s", "is_known"), [(5.0, False), (0.12, True)])
def test_a_gap_in_the_readings_is_not_bridged(gap_s: float, is_known: bool) -> None:
    """What is drawn in 5 s without a reading is not known; two readings that fail are within what a gap may be."""
    clock = ScriptedClock()
    probe = Gap(SimulatedDevice(clock, constant(100.0)))
    meter = PowerIntegralMeter([probe], clock, itertools.repeat(0.05))
    meter.open()
    probe.from_s, probe.until_s = 5.0, 5.0 + gap_s
    clock.sleep(60.0)
    (energy,) = meter.close().devices
    assert (energy.joules is not None) is is_known
    if not is_known:
        assert energy.bound_j is None and energy.reason is not None
        assert energy.reason == ("power readings are missing: 5 s lie between two, 0.05 s as a rule (gone for a while)")


def test_what_no_reading_reaches_is_a_gap_too() -> None:
    trace = PowerTrace(ORIGIN, tuple(0.05 * n for n in range(21)), (100.0,) * 21, 0, False, None)
    assert energy_of_trace(trace, 0.0, 1.1).joules == pytest.approx(110.0)
    for ends in ((-3.0, 0.5), (0.5, 4.0)):
        late = energy_of_trace(trace, *ends)
        assert late.joules is None and str(late.reason).startswith("power readings are missing: 3 s")


class Slip(SimulatedPower):
    """From its third reading on it has a fault that is not a failing of the device."""

    readings = 0

    def read_w(self) -> float:
        self.readings += 1
        if self.readings > 2:
            raise ZeroDivisionError("a slip")
        return super().read_w()


@pytest.mark.parametrize("clock", [ScriptedClock(), HostClock()])
def test_a_fault_of_the_program_in_a_reading_is_raised_at_the_close(clock: Clock) -> None:
    meter = PowerIntegralMeter([Slip(SimulatedDevice(clock, constant(100.0)))], clock, itertools.repeat(0.001))
    meter.open()
    clock.sleep(0.05)
    with pytest.raises(ZeroDivisionError, match="a slip"):
        meter.close()
    meter.release()


def test_few_failed_readings_are_a_remark_and_many_are_a_reason() -> None:
    times = tuple(float(second) for second in range(19))
    few = energy_of_trace(PowerTrace(ORIGIN, times, (100.0,) * 19, 1, False, "timeout"), 0.0, 18.0)
    assert (few.joules, few.reason, few.remark) == (1800.0, None, "1 of 20 power readings failed (timeout)")
    many = energy_of_trace(PowerTrace(ORIGIN, times, (100.0,) * 19, 3, False, "timeout"), 0.0, 18.0)
    assert (many.joules, many.reason) == (None, "3 of 22 power readings failed: timeout")


def test_windows_are_opened_and_closed_in_turn_and_released() -> None:
    clock = ScriptedClock()
    meter = PowerIntegralMeter([SimulatedPower(SimulatedDevice(clock, constant(100.0)))], clock)
    with pytest.raises(ConfigurationError, match="no open window"):
        meter.close()
    meter.open()
    with pytest.raises(ConfigurationError, match="has an open window"):
        meter.open()
    meter.release()
    meter.open()
    clock.sleep(1.0)
    assert meter.close().devices[0].joules == pytest.approx(100.0)


@given(
    times=st.lists(st.floats(0, 100), min_size=1, max_size=30, unique=True).map(sorted),
    ends=st.lists(st.floats(-10, 110), min_size=2, max_size=2, unique=True).map(sorted),
    steps=st.booleans(),
)
def test_readings_far_from_a_window_do_not_count(times: list[float], ends: list[float], steps: bool) -> None:
    """A window of a long trace has the energy that all of its readings give it."""
    watts = [100.0 + 37 * place % 11 for place in range(len(times))]
    trace = PowerTrace(ORIGIN, tuple(times), tuple(watts), 0, False, None)
    energy = energy_of_trace(trace, *ends, has_steps_at_ends=steps)
    if energy.joules is None:
        assert energy.reason is not None and energy.bound_j is None
        return
    joules, bound_j = trapezoid_j(times, watts, *ends, has_steps_at_ends=steps)
    assert (energy.joules, energy.bound_j) == (pytest.approx(joules), pytest.approx(bound_j))
