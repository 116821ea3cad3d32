"""Instruments of simulated devices, played by a scripted clock or in real time."""

from typing import Any

import torch

from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.primitives.clock import Clock
from tests.scripted.scripted_model import EOS, ScriptedModel
from tests.scripted.simulated_meters import (
    CatchingUpClock,
    ScriptedClock,
    SimulatedCounter,
    SimulatedDevice,
    SimulatedPower,
    constant,
)


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
    """On a clock that moves only when it is set forward."""
    return device_of(ScriptedClock(3.0), **{"read_cost_s": 0.001, "power_read_cost_s": 0.00001, **changes})


def device_in_real_time(watts: float = 100.0, name: str = "GPU-12", **changes: Any) -> SimulatedDevice:
    """Whatever runs beside it, it draws the same power: joules are `watts` times seconds."""
    return device_of(CatchingUpClock(), watts, name, **{"tick_s": 0.01, **changes})


class ModelOnDevice(ScriptedModel):
    """Its stages run on a simulated device: 10 ms at 400 W, 20 ms at 600 W, and 5 ms at 200 W a step."""

    def __init__(self, device: SimulatedDevice, script: tuple[int, ...] = (1, 2, 3, EOS)) -> None:
        super().__init__(script=script)
        self.gpu = device

    def encode_image(self, inputs: Any) -> str | None:
        features = super().encode_image(inputs)
        if features is not None:
            self.gpu.run(0.010, 400.0)
        return features

    def prefill(self, inputs: Any, features: str | None) -> tuple[torch.Tensor, list[int]]:
        self.gpu.run(0.020, 600.0)
        return super().prefill(inputs, features)

    def decode_step(self, token: torch.Tensor, state: list[int]) -> torch.Tensor:
        self.gpu.run(0.005, 200.0)
        return super().decode_step(token, state)
