"""The instruments that can measure energy on this machine, and the reason for each that is missing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import torch

from experiment_core_utils.meters.counters import (
    CALIBRATION_TICKS,
    POWERCAP,
    CounterMeter,
    calibrate_tick,
    rapl_counters,
)
from experiment_core_utils.meters.energy_statistics import with_disagreements
from experiment_core_utils.meters.interface import EnergyCounter, EnergyEstimate, EnergyMeter, PowerProbe
from experiment_core_utils.meters.nvml import NvmlCounter, NvmlPower
from experiment_core_utils.meters.power import JITTER_SEED, SAMPLE_EVERY_S, PowerIntegralMeter, PowerSampler, jittered
from experiment_core_utils.primitives.clock import Clock
from experiment_core_utils.primitives.device import gpu_uuid
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.records.energy import GPU_COUNTER, EnergyOrigin, EnergyReading, PowerTrace, TickCalibration


class SideBySide:
    """An `EnergyMeter` of meters: opened in their order, closed in the reverse one.

    The last one's window is the innermost, and `seconds` is its length; a meter that waits when it is opened or closed
    therefore comes first.
    """

    def __init__(self, meters: Sequence[EnergyMeter]) -> None:
        self._meters = tuple(meters)

    def open(self) -> None:
        for meter in self._meters:
            meter.open()

    def close(self) -> EnergyReading:
        """Devices are in the order of the meters, with a remark where two do not agree on one."""
        readings = [meter.close() for meter in reversed(self._meters)]
        energies = [energy for reading in reversed(readings) for energy in reading.devices]
        seconds = readings[0].seconds
        apart_s = max(reading.seconds for reading in readings) - seconds
        return EnergyReading(seconds, with_disagreements(energies, apart_s / seconds if seconds > 0 else 0.0))

    def release(self) -> None:
        # All of them, even where one raises.
        with ExitStack() as stack:
            for meter in self._meters:
                stack.callback(meter.release)


@dataclass(frozen=True)
class Instruments:
    """Counters and power probes of the devices to be measured, on one clock."""

    clock: Clock
    counters: tuple[EnergyCounter, ...]
    probes: tuple[PowerProbe, ...]
    #: of the counters, by device; filled by `calibrated`
    ticks: Mapping[str, TickCalibration] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)  #: what is not there, by name, and why
    sample_every_s: float = SAMPLE_EVERY_S  #: mean time between two power readings of a device
    #: what the times between readings are drawn from, so that windows differ in them
    jitter: Random = field(default_factory=lambda: Random(JITTER_SEED), compare=False)
    #: what stands in where there is neither a counter nor a probe; it measures nothing, and no figure is mixed with it
    estimate: EnergyEstimate | None = None

    def calibrated(self, num_ticks: int = CALIBRATION_TICKS) -> "Instruments":
        """These instruments with the ticks of the counters, which takes so many ticks for each."""
        ticks = {each.origin.device: calibrate_tick(each, self.clock, num_ticks) for each in self.counters}
        return replace(self, ticks=ticks)

    def counters_alone(self) -> "Instruments | None":
        """The counters of the GPUs, else of the CPU; None where there is none, or a GPU that computes has none."""
        gpus = tuple(each for each in self.counters if each.origin.component == "gpu")
        if not self.counters or any(name.startswith(GPU_COUNTER) for name in self.missing):
            return None
        return replace(self, counters=gpus or self.counters, probes=(), estimate=None)

    @property
    def longest_ticks_s(self) -> Mapping[str, float]:
        """Longest ticks of the calibrated counters, by device."""
        found = {device: tick.longest_tick_s for device, tick in self.ticks.items()}
        return {device: seconds for device, seconds in found.items() if seconds is not None}

    def of_device(self, device: str) -> "Instruments":
        """The meters of one device alone."""
        counters = tuple(each for each in self.counters if each.origin.device == device)
        probes = tuple(each for each in self.probes if each.origin.device == device)
        return replace(self, counters=counters, probes=probes)

    @property
    def origins(self) -> tuple[EnergyOrigin, ...]:
        """Origins of the counters, then of the probes; of the estimate where it stands in for them."""
        if self.is_estimated:
            return () if self.estimate is None else self.estimate.origins
        return (*(each.origin for each in self.counters), *(each.origin for each in self.probes))

    @property
    def is_estimated(self) -> bool:
        """Whether nothing measures, so that only an estimate can give figures."""
        return not self.counters and not self.probes

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that there is something to read of, each once."""
        return tuple(dict.fromkeys(each.device for each in self.origins))

    def require_any(self) -> None:
        """Raises MeterUnavailable where there is neither a counter nor a power reading, whether or not energy can be
        estimated."""
        if self.is_estimated:
            why = "; ".join(f"{name}: {reason}" for name, reason in self.missing.items())
            raise MeterUnavailable(f"nothing on this machine measures energy ({why or 'no source was given'})")

    def require_any_or_estimate(self) -> None:
        """Raises MeterUnavailable where nothing measures and nothing estimates."""
        if self.estimate is None:
            self.require_any()

    def meter(self) -> EnergyMeter:
        """A new meter of all: the counters, aligned to their ticks, beside the integrated power; else the estimate.

        Raises:
            MeterUnavailable: there is nothing to measure with, or it is gone.
        """
        if self.is_estimated and self.estimate is not None:
            return self.estimate
        self.require_any()
        meters: list[EnergyMeter] = []
        if self.counters:
            meters.append(CounterMeter(self.counters, self.clock, self.longest_ticks_s, self.probes, is_aligned=True))
        if self.probes:
            meters.append(PowerIntegralMeter(self.probes, self.clock, jittered(self.sample_every_s, self.jitter)))
        return SideBySide(meters)

    def power_sampler(self) -> PowerSampler:
        """A new one of all probes."""
        return PowerSampler(self.probes, self.clock, jittered(self.sample_every_s, self.jitter))

    @contextmanager
    def power_beside(self) -> Iterator[list[PowerTrace]]:
        """Reads power beside what runs inside; the list has a trace of each probe once that has ended."""
        traces: list[PowerTrace] = []
        if not self.probes:
            yield traces
            return
        sampler = self.power_sampler()
        sampler.start()
        try:
            yield traces
        finally:
            traces += sampler.stop()


def find_instruments(
    gpu_uuids: Sequence[str], clock: Clock, library: ModuleType | Any | None = None, powercap: Path = POWERCAP
) -> Instruments:
    """Whatever can be read of these GPUs and of the CPU; not calibrated.

    Args:
        library: the module `pynvml`, or a stand-in; None imports it.
    """
    counters: list[EnergyCounter] = []
    probes: list[PowerProbe] = []
    missing: dict[str, str] = {}

    def take(name: str, make: Callable[[], None]) -> None:
        try:
            make()
        except MeterUnavailable as error:
            missing[name] = str(error)

    for uuid in gpu_uuids:
        take(f"{GPU_COUNTER} {uuid}", lambda uuid=uuid: counters.append(NvmlCounter(uuid, library)))  # type: ignore[misc]
        take(f"power of {uuid}", lambda uuid=uuid: probes.append(NvmlPower(uuid, library)))  # type: ignore[misc]
    if not gpu_uuids:
        missing["GPU energy"] = "torch sees no GPU that this process may use (driver, CUDA_VISIBLE_DEVICES)"
    for probe in probes:
        if isinstance(probe, NvmlPower) and probe.no_instant_power is not None:
            missing[f"instant power of {probe.origin.device}"] = probe.no_instant_power
    take("CPU and memory energy (RAPL)", lambda: counters.extend(rapl_counters(powercap)))
    return Instruments(clock, tuple(counters), tuple(probes), missing=missing)


def uuids_of(devices: Sequence[torch.device]) -> tuple[str, ...]:
    """The driver's ids of the GPUs among these devices, each once: torch's numbers are not the driver's."""
    found = [uuid for device in devices if (uuid := gpu_uuid(device)) is not None]
    return tuple(dict.fromkeys(found))


def missing_lines(missing: Mapping[str, str]) -> list[str]:
    """What cannot be measured here, and why."""
    return [f"not measured here: {name}: {reason}" for name, reason in missing.items()]
