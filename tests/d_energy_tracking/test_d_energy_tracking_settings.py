"""Energy of runs and of a setting on simulated devices, with a clock that stands still: joules by hand."""

from typing import Any

import pytest
import torch

from experiment_core_utils.d_energy_tracking import energy_of_setting, runs_beside_power
from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.meters.windows import WindowGoal
from experiment_core_utils.primitives.errors import SampleTimedOut
from experiment_core_utils.records.energy import SettingEnergy
from experiment_core_utils.records.requests import StagedRun
from tests.hand_made_records import staged_run
from tests.scripted.scripted_model import ScriptedModel
from tests.scripted.simulated_energy import ModelOnDevice, instruments_of, scripted_device
from tests.scripted.simulated_meters import ScriptedClock

TEXT = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}


def test_each_run_has_the_energy_of_its_own_window() -> None:
    device = scripted_device()
    powers = iter((200.0, 400.0, 300.0))

    def run_once() -> StagedRun:
        device.run(1.0, next(powers))
        return staged_run()

    runs, energy = runs_beside_power(run_once, 3, instruments_of(device, sample_every_s=0.01))
    assert len(runs) == 3 and energy is not None
    assert energy.joules == (
        pytest.approx(200.0, rel=0.02), pytest.approx(400.0, rel=0.02), pytest.approx(300.0, rel=0.02),
    )  # fmt: skip
    for joules, bound_j, truth in zip(energy.joules, energy.bounds_j, (200.0, 400.0, 300.0), strict=True):
        assert joules is not None and bound_j is not None and abs(joules - truth) <= bound_j
    assert (energy.source, energy.basis, energy.reason) == ("simulated", "instant_power", None)


def test_without_a_request_for_energy_nothing_is_read() -> None:
    runs, energy = runs_beside_power(staged_run, 2, None)
    assert len(runs) == 2 and energy is None


def test_without_a_power_reading_there_is_a_reason() -> None:
    nothing = Instruments(ScriptedClock(), (), (), missing={"GPU energy": "torch sees no GPU"})
    _, energy = runs_beside_power(staged_run, 2, nothing)
    assert energy is not None and energy.joules == (None, None)
    assert energy.reason == "no power reading of the device that computes (torch sees no GPU)"


def test_a_run_that_fails_ends_the_readings() -> None:
    device = scripted_device()
    using = instruments_of(device)

    def run_once() -> StagedRun:
        raise SampleTimedOut("too long")

    with pytest.raises(SampleTimedOut):
        runs_beside_power(run_once, 2, using)
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
