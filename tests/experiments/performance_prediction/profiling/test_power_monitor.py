"""Power and energy through the shared meters, played by a simulated device."""

import pytest
import torch

from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.performance_prediction.profiler import NOT_REQUESTED, PowerMonitor, instruments_of
from tests.scripted.simulated_energy import instruments_of as simulated
from tests.scripted.simulated_energy import scripted_device
from tests.scripted.simulated_meters import SimulatedCounter


def test_the_trace_is_integrated_between_start_and_stop() -> None:
    device = scripted_device()
    monitor = PowerMonitor(simulated(device))
    monitor.start()
    device.run(2.0, 300.0)
    window = monitor.stop()
    # 2 s at 300 W.
    assert window.seconds == pytest.approx(2.0)
    assert window.joules == pytest.approx(600.0, rel=1e-6)
    assert window.power_mean_w == pytest.approx(300.0)
    (trace,) = window.traces
    # A reading each 50 ms on average, one before and one behind.
    assert 30 < len(trace.watts) < 60 and set(trace.watts[1:-1]) == {300.0}


def test_a_second_start_is_refused_and_a_stop_without_start_says_so() -> None:
    monitor = PowerMonitor(simulated(scripted_device()))
    assert monitor.stop().reason == "the power monitor was not started"
    monitor.start()
    with pytest.raises(ConfigurationError, match="started already"):
        monitor.start()


def test_energy_of_an_inference_is_that_of_the_counter() -> None:
    device = scripted_device()
    found = PowerMonitor(simulated(device)).energy_of(lambda: device.run(0.010, 400.0))
    # 10 ms at 400 W are 4 J.
    assert found.joules == pytest.approx(4.0, rel=0.02) and found.basis == "counter"
    assert found.power_w == pytest.approx(400.0, rel=0.02)
    assert found.bound_j is not None and abs(found.joules - 4.0) <= found.bound_j
    assert found.window_s is not None and found.window_s >= 2.0


def test_without_a_counter_power_readings_are_integrated() -> None:
    device = scripted_device()
    using = simulated(device)
    found = PowerMonitor(Instruments(device.clock, (), using.probes)).energy_of(lambda: device.run(0.010, 400.0))
    assert found.joules == pytest.approx(4.0, rel=0.02) and found.basis == "instant_power"


def test_without_a_power_reading_there_is_no_trace_but_energy() -> None:
    device = scripted_device()
    monitor = PowerMonitor(Instruments(device.clock, (SimulatedCounter(device),), ()).calibrated())
    monitor.start()
    window = monitor.stop()
    assert window.seconds is None and window.joules is None and window.power_mean_w is None
    assert "no power reading" in str(window.reason)
    assert monitor.energy_of(lambda: device.run(0.010, 400.0)).joules == pytest.approx(4.0, rel=0.02)


def test_a_meter_that_goes_away_leaves_no_figure_and_a_reason() -> None:
    device = scripted_device(vanishes_at_s=7.5)
    monitor = PowerMonitor(simulated(device))
    monitor.start()
    device.run(8.0, 300.0)
    window = monitor.stop()
    assert window.joules is None and window.power_mean_w is None and "GPU is lost" in str(window.reason)


def test_nothing_to_measure_with_is_none_with_the_reason() -> None:
    nothing = Instruments(scripted_device().clock, (), (), missing={"GPU energy": "no GPU"})
    assert PowerMonitor(nothing).energy_of(int).reason == "nothing on this machine measures energy (GPU energy: no GPU)"
    off = PowerMonitor(None)
    off.start()
    assert off.stop().reason == off.energy_of(int).reason == NOT_REQUESTED


def test_the_cpu_is_measured_by_its_own_counters_alone() -> None:
    assert {origin.component for origin in instruments_of(torch.device("cpu")).origins} <= {"cpu", "dram"}
