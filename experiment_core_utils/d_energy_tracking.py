"""In: what runs and what measures; out: the meters of a run, or the energy of a window over the whole machine.

A window is in two files under the experiment's id. `emissions_{experiment_id}.csv` is codecarbon's;
`energy_{experiment_id}.json` has the same window by the machine's own counters and power readings. Neither needs the
other: what fails costs its own file alone, and the other says why.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator

from experiment_core_utils.config.parts import Device, ProfiledEnergyMode
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.meters.codecarbon import CodecarbonLibrary, CodecarbonMeter
from experiment_core_utils.meters.instruments import Instruments, find_instruments, uuids_of
from experiment_core_utils.meters.requested_energy import (
    ONLY_ESTIMATES,
    found_instruments,
    refused_energy,
    unavailable_reason,
    with_estimate,
)
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.meters.tracked_window import EnergySources, EnergyTracker
from experiment_core_utils.meters.windows import WindowGoal
from experiment_core_utils.models.source import ModelSource
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.collectives import all_or_raise
from experiment_core_utils.primitives.device import visible_gpus
from experiment_core_utils.primitives.errors import MeterUnavailable


def start_energy_tracking(
    experiment_id: str,
    output_dir: Path = Path("."),
    country_iso_code: str | None = None,
    *,
    devices: Sequence[torch.device] | None = None,
    gpu_uuids: Sequence[str] | None = None,
    library: CodecarbonLibrary | None = None,
    instruments: Instruments | None = None,
    idle_s: float = 0.0,
) -> EnergyTracker:
    """Begin a window over the whole machine: CPU, memory and the GPUs that do the work.

    Other work on the machine is counted too, and of several processes on one machine only the first may track: each
    would count the whole. Machines that share a file system need an `output_dir` each. The hardware is probed before
    the window opens (the counters' ticks once in a process, some seconds for each GPU), and work that this process gave
    to its GPUs is waited for.

    codecarbon measures the window, and beside it the GPUs' energy counters and power readings and the CPU's counters
    (RAPL), as far as they are there. One of the two is enough.

    Args:
        output_dir: where `stop_energy_tracking` writes; made where it is not there.
        country_iso_code: three letters, whose electricity mix gives the emissions; None takes the world mean and says
            so, once in a process.
        devices: the GPUs of this machine that all its processes of the run use; None takes every one that this process
            sees. Where none of them is a GPU, codecarbon counts all that it finds.
        gpu_uuids: the same by the driver's ids, in place of `devices`: NVML also reads GPUs that this process does not
            see. Where it cannot read one of them, there is no sum over the GPUs.
        library: codecarbon, or an object in its place; None imports it.
        instruments: counters and power readings, calibrated; None finds those of the machine.
        idle_s: measure idle power for so long before the window and again after it, with whatever is loaded by then
            resident; 0 does not. The devices have to be at rest.

    Raises:
        ConfigurationError: an id that is not a part of a file name, or a country that codecarbon does not know.
        MeterUnavailable: neither codecarbon nor the machine's instruments measure here, or `output_dir` cannot be made.
        ResultsError: there is a file of that name to which no window can be added.
    """
    seen = uuids_of(visible_gpus() if devices is None else devices)
    uuids = seen if gpu_uuids is None else tuple(dict.fromkeys(gpu_uuids))
    sources = EnergySources(library, instruments, idle_s)
    return EnergyTracker(experiment_id, output_dir, country_iso_code, uuids, sources)


def stop_energy_tracking(tracker: EnergyTracker, *, is_at_rest: bool = True) -> Path:
    """End the window and add it to `emissions_{experiment_id}.csv` and the file beside it; returns the first path.

    Each start and stop of one experiment is a row; `aggregate_energy_metrics` adds them up. Where codecarbon measured
    nothing the window is in `energy_{experiment_id}.json` alone, with the reason, and that path is returned.

    Args:
        is_at_rest: whether idle power can be measured now, where it was before the window.

    Raises:
        ConfigurationError: the tracker was stopped already.
        MeterUnavailable: neither codecarbon nor any instrument measured anything.
        ResultsError: the file that is there contains something else; what can be written is.
        ResultsNotSaved: the disk does not take it; what can be written is.
    """
    return tracker.stop(is_at_rest=is_at_rest)


def require_tracking(gpus: Sequence[str], country_iso_code: str | None, sources: EnergySources) -> None:
    """Refuse, before anything is loaded, a text run whose energy is required and nothing on this machine measures.

    codecarbon is started once to find out; it does where it reads counters.

    Args:
        gpus, country_iso_code: as `gpu_uuids` and `country_iso_code` in `start_energy_tracking`.

    Raises:
        ConfigurationError: codecarbon does not know the country.
        EnergyRefused: see above.
    """
    unmeasured = unavailable_reason((sources.instruments or find_instruments(gpus, HostClock())).require_any)
    codecarbon = CodecarbonMeter(country_iso_code, [], 0, sources.library)
    codecarbon.release()
    if unmeasured is not None and not codecarbon.reads_counters:
        raise refused_energy(f"{codecarbon.reason or ONLY_ESTIMATES}; {unmeasured}", "energy: ")


def meters_of(
    mode: ProfiledEnergyMode,
    device: Device,
    local_rank: int,
    seed: int,
    given: StageMeasurement | None,
    *,
    is_spread: bool = False,
    source: ModelSource | None = None,
) -> StageMeasurement | None:
    """What this process measures energy with; None where it is not requested, or optional and out of reach.

    Where nothing measures and energy is optional, the machine's first process has codecarbon's estimate. With `auto`
    counters alone are read, and calibrated by whoever has the time for it.

    Args:
        given: replaces what is found on the machine.
        is_spread: whether the model may be on all GPUs of this process, all of which are measured then.
        source: of the model, whose `energy_gpus` are measured; None for this process's GPUs.

    Raises:
        EnergyRefused: energy is required and there is nothing to measure it with; an estimate is not enough.
    """
    if mode == "off":
        return None
    try:
        given_using = None if given is None else given.using
        using = found_instruments(device, local_rank, given_using, is_spread=is_spread, source=source)
        if mode == "required":
            using.require_any()
    except MeterUnavailable as error:
        if mode == "required":
            raise refused_energy(error) from error
        return None
    if mode == "auto":
        counters, how = using.counters_alone(), given or StageMeasurement(using, WindowGoal(), seed=seed)
        return None if counters is None else replace(how, using=counters, idle_s=0.0)
    if given is not None:
        return given
    using = using.calibrated() if local_rank else with_estimate(using.calibrated())
    return StageMeasurement(using, WindowGoal(), seed=seed)


def agreed_meters(
    config: ProfilingConfig, source: ModelSource, given: StageMeasurement | None, accelerator: Accelerator
) -> StageMeasurement | None:
    """`meters_of` this process of a profiling run; raises in all processes what it raises in one."""
    is_spread = config.model.device_map is not None or config.model.tensor_parallel is not None
    # Requests that arrive together have windows of their own.
    mode = "off" if config.model.request_rate is not None else config.measuring.energy
    at = mode, config.machine.device, accelerator.local_process_index, config.task.seed
    return all_or_raise(lambda: meters_of(*at, given, is_spread=is_spread, source=source), accelerator)
