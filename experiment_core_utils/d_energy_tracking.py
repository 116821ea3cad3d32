"""In: an experiment's id; out: what its machine used between start and stop, in two files under that id.

`emissions_{experiment_id}.csv` is codecarbon's; `energy_{experiment_id}.json` has the same window by the machine's own
counters and power readings.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from experiment_core_utils.meters.codecarbon_meter import WORLD_MEAN, CodecarbonLibrary, CodecarbonMeter
from experiment_core_utils.meters.emissions_file import append_window, emissions_path, read_windows
from experiment_core_utils.meters.energy_file import append_energy_window, energy_path, read_energy_windows
from experiment_core_utils.meters.instrument_window import InstrumentWindow
from experiment_core_utils.meters.instruments import Instruments, find_instruments
from experiment_core_utils.meters.nvml import NvmlGpu
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.device import gpu_uuid, synchronize_used_gpus, visible_gpus
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable

LOGGER = logging.getLogger(__name__)


@dataclass
class EnergyTracker:
    """A window that is being measured; for `stop_energy_tracking` alone.

    Attributes:
        is_running: False once it was stopped.
    """

    experiment_id: str
    path: Path
    meter: CodecarbonMeter
    beside: InstrumentWindow
    is_running: bool = True


def start_energy_tracking(
    experiment_id: str,
    output_dir: Path = Path("."),
    country_iso_code: str | None = None,
    *,
    devices: Sequence[torch.device] | None = None,
    library: CodecarbonLibrary | None = None,
    instruments: Instruments | None = None,
    idle_s: float = 0.0,
) -> EnergyTracker:
    """Begin a window over the whole machine: CPU, memory and the GPUs that do the work.

    Other work on the machine is counted too, and of several processes on one machine only the first may track: each
    would count the whole. Machines that share a file system need an `output_dir` each. The hardware is probed before
    the window opens (the counters' ticks once in a process, some seconds for each GPU), and work that this process gave
    to its GPUs is waited for.

    Beside codecarbon the GPUs' energy counters and power readings, and the CPU's counters (RAPL), measure the same
    window, as far as they are there; what is not there is no error.

    Args:
        output_dir: where `stop_energy_tracking` writes; made where it is not there.
        country_iso_code: three letters, whose electricity mix gives the emissions; None takes the world mean and says
            so, once in a process.
        devices: the GPUs of this machine that all its processes of the run use; None takes every one that this process
            sees. Where none of them is a GPU, codecarbon counts all that it finds.
        library: codecarbon, or what stands in for it; None imports it.
        instruments: counters and power readings, calibrated; None finds those of the machine.
        idle_s: measure idle power for so long before the window and again after it, with whatever is loaded by then
            resident; 0 does not. The devices have to be at rest.

    Raises:
        ConfigurationError: an id that is no part of a file name, or a country that codecarbon does not know.
        MeterUnavailable: codecarbon is not installed or does not start, or `output_dir` cannot be made.
        ResultsError: there is a file of that name to which no window can be added.
    """
    path = emissions_path(experiment_id, output_dir)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MeterUnavailable(f"{output_dir} cannot hold an emissions file ({error.strerror})") from error
    if path.exists():
        read_windows(path)
    if energy_path(experiment_id, output_dir).exists():
        read_energy_windows(energy_path(experiment_id, output_dir))
    found = visible_gpus() if devices is None else devices
    uuids = [uuid for device in found if (uuid := gpu_uuid(device)) is not None]
    meter = CodecarbonMeter(country_iso_code, _nvml_indices(uuids), len(uuids), library)
    if meter.emissions_basis == WORLD_MEAN:
        _say_world_mean()
    synchronize_used_gpus()
    beside = InstrumentWindow(instruments or _instruments_of(tuple(uuids)), idle_s)
    # The outer one: it waits for ticks, and codecarbon's window is not made longer by that.
    beside.open()
    try:
        meter.open()
    except MeterUnavailable:
        beside.release()
        raise
    return EnergyTracker(experiment_id, path, meter, beside)


@cache
def _instruments_of(uuids: tuple[str, ...]) -> Instruments:
    """Found and calibrated once in a process."""
    return find_instruments(uuids, HostClock()).calibrated()


@cache
def _say_world_mean() -> None:
    """Once in a process."""
    LOGGER.warning(
        "no country was given: emissions are computed with the world's mean electricity mix (country_iso_code=FRA "
        "takes that of France)"
    )


def _nvml_indices(uuids: Sequence[str]) -> list[int]:
    """None without NVML, by which codecarbon reads GPUs, too."""
    try:
        return [NvmlGpu(uuid).index for uuid in uuids]
    except MeterUnavailable:
        return []


def stop_energy_tracking(tracker: EnergyTracker, *, is_at_rest: bool = True) -> Path:
    """End the window and add it to `emissions_{experiment_id}.csv` and the file beside it; returns the first path.

    Each start and stop of one experiment is a row; `aggregate_energy_metrics` adds them up.

    Args:
        is_at_rest: whether idle power can be measured now, where it was before the window.

    Raises:
        ConfigurationError: the tracker was stopped already.
        MeterUnavailable: codecarbon measured nothing.
        ResultsError: the file that is there holds something else.
        ResultsNotSaved: the disk does not take it.
    """
    if not tracker.is_running:
        raise ConfigurationError(
            f"the tracker of experiment {tracker.experiment_id} was stopped already; start another for a new window"
        )
    tracker.is_running = False
    synchronize_used_gpus()
    try:
        window = tracker.meter.close()
    except MeterUnavailable:
        tracker.beside.release()
        raise
    beside = tracker.beside.close(is_idle_wanted=is_at_rest)
    tracker.meter.release()
    append_window({**window, "experiment_id": tracker.experiment_id}, tracker.path)
    append_energy_window(beside, tracker.experiment_id, energy_path(tracker.experiment_id, tracker.path.parent))
    return tracker.path
