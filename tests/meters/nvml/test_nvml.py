"""NVML's readings from a scripted library, and the scripted library against the real one."""

import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from experiment_core_utils.meters.nvml import EVENT_REASONS, THROTTLING, GpuDescription, NvmlGpu, event_reason_names
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.records.settings import GpuReading

GIB = 1 << 30


@dataclass
class ScriptedNvml:
    """What `NvmlGpu` asks of pynvml; functions named in `refused` raise that library's error.

    Attributes:
        processes: id and memory of those that compute on the GPU.
    """

    refused: dict[str, type[Exception]] = field(default_factory=dict)
    processes: tuple[tuple[int, int | None], ...] = ((41, GIB),)
    reasons: int = 0x24
    opened: list[str] = field(default_factory=list)

    NVMLError = pynvml.NVMLError
    NVMLError_FunctionNotFound = pynvml.NVMLError_FunctionNotFound
    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM
    NVML_CLOCK_MEM = pynvml.NVML_CLOCK_MEM
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    NVML_PERF_POLICY_POWER = pynvml.NVML_PERF_POLICY_POWER
    NVML_PERF_POLICY_THERMAL = pynvml.NVML_PERF_POLICY_THERMAL

    def _may(self, name: str) -> None:
        if name in self.refused:
            raise self.refused[name]()

    def nvmlInit(self) -> None:
        self._may("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._may("nvmlDeviceGetHandleByUUID")
        self.opened.append(uuid)
        return "handle"

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        self._may("nvmlDeviceGetName")
        return b"a GPU"

    def nvmlSystemGetDriverVersion(self) -> str:
        self._may("nvmlSystemGetDriverVersion")
        return "580.1"

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        self._may("nvmlDeviceGetEnforcedPowerLimit")
        return 650_000

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: str) -> int:
        self._may("nvmlDeviceGetPowerManagementDefaultLimit")
        return 700_000

    def nvmlDeviceGetApplicationsClock(self, handle: str, type: int) -> int:
        self._may("nvmlDeviceGetApplicationsClock")
        return {self.NVML_CLOCK_SM: 1755, self.NVML_CLOCK_MEM: 2619}[type]

    def nvmlDeviceGetMaxClockInfo(self, handle: str, type: int) -> int:
        self._may("nvmlDeviceGetMaxClockInfo")
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 2619}[type]

    def nvmlDeviceGetIndex(self, handle: str) -> int:
        self._may("nvmlDeviceGetIndex")
        return 5

    def nvmlDeviceGetClockInfo(self, handle: str, type: int) -> int:
        self._may("nvmlDeviceGetClockInfo")
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 2619}[type]

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        self._may("nvmlDeviceGetTemperature")
        return 61

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._may("nvmlDeviceGetPowerUsage")
        return 412_500

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        self._may("nvmlDeviceGetCurrentClocksEventReasons")
        return self.reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        self._may("nvmlDeviceGetCurrentClocksThrottleReasons")
        return 0x1

    def nvmlDeviceGetViolationStatus(self, device: str, perfPolicyType: int) -> Any:
        self._may("nvmlDeviceGetViolationStatus")
        return SimpleNamespace(violationTime=2_500_000_000 if perfPolicyType == self.NVML_PERF_POLICY_POWER else 0)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._may("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=37, memory=5)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        self._may("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in self.processes]


def read(library: ScriptedNvml, pid: int = 41) -> GpuReading:
    return NvmlGpu("GPU-12", library, pid).read()


def test_a_reading_has_the_units_of_its_names() -> None:
    library = ScriptedNvml()
    assert read(library) == GpuReading(
        sm_clock_mhz=1980,
        memory_clock_mhz=2619,
        temperature_c=61,
        power_w=412.5,
        throttle_reasons=("sw_power_cap", "sw_thermal_slowdown"),
        power_throttled_s=2.5,
        thermal_throttled_s=0.0,
        utilisation_percent=37,
        foreign_processes=0,
        foreign_memory_bytes=0,
        reason=None,
    )
    assert library.opened == ["GPU-12"]


def test_what_a_gpu_is_and_what_it_is_limited_to() -> None:
    assert NvmlGpu("GPU-12", ScriptedNvml(), pid=41).describe() == GpuDescription(
        name="a GPU",
        driver_version="580.1",
        power_limit_w=650.0,
        default_power_limit_w=700.0,
        application_sm_clock_mhz=1755,
        application_memory_clock_mhz=2619,
        max_sm_clock_mhz=1980,
        max_memory_clock_mhz=2619,
        reason=None,
    )


def test_what_a_gpu_does_not_say_of_itself_is_none_with_a_reason() -> None:
    refused: dict[str, type[Exception]] = {
        "nvmlDeviceGetEnforcedPowerLimit": pynvml.NVMLError_NotSupported,
        "nvmlDeviceGetApplicationsClock": pynvml.NVMLError_NotSupported,
    }
    found = NvmlGpu("GPU-12", ScriptedNvml(refused), pid=41).describe()
    assert (found.power_limit_w, found.application_sm_clock_mhz, found.default_power_limit_w) == (None, None, 700.0)
    assert found.reason is not None
    for name in ("power limit: ", "application SM clock: ", "application memory clock: "):
        assert name in found.reason


def test_other_processes_are_counted_with_their_memory() -> None:
    found = read(ScriptedNvml(processes=((41, GIB), (42, 2 * GIB), (43, 3 * GIB))))
    assert (found.foreign_processes, found.foreign_memory_bytes) == (2, 5 * GIB)
    hidden = read(ScriptedNvml(processes=((41, GIB), (42, None))))
    assert (hidden.foreign_processes, hidden.foreign_memory_bytes) == (1, None)


@pytest.mark.parametrize("processes", [(), ((7001, GIB),)])
def test_ids_of_another_namespace_say_nothing(processes: tuple) -> None:
    found = read(ScriptedNvml(processes=processes))
    assert (found.foreign_processes, found.foreign_memory_bytes) == (None, None)
    assert found.reason is not None and "another namespace" in found.reason


def test_what_the_gpu_does_not_tell_is_none_with_a_reason_and_the_rest_is_there() -> None:
    refused: dict[str, type[Exception]] = {
        "nvmlDeviceGetPowerUsage": pynvml.NVMLError_NotSupported,
        "nvmlDeviceGetComputeRunningProcesses": pynvml.NVMLError_NoPermission,
        "nvmlDeviceGetViolationStatus": pynvml.NVMLError_NotSupported,
    }
    found = read(ScriptedNvml(refused))
    assert (found.power_w, found.power_throttled_s, found.foreign_processes) == (None, None, None)
    assert (found.sm_clock_mhz, found.temperature_c) == (1980, 61)
    assert found.reason is not None
    for name in ("power: ", "processes: ", "power throttling: ", "thermal throttling: "):
        assert name in found.reason


def test_an_old_driver_has_throttle_reasons_under_their_old_name() -> None:
    refused: dict[str, type[Exception]] = {"nvmlDeviceGetCurrentClocksEventReasons": pynvml.NVMLError_FunctionNotFound}
    assert read(ScriptedNvml(refused)).throttle_reasons == ("gpu_idle",)


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_without_driver_or_gpu_the_meter_is_unavailable(name: str) -> None:
    with pytest.raises(MeterUnavailable, match="NVML does not open GPU-12"):
        read(ScriptedNvml({name: pynvml.NVMLError_LibraryNotFound}))


def test_a_gpu_has_its_number_on_the_machine() -> None:
    assert NvmlGpu("GPU-12", ScriptedNvml()).index == 5
    with pytest.raises(MeterUnavailable, match="does not number this GPU"):
        _ = NvmlGpu("GPU-12", ScriptedNvml({"nvmlDeviceGetIndex": pynvml.NVMLError_NotSupported})).index


def test_the_real_library_says_that_there_is_no_such_gpu() -> None:
    with pytest.raises(MeterUnavailable, match="GPU-00000000"):
        NvmlGpu("GPU-00000000-0000-0000-0000-000000000000")


def test_reasons_are_named_by_bit() -> None:
    assert event_reason_names(0) == ()
    assert event_reason_names(0x9) == ("gpu_idle", "hw_slowdown")
    assert event_reason_names(0x1000) == ("0x1000",)


# --- the real library -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in vars(ScriptedNvml) if name.startswith("nvml")])
def test_the_scripted_functions_take_what_the_real_ones_take(name: str) -> None:
    real = list(inspect.signature(getattr(pynvml, name)).parameters.values())
    scripted = list(inspect.signature(getattr(ScriptedNvml, name)).parameters.values())[1:]
    needed = [each for each in real if each.default is each.empty]
    assert len(needed) == len(scripted)


def test_names_and_bits_are_those_of_the_library() -> None:
    suffixes = {
        0x001: "GpuIdle", 0x002: "ApplicationsClocksSetting", 0x004: "SwPowerCap", 0x008: "HwSlowdown",
        0x010: "SyncBoost", 0x020: "SwThermalSlowdown", 0x040: "HwThermalSlowdown", 0x080: "HwPowerBrakeSlowdown",
        0x100: "DisplayClockSetting",
    }  # fmt: skip
    assert set(EVENT_REASONS) == set(suffixes)
    for bit, suffix in suffixes.items():
        assert getattr(pynvml, f"nvmlClocksEventReason{suffix}") == bit
        assert EVENT_REASONS[bit].replace("_", "") == suffix.lower()
    assert set(EVENT_REASONS.values()) >= THROTTLING
    assert {name for name, _ in pynvml.c_nvmlViolationTime_t._fields_} == {"referenceTime", "violationTime"}
    assert {name for name, _ in pynvml.c_nvmlUtilization_t._fields_} == {"gpu", "memory"}
    assert {"pid", "usedGpuMemory"} <= {name for name, *_ in pynvml.c_nvmlProcessInfo_v3_t._fields_}


def test_utilisation_can_be_read_alone() -> None:
    assert NvmlGpu("GPU-12", ScriptedNvml()).utilisation_percent() == 37.0
    silent = ScriptedNvml(refused={"nvmlDeviceGetUtilizationRates": pynvml.NVMLError_NotSupported})
    with pytest.raises(MeterUnavailable, match="utilisation: Not Supported"):
        NvmlGpu("GPU-12", silent).utilisation_percent()
