"""Instruments of simulated devices, played by a scripted clock or in real time."""

from typing import Any

from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.meters.simulated import (
    ScriptedClock,
    SimulatedCounter,
    SimulatedDevice,
    SimulatedPower,
    constant,
)
from experiment_core_utils.primitives.clock import Clock, HostClock


def device_of(clock: Clock, watts: float = 70.0, name: str = "GPU-12", **changes: Any) -> SimulatedDevice:
    """One that draws `watts` while nothing runs."""
    return SimulatedDevice(clock, constant(watts), name, **changes)


def instruments_of(*devices: SimulatedDevice, sample_every_s: float = 0.05) -> Instruments:
    """A counter and a power reading of each, calibrated."""
    return Instruments(
        devices[0].clock,
        tuple(SimulatedCounter(each) for each in devices),
        tuple(SimulatedPower(each) for each in devices),
        sample_every_s=sample_every_s,
    ).calibrated()


def scripted_device(**changes: Any) -> SimulatedDevice:
    """On a clock that stands still until it is told to go on."""
    return device_of(ScriptedClock(3.0), **{"read_cost_s": 0.001, "power_read_cost_s": 0.00001, **changes})


def device_in_real_time(watts: float = 100.0, **changes: Any) -> SimulatedDevice:
    """Whatever runs beside it, it draws the same power: joules are `watts` times seconds."""
    return device_of(HostClock(), watts, **{"tick_s": 0.01, **changes})
