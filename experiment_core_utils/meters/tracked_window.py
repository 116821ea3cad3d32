"""A window of energy over a machine, by codecarbon and by the machine's instruments, and its two files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from experiment_core_utils.meters.codecarbon import CodecarbonLibrary, CodecarbonMeter, measures
from experiment_core_utils.meters.energy_files import (
    append_energy_window,
    append_window,
    emissions_path,
    energy_path,
    read_energy_windows,
    read_windows,
)
from experiment_core_utils.meters.instruments import Instruments, find_instruments
from experiment_core_utils.meters.nvml import NvmlGpu
from experiment_core_utils.meters.requested_energy import LOGGER, log_estimate
from experiment_core_utils.meters.windows import InstrumentWindow
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.csv_tables import Cell
from experiment_core_utils.primitives.device import synchronize_used_gpus
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable, ResultsError, ResultsNotSaved
from experiment_core_utils.records.energy import EnergyWindow

# Before and after the generation of a text run, where the machine has instruments of its own.
IDLE_S = 5.0


@dataclass(frozen=True)
class EnergySources:
    """What energy is read with; None is found on the machine."""

    library: CodecarbonLibrary | None = None
    instruments: Instruments | None = None  #: calibrated
    idle_s: float = IDLE_S
    gpus: tuple[str, ...] | None = None  #: that this process sees, by the driver's ids


class EnergyTracker:
    """A window over a machine, open from here until `stop`; for what is not said here see `start_energy_tracking`.

    Args:
        gpus: those that are to be measured, by the driver's ids.

    Attributes:
        is_measured: once it was stopped, whether anything was measured, not only estimated.
    """

    def __init__(
        self,
        experiment_id: str,
        output_dir: Path,
        country_iso_code: str | None,
        gpus: tuple[str, ...],
        sources: EnergySources,
    ) -> None:
        self.is_measured = False
        self._experiment_id, self._gpus, self._is_running = experiment_id, gpus, True
        self._path = validated_path(experiment_id, output_dir)
        self._codecarbon = CodecarbonMeter(country_iso_code, _nvml_indices(gpus), len(gpus), sources.library)
        if country_iso_code is None and self._codecarbon.reason is None:
            log_world_mean()
        synchronize_used_gpus()
        self._instruments = InstrumentWindow(sources.instruments or _instruments_of(gpus), sources.idle_s)
        # The outer one: it waits for ticks, and codecarbon's window is not made longer by that.
        self._instruments.open()
        self._codecarbon.open()
        if self._codecarbon.reason is not None and self._instruments.reason is not None:
            self._instruments.release()
            self._codecarbon.release()
            raise MeterUnavailable(f"{self._codecarbon.reason}; {self._instruments.reason}")
        if self._instruments.reason is not None and not self._codecarbon.reads_counters:
            log_estimate(self._instruments.reason)

    def stop(self, *, is_at_rest: bool = True) -> Path:
        """End the window and write it; argument, path and errors are those of `stop_energy_tracking`."""
        if not self._is_running:
            raise ConfigurationError(
                f"the tracker of experiment {self._experiment_id} was stopped already; start another for a new window"
            )
        self._is_running = False
        synchronize_used_gpus()
        row = self._codecarbon.close()
        beside = replace(self._instruments.close(is_idle_requested=is_at_rest), gpus=self._gpus)
        self._codecarbon.release()
        self.is_measured = beside.has_figure or (row is not None and measures(row))
        if row is None and not beside.has_figure:
            raise MeterUnavailable(f"{self._codecarbon.reason}; no meter of the machine gave a reading either")
        if row is None:
            log_no_kwh(str(self._codecarbon.reason))
        return self._written(row, beside)

    def _written(self, row: Mapping[str, Cell] | None, beside: EnergyWindow) -> Path:
        """The instruments' window is written whatever becomes of codecarbon's row."""
        path, reason = energy_path(self._experiment_id, self._path.parent), self._codecarbon.reason
        try:
            if row is not None:
                append_window({**row, "experiment_id": self._experiment_id}, self._path)
        except (ResultsError, ResultsNotSaved) as error:
            reason = str(error)
            raise
        finally:
            append_energy_window(replace(beside, codecarbon_reason=reason), self._experiment_id, path)
        return path if row is None else self._path


@cache
def _instruments_of(uuids: tuple[str, ...]) -> Instruments:
    """Found and calibrated once in a process."""
    return find_instruments(uuids, HostClock()).calibrated()


def validated_path(experiment_id: str, output_dir: Path) -> Path:
    """Path of codecarbon's file; raises what cannot be written before anything is measured."""
    path = emissions_path(experiment_id, output_dir)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MeterUnavailable(f"{output_dir} cannot contain an emissions file ({error.strerror})") from error
    if path.exists():
        read_windows(path)
    if energy_path(experiment_id, output_dir).exists():
        read_energy_windows(energy_path(experiment_id, output_dir))
    return path


@cache
def log_no_kwh(reason: str) -> None:
    """Warn, once in a process, that only the machine's own meters give figures."""
    LOGGER.warning("%s; there is no energy in kWh and no emission, only what the machine's own meters read", reason)


@cache
def log_world_mean() -> None:
    """Warn, once in a process, that the world's mean emission factor is used."""
    LOGGER.warning(
        "no country was given: emissions are computed with the world's mean electricity mix (country_iso_code=FRA "
        "takes that of France)"
    )


def _nvml_indices(uuids: Sequence[str]) -> list[int]:
    """The driver's indices of these GPUs; none without NVML, by which codecarbon reads GPUs, too."""
    try:
        return [NvmlGpu(uuid).index for uuid in uuids]
    except MeterUnavailable:
        return []
