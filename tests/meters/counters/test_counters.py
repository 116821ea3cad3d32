"""Windows of simulated counters: exact integrals, bounds that hold, and everything that can go wrong with a counter."""

import math

import numpy as np
import pytest

from experiment_core_utils.meters.counters import CounterMeter
from experiment_core_utils.meters.energy_statistics import summed_reading
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable
from experiment_core_utils.records.energy import EnergyReading
from tests.scripted.simulated_meters import (
    PowerCurve,
    ScriptedClock,
    SimulatedCounter,
    SimulatedDevice,
    SimulatedPower,
    constant,
)


def meter_of(*devices: SimulatedDevice, is_aligned: bool = False) -> CounterMeter:
    ticks_s = {each.name: each.tick_s for each in devices}
    probes = [SimulatedPower(each) for each in devices if "power" not in each.missing]
    return CounterMeter([SimulatedCounter(each) for each in devices], devices[0].clock, ticks_s, probes, is_aligned)


def window(seconds: float, *devices: SimulatedDevice, is_aligned: bool = False) -> EnergyReading:
    meter = meter_of(*devices, is_aligned=is_aligned)
    meter.open()
    devices[0].clock.sleep(seconds)
    return meter.close()


def random_curve(random: np.random.Generator) -> PowerCurve:
    """Up to 60 s of lines and jumps between 50 and 700 W, pieces of 0.1 to 3 s."""
    points = [(0.0, float(random.uniform(50, 700)))]
    while points[-1][0] < 60.0:
        at_s = points[-1][0] + float(random.uniform(0.1, 3.0))
        points.append((at_s, float(random.uniform(50, 700))))
        if random.random() < 0.3:
            points.append((at_s, float(random.uniform(50, 700))))
    return PowerCurve(points)


def random_device(random: np.random.Generator) -> SimulatedDevice:
    tick_s = float(random.uniform(0.01, 0.1))
    clock = ScriptedClock(float(random.uniform(1.0, 2.0)))
    return SimulatedDevice(
        clock,
        random_curve(random),
        tick_s=tick_s,
        phase_s=float(random.uniform(0, tick_s)),
        read_cost_s=float(random.choice([0.0, 0.004])),
        starts_at_j=1000.0,
    )


def test_unaligned_windows_by_hand() -> None:
    clock = ScriptedClock(1.05)
    device = SimulatedDevice(clock, constant(300.0))
    # From 1.05 to 1.30 the counter passes the ticks at 1.1, 1.2 and 1.3: 3 * 30 J instead of 75 J, 20 % too much.
    (energy,) = window(0.25, device).devices
    assert (energy.origin.source, energy.origin.kind, energy.origin.basis) == ("simulated", "measured", "counter")
    assert energy.joules == pytest.approx(90.0)
    # At constant power: one tick of 300 W; the mean that the counter gives is 360 W, and the larger one counts.
    assert energy.bound_j == pytest.approx(0.1 * 360.0)
    assert abs(90.0 - 75.0) <= energy.bound_j


def test_an_aligned_window_by_hand() -> None:
    clock = ScriptedClock(1.05)
    device = SimulatedDevice(clock, constant(100.0), tick_s=0.1)
    meter = meter_of(device, is_aligned=True)
    meter.open()
    # It has waited for the tick at 1.1, polling each half millisecond.
    assert clock.now_s() == pytest.approx(1.1, abs=0.0011)
    started_s = clock.now_s()
    device.run(0.25, 300.0)
    (energy,) = meter.close().devices
    # Closed at 1.35: the counter shows 2 ticks of 30 J; the one at 1.4 adds half a tick of 300 and half of 100 W, 20 J,
    # of which half is taken: 70 J in place of 75 J. The end lies anywhere in those 20 J.
    assert device.true_j(started_s, started_s + 0.25) == pytest.approx(75.0)
    assert energy.joules == pytest.approx(70.0, abs=0.3)
    assert energy.bound_j is not None and 10.0 <= energy.bound_j <= 10.5


def test_what_is_drawn_between_the_tick_and_the_window_is_taken_off() -> None:
    clock = ScriptedClock(1.05)
    # The reading after the tick takes 40 ms: 4 J before the window.
    device = SimulatedDevice(clock, constant(100.0), tick_s=0.1, read_cost_s=0.04)
    (energy,) = window(2.0, device, is_aligned=True).devices
    assert energy.joules == pytest.approx(200.0, abs=2.5)
    assert energy.bound_j is not None and energy.bound_j > 4.0


@pytest.mark.parametrize("seed", range(60))
def test_aligned_windows_of_at_least_fifty_ticks_are_within_one_percent(seed: int) -> None:
    """At the end at most a quarter of a tick of 700 W, against 50 ticks of 375 W on average."""
    random = np.random.default_rng(seed)
    device = random_device(random)
    meter = meter_of(device, is_aligned=True)
    meter.open()
    begin_s = device.clock.now_s()
    device.clock.sleep(float(device.tick_s * random.uniform(50, 300)))
    end_s = device.clock.now_s()
    (energy,) = meter.close().devices
    true_j = device.true_j(begin_s, end_s)
    assert energy.joules == pytest.approx(true_j, rel=0.01)
    assert energy.bound_j is not None and abs(energy.joules - true_j) <= energy.bound_j


@pytest.mark.parametrize("seed", range(40))
def test_windows_of_many_ticks_are_within_one_percent(seed: int) -> None:
    """At most 2 ticks of error at the largest of 50 to 700 W: 200 ticks of at least the mean of 375 W leave 1 %."""
    random = np.random.default_rng(seed)
    device = random_device(random)
    device.read_cost_s = 0.0
    begin_s, seconds = device.clock.now_s(), 200 * device.tick_s
    (energy,) = window(seconds, device).devices
    assert energy.joules == pytest.approx(device.true_j(begin_s, begin_s + seconds), rel=0.01)


@pytest.mark.parametrize("is_aligned", [False, True])
def test_stated_bounds_contain_the_truth_in_short_windows_of_any_power(is_aligned: bool) -> None:
    """Ticks of 10 to 100 ms, windows of 0.3 to 50 of them, any phase."""
    random = np.random.default_rng(7)
    contained = 0
    for _ in range(400):
        device = random_device(random)
        meter = meter_of(device, is_aligned=is_aligned)
        meter.open()
        begin_s = device.clock.now_s()
        device.clock.sleep(float(device.tick_s * 10 ** random.uniform(-0.5, 1.7)))
        end_s = device.clock.now_s()
        (energy,) = meter.close().devices
        assert energy.joules is not None and energy.bound_j is not None
        contained += abs(energy.joules - device.true_j(begin_s, end_s)) <= energy.bound_j + 0.001
    assert contained >= 0.95 * 400


def test_a_wrap_is_undone_and_remarked() -> None:
    device = SimulatedDevice(ScriptedClock(1.0), constant(100.0), wraps_at_j=350.0, limit_w=120.0)
    (energy,) = window(4.0, device).devices
    assert energy.joules == pytest.approx(400.0)
    assert energy.reason is None and energy.remark is not None and "it wrapped at 350 J" in energy.remark


def test_several_wraps_in_one_window_are_all_seen() -> None:
    device = SimulatedDevice(ScriptedClock(1.0), constant(100.0), wraps_at_j=350.0, limit_w=120.0)
    (energy,) = window(60.0, device).devices
    assert energy.joules == pytest.approx(6000.0)


def test_a_reset_of_a_counter_that_wraps_is_not_taken_for_a_wrap() -> None:
    # Looked at after 0.73 s it shows 170 J, then 40 J: a wrap would be 220 J, and 120 W can be 123 J by then.
    device = SimulatedDevice(ScriptedClock(1.0), constant(100.0), wraps_at_j=350.0, limit_w=120.0, resets_at_s=(2.0,))
    (energy,) = window(4.0, device).devices
    assert energy.joules is None and energy.reason is not None and "it was reset" in energy.reason


def test_a_counter_that_wraps_without_a_known_limit_has_no_figure() -> None:
    device = SimulatedDevice(ScriptedClock(1.0), constant(100.0), wraps_at_j=350.0)
    (energy,) = window(1.0, device).devices
    assert energy.joules is None and energy.reason is not None and "without a power limit" in energy.reason


def test_a_reset_is_a_reason_not_a_number() -> None:
    device = SimulatedDevice(ScriptedClock(1.0), constant(100.0), resets_at_s=(3.0,))
    (energy,) = window(2.5, device).devices
    assert (energy.joules, energy.bound_j) == (None, None)
    assert energy.reason == "the counter went backwards, from 200.000 to 0.000 J: it was reset"


@pytest.mark.parametrize("is_aligned", [False, True])
def test_a_reset_early_in_a_long_window_is_seen_though_the_counter_passes_its_old_value(is_aligned: bool) -> None:
    device = SimulatedDevice(ScriptedClock(36.5), constant(100.0), resets_at_s=(80.0,), read_cost_s=0.0038)
    (energy,) = window(300.0, device, is_aligned=is_aligned).devices
    # It shows 3650 J at the beginning and 25,650 J at the end; 30,000 J were drawn.
    assert (energy.joules, energy.bound_j) == (None, None)
    assert energy.reason is not None and energy.reason.endswith("it was reset")


def test_a_gpu_that_is_gone_for_a_while_within_a_window_is_a_reason() -> None:
    device = SimulatedDevice(ScriptedClock(1.0), constant(100.0))
    meter = meter_of(device)
    meter.open()
    device.clock.sleep(10.0)
    device.vanishes_at_s = 12.5
    device.clock.sleep(5.0)
    device.vanishes_at_s = math.inf
    device.clock.sleep(10.0)
    (energy,) = meter.close().devices
    assert (energy.joules, energy.reason) == (None, "the counter could not be read: GPU-simulated: GPU is lost")


def test_a_gpu_that_vanishes_in_a_window_is_a_reason_and_the_others_keep_their_figures() -> None:
    clock = ScriptedClock(1.0)
    gone = SimulatedDevice(clock, constant(100.0), "GPU-0", vanishes_at_s=2.0)
    there = SimulatedDevice(clock, constant(50.0), "GPU-1")
    first, second = window(3.0, gone, there).devices
    assert (first.joules, first.reason) == (None, "the counter could not be read: GPU-0: GPU is lost")
    assert second.joules == pytest.approx(150.0)
    total = summed_reading([first, second])
    assert (total.joules, total.reason) == (None, "GPU-0: the counter could not be read: GPU-0: GPU is lost")


@pytest.mark.parametrize("is_aligned", [False, True])
def test_devices_with_ticks_of_their_own_are_within_their_bounds(is_aligned: bool) -> None:
    clock = ScriptedClock(1.0)
    devices = [
        SimulatedDevice(clock, constant(100.0), "GPU-0", tick_s=0.1, read_cost_s=0.004),
        SimulatedDevice(clock, constant(300.0), "GPU-1", tick_s=0.1, phase_s=0.07, read_cost_s=0.004),
    ]
    for device, energy in zip(devices, window(2.0, *devices, is_aligned=is_aligned).devices, strict=True):
        assert energy.joules is not None and energy.bound_j is not None
        assert abs(energy.joules - 2.0 * device.idle.watts(0.0)) <= energy.bound_j


def test_an_aligned_window_reports_what_goes_wrong_too() -> None:
    reset = SimulatedDevice(ScriptedClock(1.0), constant(100.0), resets_at_s=(3.0,))
    (energy,) = window(2.5, reset, is_aligned=True).devices
    assert energy.joules is None and energy.reason is not None and "it was reset" in energy.reason
    lost = SimulatedDevice(ScriptedClock(1.0), constant(100.0), vanishes_at_s=3.0)
    (energy,) = window(2.5, lost, is_aligned=True).devices
    assert energy.joules is None and energy.reason is not None and "GPU is lost" in energy.reason
    still = SimulatedDevice(ScriptedClock(1.0), constant(0.0))
    (energy,) = window(2.5, still, is_aligned=True).devices
    assert energy.joules is None and energy.reason is not None and "did not advance" in energy.reason


def test_a_reset_shortly_before_the_close_is_a_reason() -> None:
    """It may show first between the last look and the first poll for the tick behind the window."""
    random = np.random.default_rng(2)
    for _ in range(200):
        clock = ScriptedClock(3.0)
        device = SimulatedDevice(
            clock,
            constant(700.0),
            tick_s=0.05,
            phase_s=float(random.uniform(0, 0.05)),
            read_cost_s=0.004,
            power_read_cost_s=0.002,
            starts_at_j=1e6,
        )
        meter = meter_of(device, is_aligned=True)
        meter.open()
        seconds = float(random.uniform(2, 3))
        device.resets_at_s = (clock.now_s() + seconds - float(random.uniform(0, 0.05)),)
        clock.sleep(seconds)
        (energy,) = meter.close().devices
        assert energy.joules is None and str(energy.reason).endswith("it was reset")


def test_devices_are_counted_each_and_summed() -> None:
    clock = ScriptedClock(1.0)
    devices = [SimulatedDevice(clock, constant(100.0 * n), f"GPU-{n}") for n in (1, 2, 3)]
    reading = window(2.0, *devices)
    assert [each.joules for each in reading.devices] == [pytest.approx(200.0 * n) for n in (1, 2, 3)]
    total = summed_reading(reading.devices)
    assert (total.origin.device, total.joules) == ("all", pytest.approx(1200.0))


def test_a_counter_that_is_not_supported_is_reported_when_the_meter_is_made() -> None:
    with pytest.raises(MeterUnavailable, match="Not Supported"):
        meter_of(SimulatedDevice(ScriptedClock(), constant(1.0), missing=frozenset({"energy"})))


def test_without_a_power_reading_the_limit_stands_in_the_bound_and_without_that_there_is_none() -> None:
    limited = SimulatedDevice(ScriptedClock(1.0), constant(100.0), limit_w=700.0, missing=frozenset({"power"}))
    assert window(2.0, limited).devices[0].bound_j == pytest.approx(70.0)
    unknown = SimulatedDevice(ScriptedClock(1.0), constant(100.0), missing=frozenset({"power"}))
    assert window(2.0, unknown).devices[0].bound_j is None
    assert window(2.0, unknown).devices[0].joules == pytest.approx(200.0)


def test_a_tick_that_is_not_known_leaves_no_bound() -> None:
    device = SimulatedDevice(ScriptedClock(1.0), constant(100.0), limit_w=700.0)
    meter = CounterMeter([SimulatedCounter(device)], device.clock, {})
    meter.open()
    device.clock.sleep(1.0)
    assert meter.close().devices[0].bound_j is None


def test_windows_are_opened_and_closed_in_turn_and_released() -> None:
    device = SimulatedDevice(ScriptedClock(1.0), constant(100.0))
    meter = meter_of(device)
    with pytest.raises(ConfigurationError, match="no open window"):
        meter.close()
    meter.open()
    with pytest.raises(ConfigurationError, match="has an open window"):
        meter.open()
    meter.release()
    meter.open()
    device.clock.sleep(1.0)
    assert meter.close().devices[0].joules == pytest.approx(100.0)
