"""NVML: a GPU's clocks, temperature, power, energy, throttling and the other processes on it.

NVML is the driver's library for monitoring (`pynvml`, in the package nvidia-ml-py). A reading takes about a millisecond
of host time and does not wait for the GPU; still none is taken inside a measured run.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.records.energy import Basis, EnergyOrigin
from experiment_core_utils.records.settings import GpuReading

T = TypeVar("T")
# Bits of nvmlClocksEventReasons (nvml.h), by name.
EVENT_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
# Those that mean that the GPU ran slower than it could because of heat or power.
THROTTLING = frozenset(
    {"sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
)


def event_reason_names(bits: int) -> tuple[str, ...]:
    """The reasons that are set, in order of their bits; one without a name as its number."""
    found = [1 << place for place in range(bits.bit_length()) if bits >> place & 1]
    return tuple(EVENT_REASONS.get(bit, f"{bit:#x}") for bit in found)


@dataclass(frozen=True)
class GpuDescription:
    """What does not change while a GPU works; None where it does not report it, for which `reason` says why."""

    name: str | None
    driver_version: str | None
    power_limit_w: float | None  #: that is enforced
    default_power_limit_w: float | None  #: that the GPU came with
    #: application_sm_clock_mhz, application_memory_clock_mhz: that are set for work; the GPU may go beyond them
    application_sm_clock_mhz: int | None
    application_memory_clock_mhz: int | None
    #: max_sm_clock_mhz, max_memory_clock_mhz: the highest that there are
    max_sm_clock_mhz: int | None
    max_memory_clock_mhz: int | None
    reason: str | None


class NvmlGpu:
    """One GPU, opened by the id that the driver gives it.

    Args:
        uuid: such as "GPU-8d1b…".
        library: the module `pynvml`, or a stand-in; None imports it.
        pid: of this process, to exclude it.

    Raises:
        MeterUnavailable: no such package, driver or GPU.
    """

    def __init__(self, uuid: str, library: ModuleType | Any | None = None, pid: int | None = None) -> None:
        self._nvml, self._handle = open_gpu(uuid, library)
        self._pid = os.getpid() if pid is None else pid

    @property
    def index(self) -> int:
        """The GPU's number among all GPUs of the machine, whatever number it has in this process."""
        return int(_answer(self._nvml, "NVML does not number this GPU", self._nvml.nvmlDeviceGetIndex, self._handle))

    def read(self) -> GpuReading:
        """The GPU now; what it does not report is None, and `reason` says why."""
        nvml, handle = self._nvml, self._handle
        missing: dict[str, str] = {}
        query = partial(self._query, missing)
        power_mw = query("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        bits = query("throttle reasons", self._event_reasons)
        count, memory_bytes = query("processes", self._other_processes) or (None, None)
        if count is None and "processes" not in missing:
            missing["processes"] = "the driver does not list this process: its ids are those of another namespace"
        return GpuReading(
            sm_clock_mhz=query("SM clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            memory_clock_mhz=query("memory clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            temperature_c=query(
                "temperature", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            power_w=power_mw / 1000 if power_mw is not None else None,
            throttle_reasons=event_reason_names(bits) if bits is not None else None,
            power_throttled_s=query("power throttling", lambda: self._throttled_s(nvml.NVML_PERF_POLICY_POWER)),
            thermal_throttled_s=query("thermal throttling", lambda: self._throttled_s(nvml.NVML_PERF_POLICY_THERMAL)),
            utilisation_percent=query("utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            foreign_processes=count,
            foreign_memory_bytes=memory_bytes,
            reason=_joined(missing),
        )

    def utilisation_percent(self) -> float:
        """See `GpuReading.utilisation_percent`; alone it takes a fraction of a whole reading's time.

        Raises:
            MeterUnavailable: the GPU does not report it.
        """
        return float(_answer(self._nvml, "utilisation", self._nvml.nvmlDeviceGetUtilizationRates, self._handle).gpu)

    def describe(self) -> GpuDescription:
        """Name, driver, power limits and clocks; what the GPU does not report is None, and `reason` says why."""
        nvml, handle = self._nvml, self._handle
        missing: dict[str, str] = {}
        query = partial(self._query, missing)
        limit_mw = query("power limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        default_mw = query("default power limit", lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle))
        set_clock, max_clock = nvml.nvmlDeviceGetApplicationsClock, nvml.nvmlDeviceGetMaxClockInfo
        sm, memory = nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM
        return GpuDescription(
            name=query("name", lambda: _text(nvml.nvmlDeviceGetName(handle))),
            driver_version=query("driver version", lambda: _text(nvml.nvmlSystemGetDriverVersion())),
            power_limit_w=limit_mw / 1000 if limit_mw is not None else None,
            default_power_limit_w=default_mw / 1000 if default_mw is not None else None,
            application_sm_clock_mhz=query("application SM clock", lambda: set_clock(handle, sm)),
            application_memory_clock_mhz=query("application memory clock", lambda: set_clock(handle, memory)),
            max_sm_clock_mhz=query("highest SM clock", lambda: max_clock(handle, sm)),
            max_memory_clock_mhz=query("highest memory clock", lambda: max_clock(handle, memory)),
            reason=_joined(missing),
        )

    def _query(self, missing: dict[str, str], name: str, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except self._nvml.NVMLError as error:
            missing[name] = str(error)
            return None

    def _event_reasons(self) -> int:
        """The reasons for lowered clocks, by the older name where the driver does not know the newer one."""
        try:
            return int(self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle))
        except self._nvml.NVMLError_FunctionNotFound:
            return int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))

    def _throttled_s(self, policy: int) -> float:
        """Seconds since the driver was loaded in which clocks were held down by this policy (violationTime, in ns)."""
        return float(self._nvml.nvmlDeviceGetViolationStatus(self._handle, policy).violationTime) * 1e-9

    def _other_processes(self) -> tuple[int, int | None] | None:
        """How many other processes compute here and what memory they use; None where ids cannot be compared."""
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        if all(each.pid != self._pid for each in processes):
            return None
        others = [each.usedGpuMemory for each in processes if each.pid != self._pid]
        return len(others), None if None in others else sum(others)


def _joined(missing: dict[str, str]) -> str | None:
    return "; ".join(f"{name}: {why}" for name, why in missing.items()) or None


def _text(given: str | bytes) -> str:
    """Older bindings give bytes."""
    return given.decode() if isinstance(given, bytes) else given


def processes_by_gpu(library: ModuleType | Any | None = None) -> dict[str, frozenset[int]]:
    """Ids of the processes that compute on each GPU of the machine, whichever of these this process sees.

    Raises:
        MeterUnavailable: no such package or driver, or it does not list them.
    """
    nvml = library if library is not None else _pynvml()
    _answer(nvml, "NVML does not start", nvml.nvmlInit)
    found = {}
    for index in range(_answer(nvml, "NVML counts no GPUs", nvml.nvmlDeviceGetCount)):
        handle = _answer(nvml, f"NVML does not open GPU {index}", nvml.nvmlDeviceGetHandleByIndex, index)
        uuid = _text(_answer(nvml, f"NVML does not name GPU {index}", nvml.nvmlDeviceGetUUID, handle))
        listed = _answer(nvml, f"NVML lists no processes of {uuid}", nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        found[uuid] = frozenset(each.pid for each in listed)
    return found


def open_gpu(uuid: str, library: ModuleType | Any | None = None) -> tuple[Any, Any]:
    """The library and its handle of a GPU; arguments and errors are those of `NvmlGpu`."""
    nvml = library if library is not None else _pynvml()
    _answer(nvml, f"NVML does not open {uuid}", nvml.nvmlInit)
    return nvml, _answer(nvml, f"NVML does not open {uuid}", nvml.nvmlDeviceGetHandleByUUID, uuid)


def _answer(nvml: Any, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """What the driver answers; raises MeterUnavailable, which begins with `what`, where it does not."""
    try:
        return call(*arguments)
    except nvml.NVMLError as error:
        raise MeterUnavailable(f"{what}: {error}") from error


def _pynvml() -> ModuleType:
    try:
        import pynvml
    except ImportError as error:
        raise MeterUnavailable("pynvml is not installed (pip install nvidia-ml-py)") from error
    found: ModuleType = pynvml
    return found


class NvmlCounter:
    """A GPU's `EnergyCounter`.

    Arguments are those of `NvmlGpu`.

    Raises:
        MeterUnavailable: no such package, driver, GPU or counter.
    """

    wraps_at_j = None  # 64 bits of millijoules are 800,000 years at 700 W

    def __init__(self, uuid: str, library: ModuleType | Any | None = None) -> None:
        self._uuid = uuid
        self._nvml, self._handle = open_gpu(uuid, library)
        self.origin = EnergyOrigin(uuid, "gpu", "nvml_counter", "measured", "counter")
        self.read_j()
        self.limit_w = self._limit_w()

    def read_j(self) -> float:
        what = f"{self._uuid} does not report its energy"
        return float(_answer(self._nvml, what, self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)) / 1000

    def _limit_w(self) -> float | None:
        """The power limit in force; None where the GPU does not report it."""
        try:
            return float(self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle)) / 1000
        except self._nvml.NVMLError:
            return None


class NvmlPower:
    """A GPU's `PowerProbe`: its power at the moment, or what the older call reports where that is not available.

    `origin.basis` is `averaged_power` for the older call, on every GPU: on some it is the power at the moment too.
    Arguments are those of `NvmlGpu`.

    Raises:
        MeterUnavailable: no such package, driver or GPU, or neither reading.
    """

    def __init__(self, uuid: str, library: ModuleType | Any | None = None) -> None:
        self._uuid = uuid
        self._nvml, self._handle = open_gpu(uuid, library)
        self.no_instant_power: str | None = None
        try:
            self._instant_w()
        except MeterUnavailable as error:
            self.no_instant_power = str(error)
            self._averaged_w()
        basis: Basis = "instant_power" if self.no_instant_power is None else "averaged_power"
        self.origin = EnergyOrigin(uuid, "gpu", "power_integral", "measured", basis)

    def read_w(self) -> float:
        return self._instant_w() if self.no_instant_power is None else self._averaged_w()

    def _instant_w(self) -> float:
        nvml, what = self._nvml, f"{self._uuid} does not report its current power"
        (value,) = _answer(nvml, what, nvml.nvmlDeviceGetFieldValues, self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
        if value.nvmlReturn != nvml.NVML_SUCCESS:
            raise MeterUnavailable(f"{what}: {nvml.NVMLError(value.nvmlReturn)}")
        if value.valueType != nvml.NVML_VALUE_TYPE_UNSIGNED_INT:
            raise MeterUnavailable(f"{self._uuid} reports its current power as the unknown type {value.valueType}")
        return float(value.value.uiVal) / 1000

    def _averaged_w(self) -> float:
        what = f"{self._uuid} does not report its power"
        return float(_answer(self._nvml, what, self._nvml.nvmlDeviceGetPowerUsage, self._handle)) / 1000
