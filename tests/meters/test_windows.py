"""Energy of an act repeated on simulated devices: counts by hand, bounds that hold, and reported failures."""

import math
from dataclasses import replace

import numpy as np
import pytest

from experiment_core_utils.meters.energy_statistics import summed_act
from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.meters.windows import RepeatedAct, WindowGoal, energy_of_act, idle_power
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.records.energy import ActEnergy
from tests.scripted.simulated_meters import (
    PowerCurve,
    ScriptedClock,
    SimulatedCounter,
    SimulatedDevice,
    SimulatedPower,
    constant,
)


def instruments(*devices: SimulatedDevice) -> Instruments:
    """Counters and power of the devices that have them, calibrated."""
    counters = tuple(SimulatedCounter(each) for each in devices if "energy" not in each.missing)
    probes = tuple(SimulatedPower(each) for each in devices if "power" not in each.missing)
    return Instruments(devices[0].clock, counters, probes).calibrated()


def gpu(**changes) -> SimulatedDevice:  # type: ignore[no-untyped-def]
    scripted = {"tick_s": 0.1, "phase_s": 0.037, "read_cost_s": 0.0038}
    return SimulatedDevice(ScriptedClock(3.0), constant(76.0), **{**scripted, **changes})


def test_acts_are_counted_in_part_where_one_is_under_way() -> None:
    clock = ScriptedClock()
    acts = RepeatedAct(lambda: clock.sleep(0.5), clock)
    for _ in range(4):
        acts.once()
    assert [acts.count_at(at_s) for at_s in (0.0, 0.25, 0.5, 1.75, 2.0)] == [0.0, 0.5, 1.0, 3.5, 4.0]


def test_the_time_of_an_act_is_that_of_the_shortest() -> None:
    clock = ScriptedClock()
    lengths = iter([0.9, 0.5, 0.6])
    acts = RepeatedAct(lambda: clock.sleep(next(lengths)), clock)
    acts.repeat_until(1.5)
    assert (len(acts.done_at_s), acts.shortest_s) == (4, pytest.approx(0.5))


def test_a_short_act_is_repeated_between_ticks_until_the_error_is_small_enough() -> None:
    device = gpu()
    # 3.5 ms at 300 W: 1.05 J.
    counted, integrated = energy_of_act(lambda: device.run(0.0035, 300.0), instruments(device), WindowGoal(0.005, 0.0))
    assert counted.joules == pytest.approx(1.05, rel=0.005)
    assert (counted.alignment, counted.reason, counted.remark) == ("ticks", None, None)
    assert counted.bound_j is not None and abs(counted.joules - 1.05) <= counted.bound_j <= 0.005 * 1.05
    # Ends known to 4.05 ms each and an act of 3.5 ms are 0.5 % of 2.32 s; the window is a whole number of ticks.
    assert counted.window_s == pytest.approx(2.4, abs=0.05)
    assert counted.count == pytest.approx(counted.window_s / 0.0035, rel=1e-6)
    assert counted.act_s == pytest.approx(0.0035)
    # The second source saw the same window, of constant power.
    assert integrated.origin.basis == "instant_power"
    assert (integrated.window_s, integrated.count) == (counted.window_s, counted.count)
    assert integrated.joules == pytest.approx(1.05, rel=1e-6)


def test_a_long_act_is_repeated_whole_until_a_tick_is_small_enough() -> None:
    device = gpu(read_cost_s=0.0, power_read_cost_s=0.0)
    using = instruments(device)
    # A tick of 0.1 s is found as 0.1 s or up to 0.5 ms more: 2 % of 5 s and a little: 6 acts of 1 s.
    counted, integrated = energy_of_act(lambda: device.run(1.0, 400.0), using)
    assert (counted.alignment, counted.count) == ("acts", 6)
    # A tick in 6 s.
    assert counted.window_error == pytest.approx(0.1 / 6, abs=0.0002)
    assert counted.joules == pytest.approx(400.0, rel=0.01)
    assert counted.bound_j is not None and abs(counted.joules - 400.0) <= counted.bound_j <= 0.02 * 400
    assert (integrated.count, integrated.act_s) == (6, pytest.approx(1.0))
    # Readings before the first act and behind the last see idle power, which is not in the window; it may have begun
    # anywhere in the 50 ms to the next reading: 2 * 324 W * 0.05 s over 6 acts.
    assert integrated.joules == pytest.approx(400.0)
    assert integrated.bound_j is not None and integrated.bound_j <= 2 * 324 * 0.05 / 6 + 1e-9
    counted, _ = energy_of_act(lambda: device.run(1.0, 400.0), using, WindowGoal(0.01))
    assert counted.count == 11


def test_the_least_and_the_longest_window_hold_whatever_the_error() -> None:
    device = gpu()
    using = instruments(device)
    act = lambda: device.run(0.01, 300.0)  # noqa: E731
    counted, _ = energy_of_act(act, using, WindowGoal(0.5, least_s=3.0))
    assert counted.window_s == pytest.approx(3.1, abs=0.11)
    counted, _ = energy_of_act(act, using, WindowGoal(0.0001, least_s=0.0, longest_s=4.0))
    assert counted.window_s == pytest.approx(4.1, abs=0.11)
    # 2 * 4.05 ms and an act of 10 ms in 4 s.
    assert counted.remark == "the longest window of 4 s leaves an error of up to 0.5%"
    assert counted.window_error is not None and counted.window_s is not None
    assert counted.window_error * counted.window_s == pytest.approx(2 * 0.00405 + 0.01, abs=1e-6)


def test_power_that_changes_within_an_act_stays_within_the_bound() -> None:
    device = gpu()

    def act() -> None:
        device.run(0.01, 600.0)
        device.run(0.03, 100.0)

    # 6 + 3 J.
    counted, _ = energy_of_act(act, instruments(device))
    assert counted.joules is not None and counted.bound_j is not None
    assert abs(counted.joules - 9.0) <= counted.bound_j
    assert counted.joules == pytest.approx(9.0, rel=0.02)


def random_case(random: np.random.Generator) -> tuple[SimulatedDevice, list[tuple[float, float]]]:
    """A device and the pieces of an act on it: 1 to 4 of 1 ms to 0.4 s at 80 to 700 W."""
    tick_s = float(random.uniform(0.02, 0.1))
    device = gpu(
        tick_s=tick_s, phase_s=float(random.uniform(0, tick_s)), read_cost_s=float(random.uniform(0.0001, 0.005))
    )
    pieces = int(random.integers(1, 5))
    lengths = 10 ** random.uniform(-3, -0.4, size=pieces)
    return device, [(float(s), float(w)) for s, w in zip(lengths, random.uniform(80, 700, size=pieces), strict=True)]


def test_stated_bounds_contain_the_truth_for_random_acts_and_windows() -> None:
    random = np.random.default_rng(11)
    contained, close = 0, 0
    cases = 200
    for _ in range(cases):
        device, pieces = random_case(random)

        def act(device: SimulatedDevice = device, pieces: list[tuple[float, float]] = pieces) -> None:
            for seconds, watts in pieces:
                device.run(seconds, watts)

        goal = WindowGoal(float(random.choice([0.02, 0.1, 0.3])), least_s=0.0)
        counted, _ = energy_of_act(act, instruments(device), goal)
        true_j = math.fsum(seconds * watts for seconds, watts in pieces)
        assert counted.joules is not None and counted.bound_j is not None
        contained += abs(counted.joules - true_j) <= counted.bound_j
        close += abs(counted.joules - true_j) <= goal.relative_error * true_j
    assert contained >= 0.95 * cases
    assert close >= 0.95 * cases


@pytest.mark.parametrize("act_s", [0.0035, 0.03, 0.7])
def test_windows_of_fifty_ticks_are_within_one_percent(act_s: float) -> None:
    device = gpu()
    counted, _ = energy_of_act(lambda: device.run(act_s, 350.0), instruments(device), WindowGoal(0.02, least_s=5.0))
    assert counted.window_s is not None and counted.window_s >= 5.0 - 0.1
    assert counted.joules == pytest.approx(350.0 * act_s, rel=0.01)


def test_several_devices_are_measured_between_their_own_ticks_and_summed() -> None:
    clock = ScriptedClock(3.0)
    devices = [
        SimulatedDevice(clock, constant(70.0), f"GPU-{place}", phase_s=0.03 * place, read_cost_s=0.0038)
        for place in range(3)
    ]

    def act() -> None:
        for device, watts in zip(devices[:2], (200.0, 400.0), strict=True):
            device._begins.append(clock.now_s())
            device._ends.append(clock.now_s() + 0.01)
            device._powers.append(watts)
            device._extra_j.append(device._extra_j[-1] + (watts - 70.0) * 0.01)
        clock.sleep(0.01)

    counted = energy_of_act(act, instruments(*devices))[:3]
    # 10 ms at 200, 400 and, idle, 70 W.
    for figure, joules in zip(counted, (2.0, 4.0, 0.7), strict=True):
        assert figure.joules == pytest.approx(joules, rel=0.01)
    total = summed_act(counted)
    assert (total.origin.device, total.joules) == ("all", pytest.approx(6.7, rel=0.01))


def failing(device: SimulatedDevice, act_s: float) -> list[ActEnergy]:
    return energy_of_act(lambda: device.run(act_s, 300.0), instruments(device))


@pytest.mark.parametrize("act_s", [0.004, 0.5])
def test_a_gpu_that_vanishes_mid_window_is_a_reason_for_both_sources(act_s: float) -> None:
    counted, integrated = failing(gpu(vanishes_at_s=6.5), act_s)
    assert (counted.joules, counted.bound_j, counted.count) == (None, None, None)
    assert counted.reason == "the counter could not be read: GPU-simulated: GPU is lost"
    assert integrated.joules is None and integrated.reason is not None and "GPU is lost" in integrated.reason


@pytest.mark.parametrize("act_s", [0.004, 0.5])
def test_a_reset_mid_window_costs_the_counters_figure_alone(act_s: float) -> None:
    counted, integrated = failing(gpu(starts_at_j=1e6, resets_at_s=(6.5,)), act_s)
    assert counted.joules is None and counted.reason is not None and "it was reset" in counted.reason
    assert integrated.joules == pytest.approx(300.0 * act_s, rel=0.01)


@pytest.mark.parametrize("act_s", [0.004, 0.5])
def test_a_reset_early_in_a_long_window_is_seen_though_the_counter_passes_its_old_value(act_s: float) -> None:
    device = gpu(resets_at_s=(9.5,))
    using, goal = instruments(device), WindowGoal(0.0001, least_s=40.0, longest_s=40.0)
    counted, integrated = energy_of_act(lambda: device.run(act_s, 300.0), using, goal)
    # About 1.5 kJ when the window begins, 12 kJ drawn in it, 11 kJ shown when it ends.
    assert counted.joules is None and counted.reason is not None and counted.reason.endswith("it was reset")
    assert integrated.joules == pytest.approx(300.0 * act_s, rel=0.01)


def test_the_counter_is_looked_at_within_a_window_and_no_longer() -> None:
    device = gpu()
    using = instruments(device)
    energy_of_act(lambda: device.run(0.004, 300.0), using, WindowGoal(0.0001, least_s=20.0, longest_s=20.0))
    read_before = device.num_readings
    device.clock.sleep(10.0)
    assert device.num_readings == read_before


class TenthMore(SimulatedPower):
    """A sensor that is a tenth off."""

    def read_w(self) -> float:
        return 1.1 * super().read_w()


def test_sources_that_do_not_agree_are_remarked_and_those_that_do_are_not() -> None:
    device = gpu()
    using = instruments(device)
    act = lambda: device.run(0.004, 300.0)  # noqa: E731
    for figure in energy_of_act(act, replace(using, probes=(TenthMore(device),))):
        assert figure.remark is not None and figure.remark.startswith("integrated power is +10")
    assert [each.remark for each in energy_of_act(act, using)] == [None, None]


def test_a_wrap_mid_window_is_undone_and_remarked() -> None:
    counted, _ = failing(gpu(starts_at_j=500.0, wraps_at_j=1200.0, limit_w=350.0), 0.004)
    assert counted.joules == pytest.approx(1.2, rel=0.02)
    assert counted.remark is not None and "it wrapped at 1200 J" in counted.remark


def test_without_a_counter_power_alone_is_integrated_over_whole_acts() -> None:
    device = gpu(missing=frozenset({"energy"}))
    (integrated,) = energy_of_act(lambda: device.run(0.01, 300.0), instruments(device))
    assert (integrated.alignment, integrated.joules) == ("acts", pytest.approx(3.0, rel=0.01))


def test_with_nothing_to_measure_with_it_says_so_before_the_act() -> None:
    clock = ScriptedClock()
    using = Instruments(clock, (), (), missing={"GPU energy": "no driver"})
    with pytest.raises(MeterUnavailable, match=r"nothing on this machine measures energy \(GPU energy: no driver\)"):
        energy_of_act(lambda: pytest.fail("the act was done"), using)
    with pytest.raises(MeterUnavailable, match="nothing on this machine"):
        idle_power(replace(using), 1.0)


def test_what_the_act_raises_ends_the_readings_beside_it() -> None:
    device = gpu()
    using = instruments(device)
    acts = iter(range(200))

    def act() -> None:
        device.run(0.004, 300.0)
        if next(acts) == 110:
            raise KeyError("no memory")

    with pytest.raises(KeyError, match="no memory"):
        energy_of_act(act, using)
    # Nothing is read any more, however much time passes.
    read_before = device.num_readings
    device.clock.sleep(10.0)
    assert device.num_readings == read_before


@pytest.mark.parametrize("act_s", [0.004, 0.5])
def test_a_fault_of_the_program_in_a_look_at_the_counter_is_raised(act_s: float) -> None:
    device = gpu()

    class Slip(SimulatedCounter):
        def read_j(self) -> float:
            # Behind the opening of the window, which is at 5.5 to 6 s.
            if device.clock.now_s() > 6.2:
                raise ZeroDivisionError("a slip")
            return super().read_j()

    using = replace(instruments(device), counters=(Slip(device),))
    with pytest.raises(ZeroDivisionError, match="a slip"):
        energy_of_act(lambda: device.run(act_s, 300.0), using)
    readings = device.num_readings
    device.clock.sleep(5.0)
    assert device.num_readings == readings


def test_idle_power_before_and_after_by_hand() -> None:
    device = gpu()
    device.idle = PowerCurve([(0.0, 70.0), (20.0, 70.0), (20.0, 80.0)])
    using = instruments(device)
    before = idle_power(using, 5.0)
    device.clock.sleep(30.0)
    after = idle_power(using, 5.0)
    assert [each.watts for each in before] == [pytest.approx(70.0, rel=0.002), pytest.approx(70.0)]
    assert [each.watts for each in after] == [pytest.approx(80.0, rel=0.002), pytest.approx(80.0)]
    assert all(each.seconds == pytest.approx(5.0) and each.reason is None for each in (*before, *after))


def test_idle_power_does_not_hold_what_ran_just_before() -> None:
    """Readings that are a mean over the last 0.2 s show 600 W for a while; the window begins behind that."""
    device = SimulatedDevice(ScriptedClock(3.0), constant(70.0), "GPU-0", averaged_over_s=0.2, read_cost_s=0.001)
    using = instruments(device)
    device.run(2.0, 600.0)
    counted, averaged = idle_power(using, 2.0)
    assert (counted.watts, averaged.watts) == (pytest.approx(70.0, rel=0.01), pytest.approx(70.0, rel=0.01))
