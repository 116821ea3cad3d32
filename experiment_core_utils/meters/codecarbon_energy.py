"""In: windows that codecarbon measures; out: their energies in joules by part of the machine."""

from collections.abc import Mapping

from experiment_core_utils.meters.codecarbon_meter import CodecarbonMeter
from experiment_core_utils.primitives.clock import Clock
from experiment_core_utils.primitives.csv_cells import Cell
from experiment_core_utils.primitives.energy_records import ALL_DEVICES, DeviceEnergy, EnergyOrigin, EnergyReading
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable
from experiment_core_utils.primitives.units import joules_of_kwh

GPU = EnergyOrigin(ALL_DEVICES, "gpu", "nvml_counter", "measured", "counter")
RAM = EnergyOrigin(ALL_DEVICES, "ram", "codecarbon_estimate", "estimated", "load_model")
CPU_BY_SOURCE = {
    "rapl": EnergyOrigin(ALL_DEVICES, "cpu", "rapl", "measured", "counter"),
    "codecarbon_estimate": EnergyOrigin(ALL_DEVICES, "cpu", "codecarbon_estimate", "estimated", "load_model"),
}
READ_NOTHING = "codecarbon read nothing"


class CodecarbonEnergy:
    """codecarbon as an `EnergyMeter`: the CPU, the GPUs together, and memory, in this order.

    For code that measures through the interface and may run where codecarbon is the only source; put it into
    `SideBySide` with others to compare them. Text runs write codecarbon's own columns and take `CodecarbonMeter`
    itself; stages of a request are too short for it.

    No figure has a bound: codecarbon does not tell when it read what.
    """

    def __init__(self, meter: CodecarbonMeter, clock: Clock) -> None:
        self._meter = meter
        self._clock = clock
        self._begun_s: float | None = None
        self._failure: str | None = None

    def open(self) -> None:
        """See `EnergyMeter.open`."""
        if self._begun_s is not None:
            raise ConfigurationError("this energy meter has an open window; close it before opening another")
        self._failure = None
        try:
            self._meter.open()
        except MeterUnavailable as error:
            self._failure = str(error)
        self._begun_s = self._clock.now_s()

    def close(self) -> EnergyReading:
        """See `EnergyMeter.close`."""
        if self._begun_s is None:
            raise ConfigurationError("this energy meter has no open window; open one before closing")
        seconds = self._clock.now_s() - self._begun_s
        self._begun_s = None
        if self._failure is None:
            try:
                return EnergyReading(seconds, energies_of_window(self._meter.close()))
            except MeterUnavailable as error:
                self._failure = str(error)
        cpu = CPU_BY_SOURCE[self._meter.cpu_source]
        return EnergyReading(
            seconds, tuple(DeviceEnergy(origin, None, None, self._failure) for origin in (cpu, GPU, RAM))
        )

    def release(self) -> None:
        """See `EnergyMeter.release`."""
        self._begun_s = None
        self._meter.release()


def energies_of_window(window: Mapping[str, Cell]) -> tuple[DeviceEnergy, ...]:
    """CPU, GPUs and memory of one row that `CodecarbonMeter.close` gave; what it gives as 0 was not read: None."""
    problem, _ = gpu_problem(window)
    gpu = DeviceEnergy(GPU, None, None, problem) if problem is not None else _part(GPU, window, "gpu_energy")
    cpu = CPU_BY_SOURCE[str(window["cpu_energy_source"])]
    return (_part(cpu, window, "cpu_energy"), gpu, _part(RAM, window, "ram_energy"))


def _part(origin: EnergyOrigin, window: Mapping[str, Cell], column: str) -> DeviceEnergy:
    joules = joules_of_kwh(number_in(window, column)) or None
    return DeviceEnergy(origin, joules, None, READ_NOTHING if joules is None else None)


def gpu_problem(window: Mapping[str, Cell]) -> tuple[str | None, bool]:
    """Why a window has no GPU energy, if it has none, and whether its total is whole all the same.

    codecarbon counts every GPU of the machine in `gpu_count`, also where it tracks none of them.
    """
    listed = number_in(window, "gpu_count")
    in_use = number_in(window, "gpus_in_use") if window.get("gpus_in_use") is not None else listed
    if number_in(window, "gpu_energy") > 0 and listed >= in_use:
        return None, True
    if in_use == 0:
        return "codecarbon tracks no GPU here, and none is in use", True
    if listed == 0:
        return f"codecarbon tracks no GPU here, {in_use:g} in use; it needs nvidia-smi on the PATH", False
    if listed < in_use:
        return f"codecarbon tracks {listed:g} of the {in_use:g} GPUs in use", False
    return f"codecarbon read no energy from the {in_use:g} GPUs in use (a window under 0.2 s is too short)", False


def number_in(window: Mapping[str, Cell], column: str) -> float:
    """A figure that `read_windows` has found to be a number."""
    value = window[column]
    assert isinstance(value, int | float)
    return value
