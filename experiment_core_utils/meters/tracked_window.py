"""A window of energy over a machine, by codecarbon and by the machine's instruments, and its two files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from experiment_core_utils.meters.codecarbon import WORLD_MEAN, CodecarbonLibrary, CodecarbonMeter
from experiment_core_utils.meters.energy_files import (
    append_energy_window,
    append_window,
    emissions_path,
    energy_path,
    read_energy_windows,
    read_windows,
)
from experiment_core_utils.meters.nvml import NvmlGpu
from experiment_core_utils.meters.requested_energy import LOGGER
from experiment_core_utils.meters.windows import InstrumentWindow
from experiment_core_utils.primitives.csv_tables import Cell
from experiment_core_utils.primitives.errors import MeterUnavailable, ResultsError, ResultsNotSaved
from experiment_core_utils.records.energy import EnergyWindow


class CodecarbonPart:
    """codecarbon's part of a window; where it fails, `reason` says why, and nothing is raised.

    Raises:
        ConfigurationError: it does not know the country.
    """

    def __init__(self, country_iso_code: str | None, uuids: Sequence[str], library: CodecarbonLibrary | None) -> None:
        self.reason: str | None = None
        self._meter: CodecarbonMeter | None = None
        try:
            self._meter = CodecarbonMeter(country_iso_code, _nvml_indices(uuids), len(uuids), library)
        except MeterUnavailable as error:
            self.reason = str(error)
            return
        if self._meter.emissions_basis == WORLD_MEAN:
            log_world_mean()

    def open(self) -> None:
        """Begin the window."""
        try:
            if self._meter is not None:
                self._meter.open()
        except MeterUnavailable as error:
            self.reason = str(error)
            self.release()
            self._meter = None

    def close(self) -> dict[str, Cell] | None:
        """End the window: the row that `CodecarbonMeter.close` gives, None where there is none."""
        try:
            return None if self._meter is None else self._meter.close()
        except MeterUnavailable as error:
            self.reason = str(error)
            return None

    def release(self) -> None:
        """End codecarbon's threads; what was measured stays valid, whether it lets them be ended or not."""
        try:
            if self._meter is not None:
                self._meter.release()
        except MeterUnavailable as error:
            LOGGER.warning("codecarbon does not end its threads: %s", error)


@dataclass
class EnergyTracker:
    """A window that is being measured; for `stop_energy_tracking` alone."""

    experiment_id: str
    path: Path  #: of codecarbon's file
    gpus: tuple[str, ...]  #: those that are to be measured, by the driver's ids
    codecarbon: CodecarbonPart
    instruments: InstrumentWindow
    is_running: bool = True  #: False once it was stopped
    is_measured: bool = False  #: once it was stopped: whether anything was measured, not only estimated


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


def written_window(tracker: EnergyTracker, row: Mapping[str, Cell] | None, beside: EnergyWindow) -> Path:
    """The instruments' window is written whatever becomes of codecarbon's row."""
    experiment_id = tracker.experiment_id
    path = energy_path(experiment_id, tracker.path.parent)
    if row is None:
        append_energy_window(replace(beside, codecarbon_reason=tracker.codecarbon.reason), experiment_id, path)
        return path
    try:
        append_window({**row, "experiment_id": experiment_id}, tracker.path)
    except (ResultsError, ResultsNotSaved) as error:
        append_energy_window(replace(beside, codecarbon_reason=str(error)), experiment_id, path)
        raise
    append_energy_window(beside, experiment_id, path)
    return tracker.path
