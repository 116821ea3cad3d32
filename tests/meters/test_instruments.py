"""What is found on a machine, from a scripted library and folders like the kernel's, and meters side by side."""

from pathlib import Path

import pynvml
import pytest
import torch

from experiment_core_utils.meters.instruments import Instruments, find_instruments, uuids_of
from experiment_core_utils.primitives.errors import MeterUnavailable
from tests.meters.nvml.scripted_nvml import ScriptedEnergyNvml
from tests.scripted.simulated_meters import ScriptedClock, SimulatedCounter, SimulatedDevice, SimulatedPower, constant


def test_on_a_machine_without_anything_every_source_is_missing_with_a_reason(tmp_path: Path) -> None:
    found = find_instruments((), ScriptedClock(), powercap=tmp_path / "none")
    assert (found.counters, found.probes, found.devices) == ((), (), ())
    assert set(found.missing) == {"GPU energy", "CPU and memory energy (RAPL)"}
    with pytest.raises(MeterUnavailable, match="nothing on this machine measures energy"):
        found.meter()


def test_only_the_gpus_that_are_named_are_opened(tmp_path: Path) -> None:
    library = ScriptedEnergyNvml(energy_mj={"GPU-12": 1000, "GPU-34": 2000, "GPU-56": 3000})
    found = find_instruments(("GPU-34", "GPU-12"), ScriptedClock(), library, tmp_path / "none")
    assert [each.origin.device for each in found.counters] == ["GPU-34", "GPU-12"]
    assert [each.origin.device for each in found.probes] == ["GPU-34", "GPU-12"]
    assert found.of_device("GPU-12").devices == ("GPU-12",)
    assert set(found.missing) == {"CPU and memory energy (RAPL)"}


def test_what_a_gpu_lacks_is_named_and_the_rest_is_there(tmp_path: Path) -> None:
    library = ScriptedEnergyNvml(
        {"nvmlDeviceGetTotalEnergyConsumption": pynvml.NVMLError_NotSupported},
        instant=(pynvml.NVML_ERROR_NOT_SUPPORTED, 1, 0),
    )
    found = find_instruments(("GPU-12",), ScriptedClock(), library, tmp_path / "none")
    assert (found.counters, [each.origin.basis for each in found.probes]) == ((), ["averaged_power"])
    assert found.missing["energy counter of GPU-12"] == "GPU-12 does not report its energy: Not Supported"
    assert "does not report its current power" in found.missing["instant power of GPU-12"]


def test_counters_alone_are_those_of_all_that_computes(tmp_path: Path) -> None:
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    for name, content in (("name", "package-0"), ("energy_uj", "5000000"), ("max_energy_range_uj", "65532610987")):
        (zone / name).write_text(content)
    library = ScriptedEnergyNvml(energy_mj={"GPU-12": 1000, "GPU-34": 2000})
    on_gpu, on_cpu = (
        find_instruments(uuids, ScriptedClock(), library, tmp_path).counters_alone() for uuids in (("GPU-12",), ())
    )
    assert on_gpu is not None and [each.origin.device for each in on_gpu.counters] == ["GPU-12"]
    assert on_cpu is not None and [each.origin.device for each in on_cpu.counters] == ["package-0"]
    assert (on_gpu.probes, on_cpu.probes) == ((), ())
    blind = ScriptedEnergyNvml({"nvmlDeviceGetTotalEnergyConsumption": pynvml.NVMLError_NotSupported})
    # The CPU's joules would pass for those of a model on a GPU.
    assert find_instruments(("GPU-12",), ScriptedClock(), blind, tmp_path).counters_alone() is None
    assert find_instruments((), ScriptedClock(), powercap=tmp_path / "none").counters_alone() is None


def test_both_sources_measure_one_window_side_by_side() -> None:
    clock = ScriptedClock(1.05)
    device = SimulatedDevice(clock, constant(100.0), power_read_cost_s=0.00001)
    meter = Instruments(clock, (SimulatedCounter(device),), (SimulatedPower(device),)).calibrated().meter()
    meter.open()
    # The counter has waited for a tick; power is read after that.
    started_s = clock.now_s()
    device.run(2.0, 300.0)
    reading = meter.close()
    assert reading.seconds == pytest.approx(2.0)
    counted, integrated = reading.devices
    assert (counted.origin.basis, integrated.origin.basis) == ("counter", "instant_power")
    # Closed after 2 s, not when the counter's next tick has come.
    assert device.true_j(started_s, started_s + 2.0) == pytest.approx(600.0)
    assert integrated.joules == pytest.approx(600.0, rel=0.01)
    assert counted.joules == pytest.approx(600.0, rel=0.01)


def test_ticks_are_known_after_calibration_only() -> None:
    clock = ScriptedClock(1.0)
    device = SimulatedDevice(clock, constant(100.0), tick_s=0.02)
    found = Instruments(clock, (SimulatedCounter(device),), ())
    assert found.longest_ticks_s == {}
    assert found.calibrated().longest_ticks_s == {"GPU-simulated": pytest.approx(0.02, abs=0.0006)}


def test_the_cpu_has_no_uuid() -> None:
    assert uuids_of([torch.device("cpu")]) == ()
