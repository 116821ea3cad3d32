"""Energy of a pass and of a request's stages on simulated devices, with a clock that stands still: joules by hand."""

from typing import Any

import pytest
import torch

from experiment_core_utils.d_energy_tracking import energy_of_pass, energy_of_setting
from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.meters.windows import WindowGoal
from experiment_core_utils.primitives.errors import SampleTimedOut
from experiment_core_utils.records.energy import SettingEnergy
from tests.scripted.scripted_model import ScriptedModel
from tests.scripted.simulated_energy import ModelOnDevice, instruments_of, scripted_device

TEXT = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}


def test_requests_of_a_pass_share_its_window() -> None:
    """Two requests of 1 s at 200 W and 400 W again and again: a pass takes 600 J, a third of it the first."""
    device = scripted_device()
    using = instruments_of(device, sample_every_s=0.01)
    how = StageMeasurement(using, WindowGoal(0.05, least_s=5.0))
    windows, allocated = energy_of_pass([lambda: device.run(1.0, 200.0), lambda: device.run(1.0, 400.0)], how)
    counter, power = windows
    assert (counter.origin.basis, power.origin.basis) == ("counter", "instant_power")
    # Whole passes of 2 s: the third ends the window.
    assert (counter.count, counter.window_s, counter.alignment) == (3, pytest.approx(6.0), "acts")
    assert counter.joules == pytest.approx(600.0, rel=0.02) and power.joules == pytest.approx(600.0, rel=0.02)
    assert [each.joules for each in allocated] == [pytest.approx(200.0, rel=0.02), pytest.approx(400.0, rel=0.02)]
    assert sum(each.joules or 0.0 for each in allocated) == pytest.approx(counter.joules, rel=1e-12)
    for each, truth in zip(allocated, (200.0, 400.0), strict=True):
        assert each.joules is not None and each.bound_j is not None and abs(each.joules - truth) <= each.bound_j
        assert (each.method, each.origin, each.reason) == ("apportioned", counter.origin, None)


def test_a_request_that_fails_ends_the_readings() -> None:
    device = scripted_device()
    how = StageMeasurement(instruments_of(device), WindowGoal())

    def fail() -> None:
        raise SampleTimedOut("too long")

    with pytest.raises(SampleTimedOut):
        energy_of_pass([fail], how)
    readings = device.num_readings
    device.clock.sleep(1.0)
    assert device.num_readings == readings


def measured(model: ScriptedModel, using: Instruments, request: Any = (7, TEXT)) -> SettingEnergy:
    how = StageMeasurement(using, WindowGoal(0.05, least_s=0.5), repeats=2, idle_s=1.0)
    return energy_of_setting(model, request, 16, how, "0001", 0)


def test_a_settings_stages_are_those_of_the_request() -> None:
    device = scripted_device()
    energy = measured(ModelOnDevice(device), instruments_of(device))
    assert (energy.sample_id, energy.experiment_id, energy.reason) == (7, "0001", None)
    assert energy.stages is not None and energy.stages.output_tokens == 4
    gross = energy.stages.figures["prefill"][0].gross_j
    # 20 ms at 600 W.
    assert gross is not None and gross.mean == pytest.approx(12.0, rel=0.06)


def test_what_cannot_be_measured_is_a_reason() -> None:
    device = scripted_device()
    using = instruments_of(device)
    nothing = Instruments(device.clock, (), (), missing={"GPU energy": "torch sees no GPU"})
    assert "nothing on this machine" in str(measured(ModelOnDevice(device), nothing).reason)
    assert measured(ModelOnDevice(device), using, None).reason == "no sample can be read"

    class Large(ModelOnDevice):
        def prefill(self, inputs: Any, features: str | None) -> tuple[torch.Tensor, list[int]]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    assert "out of memory" in str(measured(Large(device), using).reason)
