"""In: GPUs by their ids; out: their energy counters and power readings, through NVML.

The counter (`nvmlDeviceGetTotalEnergyConsumption`, millijoules since the driver was loaded) is there from Volta on; it
advances every 20 to 100 ms and a reading takes some milliseconds. Power at the moment is a field value on newer
drivers; the older call tells of a mean over a second on Ampere (but for GA100) and newer GPUs. Where one board holds
GPU and CPU (Grace Hopper), or a GPU is shared in parts (MIG), figures are of the whole board or GPU.
"""

from types import ModuleType
from typing import Any

from experiment_core_utils.meters.nvml import open_gpu
from experiment_core_utils.primitives.energy_records import Basis, EnergyOrigin
from experiment_core_utils.primitives.errors import MeterUnavailable


class NvmlCounter:
    """A GPU's `EnergyCounter`.

    Args:
        uuid: such as "GPU-8d1b…".
        library: the module `pynvml`, or what stands in for it; None imports it.

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
        """See `EnergyCounter.read_j`."""
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000
        except self._nvml.NVMLError as error:
            raise MeterUnavailable(f"{self._uuid} does not tell its energy: {error}") from error

    def _limit_w(self) -> float | None:
        """The power limit in force; None where the GPU does not tell it."""
        try:
            return float(self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle)) / 1000
        except self._nvml.NVMLError:
            return None


class NvmlPower:
    """A GPU's `PowerProbe`: its power at the moment, or what the older call tells where it does not tell that.

    `origin.basis` is `averaged_power` for the older call, on every GPU: on some it is the power at the moment too.

    Args:
        uuid: such as "GPU-8d1b…".
        library: the module `pynvml`, or what stands in for it; None imports it.

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
        """See `PowerProbe.read_w`."""
        return self._instant_w() if self.no_instant_power is None else self._averaged_w()

    def _instant_w(self) -> float:
        nvml = self._nvml
        try:
            value = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])[0]
        except nvml.NVMLError as error:
            raise MeterUnavailable(f"{self._uuid} does not tell its power at the moment: {error}") from error
        if value.nvmlReturn != nvml.NVML_SUCCESS:
            why = nvml.NVMLError(value.nvmlReturn)
            raise MeterUnavailable(f"{self._uuid} does not tell its power at the moment: {why}")
        if value.valueType != nvml.NVML_VALUE_TYPE_UNSIGNED_INT:
            raise MeterUnavailable(f"{self._uuid} tells its power at the moment as type {value.valueType}, not known")
        return float(value.value.uiVal) / 1000

    def _averaged_w(self) -> float:
        try:
            return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1000
        except self._nvml.NVMLError as error:
            raise MeterUnavailable(f"{self._uuid} does not tell its power: {error}") from error
