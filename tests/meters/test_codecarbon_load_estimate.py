"""codecarbon's estimate as a meter, with a scripted codecarbon and a clock that stands still: by hand."""

import pytest

from experiment_core_utils.meters.codecarbon import LoadEstimate
from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.meters.windows import WindowGoal, energy_of_act, idle_power, why_no_power
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable
from tests.scripted.scripted_codecarbon import WINDOW, ScriptedTracker, scripted_library
from tests.scripted.simulated_meters import ScriptedClock, SimulatedDevice, SimulatedPower, constant


def estimating(clock: ScriptedClock, **script: object) -> Instruments:
    estimate = LoadEstimate(clock, scripted_library(**script))  # type: ignore[arg-type]
    return Instruments(clock, (), (), missing={"GPU energy": "no GPU"}, estimate=estimate)


def test_a_window_has_cpu_and_memory_in_joules_and_no_gpu() -> None:
    clock = ScriptedClock(7.0)
    meter = estimating(clock).meter()
    meter.open()
    clock.sleep(36.0)
    reading = meter.close()
    # 1e-4 and 2e-4 kWh; the GPU's 3e-3 kWh are not taken.
    cpu, ram = reading.devices
    assert reading.seconds == 36.0
    assert (cpu.joules, ram.joules) == (pytest.approx(360.0), pytest.approx(720.0))
    assert (cpu.bound_j, cpu.reason, ram.origin.component) == (None, None, "ram")
    assert (cpu.origin.source, cpu.origin.kind, cpu.origin.basis) == ("codecarbon_estimate", "estimated", "load_model")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ({"window": WINDOW | {"cpu_energy": 0.0}}, "codecarbon read nothing"),
        ({"fail_at": "start window 2"}, "codecarbon does not track here"),
        ({"fail_at": "stop window 2"}, "codecarbon does not track here"),
        ({"silent_at": "start window 2"}, "codecarbon measured nothing"),
    ],
)
def test_what_codecarbon_does_not_give_is_absent_with_the_reason(script: dict[str, object], reason: str) -> None:
    clock = ScriptedClock(0.0)
    meter = estimating(clock, **script).meter()
    meter.open()
    clock.sleep(2.0)
    cpu = meter.close().devices[0]
    assert cpu.joules is None and reason in str(cpu.reason)
    # The next window is another one.
    if "window" not in script:
        meter.open()
        assert meter.close().devices[0].joules == pytest.approx(360.0)


def test_windows_are_opened_in_turn_and_a_released_one_is_closed() -> None:
    made: list[ScriptedTracker] = []
    meter = estimating(ScriptedClock(0.0), made=made).meter()
    with pytest.raises(ConfigurationError, match="no open window"):
        meter.close()
    meter.open()
    with pytest.raises(ConfigurationError, match="has an open window"):
        meter.open()
    meter.release()
    meter.release()
    assert made[0].calls[-2:] == ["start window 2", "stop window 2"]
    meter.open()
    assert meter.close().devices[1].joules == pytest.approx(720.0)


def test_counters_that_codecarbon_reads_are_no_estimate() -> None:
    with pytest.raises(MeterUnavailable, match="no estimate from load"):
        LoadEstimate(ScriptedClock(0.0), scripted_library(rapl=True))


def test_an_estimate_measures_nothing_and_stands_in_for_nothing_that_does() -> None:
    clock = ScriptedClock(0.0)
    using = estimating(clock)
    using.require_any_or_estimate()
    with pytest.raises(MeterUnavailable, match="nothing on this machine measures energy"):
        using.require_any()
    device = SimulatedDevice(clock, constant(100.0))
    beside = Instruments(clock, (), (SimulatedPower(device),), estimate=using.estimate)
    assert [each.basis for each in beside.origins] == ["instant_power"] and beside.meter() is not using.estimate
    assert why_no_power(beside) is None and "too coarse for one run" in str(why_no_power(using))


def test_an_act_is_repeated_for_the_least_window_and_has_its_part_without_a_bound() -> None:
    """The error of an estimate is not known: no window is made longer for it."""
    clock = ScriptedClock(0.0)
    using = estimating(clock)
    cpu, ram = energy_of_act(lambda: clock.sleep(0.3), using, WindowGoal(1e-6, least_s=2.0))
    # Seven acts of 0.3 s are the first that take 2 s.
    assert (cpu.count, cpu.window_s, cpu.act_s) == (7, pytest.approx(2.1), pytest.approx(0.3))
    assert (cpu.joules, ram.joules) == (pytest.approx(360.0 / 7), pytest.approx(720.0 / 7))
    assert (cpu.bound_j, cpu.window_error, cpu.remark, cpu.alignment) == (None, None, None, "acts")
    idle = idle_power(using, 4.0)
    assert [each.watts for each in idle] == [pytest.approx(90.0), pytest.approx(180.0)] and idle[0].bound_w is None
