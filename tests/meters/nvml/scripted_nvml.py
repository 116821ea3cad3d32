"""A scripted library in place of pynvml, with its errors and constants: GPUs with energy, power and names."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml


@dataclass
class ScriptedEnergyNvml:
    """What the energy meters ask of pynvml; functions named in `refused` raise that library's error.

    Attributes:
        energy_mj: by GPU.
        processes: ids of those that compute, by GPU.
        instant: `nvmlReturn`, `valueType` and milliwatts of the field value.
        requested: field ids that were requested.
    """

    refused: dict[str, type[Exception]] = field(default_factory=dict)
    energy_mj: dict[str, int] = field(default_factory=lambda: {"GPU-12": 5_000_250})
    processes: dict[str, list[int]] = field(default_factory=dict)
    instant: tuple[int, int, int] = (pynvml.NVML_SUCCESS, pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 412_500)
    requested: list[int] = field(default_factory=list)

    NVMLError = pynvml.NVMLError
    NVML_SUCCESS = pynvml.NVML_SUCCESS
    NVML_FI_DEV_POWER_INSTANT = pynvml.NVML_FI_DEV_POWER_INSTANT
    NVML_VALUE_TYPE_UNSIGNED_INT = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT

    def _may(self, name: str) -> None:
        if name in self.refused:
            raise self.refused[name]()

    def nvmlInit(self) -> None:
        self._may("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.energy_mj:
            raise pynvml.NVMLError_NotFound()
        return uuid

    def nvmlDeviceGetCount(self) -> int:
        return len(self.processes)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return list(self.processes)[index]

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        self._may("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid) for pid in self.processes[handle]]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._may("nvmlDeviceGetTotalEnergyConsumption")
        return self.energy_mj[handle]

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._may("nvmlDeviceGetPowerUsage")
        return 398_000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        self._may("nvmlDeviceGetEnforcedPowerLimit")
        return 700_000

    def nvmlDeviceGetFieldValues(self, handle: str, fieldIds: list[int]) -> list[Any]:
        self._may("nvmlDeviceGetFieldValues")
        self.requested.extend(fieldIds)
        returned, kind, milliwatts = self.instant
        value = SimpleNamespace(uiVal=milliwatts)
        return [SimpleNamespace(nvmlReturn=returned, valueType=kind, value=value) for _ in fieldIds]
