"""Energy of a text run's batches and queries beside simulated devices, with a clock that stands still: by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from experiment_core_utils.config.text import TextConfig
from experiment_core_utils.e_inference import run_shard
from experiment_core_utils.i_metrics_energy import with_batch_energy
from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.meters.tracked_window import EnergySources
from experiment_core_utils.primitives.errors import OutOfMemory
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.records.text import InferenceResults
from experiment_core_utils.text_run.energy import TextEnergy
from tests.e_inference.test_e_inference_text_shard import SCRIPTS, shard
from tests.scripted.scripted_codecarbon import scripted_library
from tests.scripted.simulated_energy import device_of, instruments_of, scripted_device
from tests.scripted.simulated_meters import ScriptedClock, SimulatedDevice
from tests.tiny_models.tiny_text_model import ScriptedTextModel


class ModelOnDevice(ScriptedTextModel):
    """Each batch runs for 0.5 s at 300 W on a simulated device, whose clock stands still otherwise."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__(SCRIPTS)
        self.gpu = device

    def generate(self, *arguments: Any, **keywords: Any) -> Any:
        self.gpu.run(0.5, 300.0)
        return super().generate(*arguments, **keywords)


def measured(using: Instruments, model: ScriptedTextModel, folder: Path, energy: str = "optional") -> InferenceResults:
    config = TextConfig.model_validate({"device": "cpu", "track_energy": True, "energy": energy})
    sources = EnergySources(scripted_library(), using, 0.0, ("GPU-12",))
    meter, plain = TextEnergy(config, Accelerator(cpu=True), sources), shard(model)
    text = replace(plain, generator=replace(plain.generator, clock=meter.clock))
    return with_batch_energy(*meter.measured(lambda: run_shard(text, StopRequest()), "0001", folder))


def test_a_batch_has_its_energy_from_the_power_trace_and_a_query_its_part_by_tokens(tmp_path: Path) -> None:
    device = scripted_device()
    results = measured(instruments_of(device, sample_every_s=0.01), ModelOnDevice(device), tmp_path)
    for batch in results["batches"]:
        assert batch["energy_j"] == pytest.approx(150.0, rel=0.02)
        assert batch["energy_bound_j"] is not None and abs(batch["energy_j"] - 150.0) <= batch["energy_bound_j"]
        assert (batch["energy_method"], batch["energy_basis"], batch["energy_reason"]) == (
            "apportioned", "instant_power", None,
        )  # fmt: skip
    first, second, third, fourth, fifth = (query["energy_j"] or 0.0 for query in results["queries"])
    joules = [float(batch["energy_j"] or 0.0) for batch in results["batches"]]
    # Tokens in and out: 2 + 3 and 4 + 1; 1 + 4 and 3 + 2; 1 + 1.
    assert (first, second) == (joules[0] * 5 / 10, joules[0] * 5 / 10)
    assert third + fourth == pytest.approx(joules[1]) and third == joules[1] * 5 / 10
    assert fifth == joules[2]


def test_two_gpus_of_one_process_add_up(tmp_path: Path) -> None:
    device = scripted_device()
    other = device_of(device.clock, 50.0, "GPU-34")
    results = measured(instruments_of(device, other, sample_every_s=0.01), ModelOnDevice(device), tmp_path)
    # 0.5 s at 300 W and at 50 W.
    assert results["batches"][0]["energy_j"] == pytest.approx(175.0, rel=0.02)


@pytest.mark.parametrize(("energy", "output"), [("off", "energy was not requested"), ("optional", "torch sees no GPU")])
def test_without_a_power_reading_there_is_no_energy_and_a_reason(energy: str, output: str, tmp_path: Path) -> None:
    nothing = Instruments(ScriptedClock(), (), (), missing={"GPU energy": "torch sees no GPU"})
    results = measured(nothing, ScriptedTextModel(SCRIPTS), tmp_path, energy)
    assert {batch["energy_j"] for batch in results["batches"]} == {None}
    assert {query["energy_j"] for query in results["queries"]} == {None}
    assert all(output in str(batch["energy_reason"]) for batch in results["batches"])


def test_a_gpu_that_vanishes_leaves_a_reason(tmp_path: Path) -> None:
    device = scripted_device(vanishes_at_s=5.5)
    results = measured(instruments_of(device), ModelOnDevice(device), tmp_path)
    assert results["batches"][-1]["energy_j"] is None
    assert "GPU is lost" in str(results["batches"][-1]["energy_reason"])


def test_power_is_read_no_more_after_a_failure(tmp_path: Path) -> None:
    device = scripted_device()
    with pytest.raises(OutOfMemory):
        measured(instruments_of(device), ScriptedTextModel(SCRIPTS, largest_batch=1), tmp_path)
    readings = device.num_readings
    device.clock.sleep(1.0)
    assert device.num_readings == readings
