"""In: what runs and what measures; out: the energy of a text run's window, of samples' requests and of one's stages.

A text run's window is in two files under the experiment's id. `emissions_{experiment_id}.csv` is codecarbon's;
`energy_{experiment_id}.json` has the same window by the machine's own counters and power readings. Neither needs the
other: what fails costs its own file alone, and the other says why.
"""

import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from accelerate import Accelerator

from experiment_core_utils.config.parts import Device, ProfiledEnergyMode
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.config.text import TextConfig
from experiment_core_utils.meters.codecarbon import (
    WORLD_MEAN,
    CodecarbonLibrary,
    CodecarbonMeter,
    LoadEstimate,
    codecarbon_library,
    measures,
)
from experiment_core_utils.meters.energy_files import (
    append_energy_window,
    append_window,
    emissions_path,
    energy_path,
    read_energy_windows,
    read_windows,
)
from experiment_core_utils.meters.energy_statistics import preferred_act
from experiment_core_utils.meters.instruments import Instruments, find_instruments, uuids_of
from experiment_core_utils.meters.load import with_descendants
from experiment_core_utils.meters.nvml import NvmlGpu, processes_by_gpu
from experiment_core_utils.meters.power import NOT_REQUESTED, allocated_to_runs
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.meters.windows import (
    WARM_AGAIN_S,
    InstrumentWindow,
    WindowGoal,
    energy_of_act,
    energy_of_whole_acts,
    why_no_power,
)
from experiment_core_utils.models.source import ModelSource
from experiment_core_utils.primitives.clock import Clock, HostClock
from experiment_core_utils.primitives.collectives import all_or_raise, local_gather
from experiment_core_utils.primitives.csv_tables import Cell
from experiment_core_utils.primitives.device import (
    choose_device,
    synchronize_used_gpus,
    visible_gpus,
)
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    EnergyRefused,
    MeterUnavailable,
    ResultsError,
    ResultsNotSaved,
)
from experiment_core_utils.primitives.texts import first_of
from experiment_core_utils.records.energy import (
    ActEnergy,
    AllocatedJoules,
    EnergyWindow,
    PowerBeside,
)

LOGGER = logging.getLogger(__name__)
# Before and after the generation of a text run, where the machine has instruments of its own.
IDLE_S = 5.0
ESTIMATED = "energy is estimated by codecarbon from the CPU's load and nominal power"
_ONLY_ESTIMATES = "codecarbon only estimates here, from load and nominal power"
T = TypeVar("T")


class _Codecarbon:
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
            _log_world_mean()

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
    codecarbon: _Codecarbon
    instruments: InstrumentWindow
    is_running: bool = True  #: False once it was stopped
    is_measured: bool = False  #: once it was stopped: whether anything was measured, not only estimated


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
    path = _validated_path(experiment_id, output_dir)
    seen = uuids_of(visible_gpus() if devices is None else devices)
    uuids = seen if gpu_uuids is None else tuple(dict.fromkeys(gpu_uuids))
    codecarbon = _Codecarbon(country_iso_code, uuids, library)
    synchronize_used_gpus()
    beside = InstrumentWindow(instruments or _instruments_of(uuids), idle_s)
    # The outer one: it waits for ticks, and codecarbon's window is not made longer by that.
    beside.open()
    codecarbon.open()
    if codecarbon.reason is not None and beside.reason is not None:
        beside.release()
        raise MeterUnavailable(f"{codecarbon.reason}; {beside.reason}")
    return EnergyTracker(experiment_id, path, uuids, codecarbon, beside)


def _validated_path(experiment_id: str, output_dir: Path) -> Path:
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
def _instruments_of(uuids: tuple[str, ...]) -> Instruments:
    """Found and calibrated once in a process."""
    return find_instruments(uuids, HostClock()).calibrated()


@cache
def _log_world_mean() -> None:
    """Warn, once in a process, that the world's mean emission factor is used."""
    LOGGER.warning(
        "no country was given: emissions are computed with the world's mean electricity mix (country_iso_code=FRA "
        "takes that of France)"
    )


@cache
def _log_estimate(reason: str) -> None:
    """Warn, once in a process, that energy is only estimated, and why nothing measures it."""
    LOGGER.warning("%s; %s", reason, ESTIMATED)


def _nvml_indices(uuids: Sequence[str]) -> list[int]:
    """The driver's indices of these GPUs; none without NVML, by which codecarbon reads GPUs, too."""
    try:
        return [NvmlGpu(uuid).index for uuid in uuids]
    except MeterUnavailable:
        return []


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
    if not tracker.is_running:
        raise ConfigurationError(
            f"the tracker of experiment {tracker.experiment_id} was stopped already; start another for a new window"
        )
    tracker.is_running = False
    synchronize_used_gpus()
    row = tracker.codecarbon.close()
    beside = replace(tracker.instruments.close(is_idle_requested=is_at_rest), gpus=tracker.gpus)
    tracker.codecarbon.release()
    tracker.is_measured = beside.has_figure or (row is not None and measures(row))
    if row is None and not beside.has_figure:
        raise MeterUnavailable(f"{tracker.codecarbon.reason}; no meter of the machine gave a reading either")
    return _written(tracker, row, beside)


def _written(tracker: EnergyTracker, row: Mapping[str, Cell] | None, beside: EnergyWindow) -> Path:
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


def _unavailable_reason(measure: Callable[[], object]) -> str | None:
    """Why it cannot measure; None where it can."""
    try:
        measure()
    except MeterUnavailable as error:
        return str(error)
    return None


def energy_gpus(source: ModelSource, library: ModuleType | Any | None = None) -> tuple[str, ...] | None:
    """The GPUs on which the servers of a model compute, and nothing else does; None for a model in this process.

    Args:
        library: the module `pynvml`, or a stand-in; None imports it.

    Raises:
        MeterUnavailable: the energy of its requests is out of reach, or it is not known whose energy that is.
    """
    if source.no_energy_reason is not None:
        raise MeterUnavailable(source.no_energy_reason)
    if source.server_pids is None:
        return None
    servers = [frozenset(with_descendants(pids)) for pids in source.server_pids]
    if not all(servers):
        raise MeterUnavailable("no process that can be seen here listens at the server's port: its GPU is not known")
    there = processes_by_gpu(library)
    used = [frozenset(uuid for uuid, pids in there.items() if pids & own) for own in servers]
    if not all(used):
        raise MeterUnavailable(
            "the driver lists no process of the server on a GPU: it has loaded no model yet, computes on the CPU, or "
            "runs in another container"
        )
    if len(set(used)) > 1:
        raise MeterUnavailable("the servers compute on different GPUs, all of which draw power; measure one in a run")
    others = frozenset[int]().union(*map(there.__getitem__, used[0])).difference(*servers, {os.getpid()})
    if others:
        raise MeterUnavailable(f"other processes compute on the server's GPUs, too ({first_of(sorted(others), 5)})")
    return tuple(sorted(used[0]))


def check_energy(source: ModelSource, device: Device, output_dir: Path, given: StageMeasurement | None) -> None:
    """Before anything is written: whether energy, which is required, can be measured at all.

    A run whose folder is there already may have nothing left to measure; `meters_of` checks it once that is known.

    Args:
        source, given: as in `meters_of`.

    Raises:
        EnergyRefused: energy is required, and there is nothing to measure that of this machine's first device, or of
            the model's servers, with.
    """
    try:
        gpus = energy_gpus(source)
    except MeterUnavailable as error:
        raise _refused(error) from error
    if not output_dir.exists():
        _require_any(given.using if given is not None else _instruments(device, 0, gpus=gpus))


def energy_plan_lines(
    mode: ProfiledEnergyMode,
    device: Device,
    local_rank: int,
    given: Instruments | None = None,
    *,
    named: str = "--energy ",
    source: ModelSource | None = None,
) -> list[str]:
    """What a plan says of energy that is requested where nothing measures it; no line otherwise.

    Args:
        given, source: as in `meters_of`.
        named: how the user requests it, before the mode.
    """
    if mode in ("auto", "off"):
        return []
    outcome = "the run would go on without"
    try:
        gpus = None if source is None else energy_gpus(source)
    except MeterUnavailable as error:
        reason: str | None = str(error)
    else:
        using = given if given is not None else _instruments(device, local_rank, gpus=gpus)
        reason = _unavailable_reason(using.require_any)
        if reason is not None and mode == "optional":
            no_estimate = _unavailable_reason(codecarbon_library)
            outcome = ESTIMATED if no_estimate is None else f"{outcome} ({no_estimate})"
    if reason is None:
        return []
    return [f"warning: {named}{mode}: {reason}; {'the run would be refused' if mode == 'required' else outcome}"]


def with_estimate(using: Instruments, library: CodecarbonLibrary | None = None) -> Instruments:
    """These instruments, and where none of them measures, codecarbon's estimate from load with a line that says so.

    Where there is no estimate either, `missing` says why.

    Args:
        library: codecarbon, or an object in its place; None imports it.
    """
    reason = _unavailable_reason(using.require_any)
    if reason is None:
        return using
    try:
        estimate = LoadEstimate(using.clock, library)
    except MeterUnavailable as error:
        return replace(using, missing={**using.missing, "codecarbon's estimate": str(error)})
    _log_estimate(reason)
    return replace(using, estimate=estimate)


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
        gpus = None if source is None else energy_gpus(source)
    except MeterUnavailable as error:
        if mode == "required":
            raise _refused(error) from error
        return None
    using = given.using if given is not None else _instruments(device, local_rank, is_spread, gpus)
    if mode == "auto":
        counters, how = using.counters_alone(), given or StageMeasurement(using, WindowGoal(), seed=seed)
        return None if counters is None else replace(how, using=counters, idle_s=0.0)
    if mode == "required":
        _require_any(using)
    if given is not None:
        return given
    using = using.calibrated() if local_rank else with_estimate(using.calibrated())
    return StageMeasurement(using, WindowGoal(), seed=seed)


def _require_any(using: Instruments) -> None:
    try:
        using.require_any()
    except MeterUnavailable as error:
        raise _refused(error) from error


def _refused(error: MeterUnavailable) -> EnergyRefused:
    return EnergyRefused(f"--energy required: {error}; use --energy optional to run without it")


def _instruments(
    device: Device, local_rank: int, is_spread: bool = False, gpus: Sequence[str] | None = None
) -> Instruments:
    if gpus is not None:
        return find_instruments(gpus, HostClock())
    own = choose_device(device, local_rank)
    return find_instruments(uuids_of(visible_gpus() if is_spread and own.type == "cuda" else [own]), HostClock())


def energy_of_pass(
    requests: Sequence[Callable[[], object]], how: StageMeasurement, is_between_ticks: bool = False
) -> tuple[tuple[ActEnergy, ...], tuple[AllocatedJoules, ...]]:
    """One window in which all requests run back to back, as often as the goal needs; an act is each of them once.

    Args:
        requests: at least one; each runs one, warm and prepared, and begins and ends synchronised.
        is_between_ticks: whether all of them may take less than a tick, and the window is to lie between two then.

    Returns:
        The energy of an act by every source and device, and the part of it that each request has.

    Raises:
        MeterUnavailable: there is nothing to measure with.
    """
    clock = how.using.clock
    spans: list[list[tuple[float, float]]] = [[] for _ in requests]

    def run_all() -> None:
        for request, own in zip(requests, spans, strict=True):
            started_s = clock.now_s()
            request()
            own.append((started_s, clock.now_s()))

    with how.using.power_beside() as traces:
        if is_between_ticks:
            windows = tuple(energy_of_act(run_all, how.using, how.goal, WARM_AGAIN_S))
        else:
            windows = tuple(energy_of_whole_acts(run_all, how.using, how.goal))
    return windows, allocated_to_runs(preferred_act(windows), traces, spans)


@dataclass(frozen=True)
class EnergySources:
    """What energy is read with; None is found on the machine."""

    library: CodecarbonLibrary | None = None
    instruments: Instruments | None = None  #: calibrated
    idle_s: float = IDLE_S
    gpus: tuple[str, ...] | None = None  #: that this process sees, by the driver's ids


class TextEnergy:
    """One process's part in measuring an experiment's energy.

    The first process of a machine tracks it, with the GPUs that any of its processes sees; each reads the power of the
    GPUs that it computes on itself.

    Raises:
        ConfigurationError: codecarbon does not know the country; in all processes.
        EnergyRefused: energy is required and nothing on this machine measures it; in all processes.
    """

    def __init__(self, config: TextConfig, accelerator: Accelerator, sources: EnergySources) -> None:
        self._config = config
        self._accelerator = accelerator
        self._sources = sources
        own = uuids_of(visible_gpus()) if sources.gpus is None else sources.gpus
        # A process may see none but its own GPU (`srun --gpus-per-task=1`).
        self._gpus = tuple(dict.fromkeys(itertools.chain(*local_gather(own, accelerator))))
        self.reason = all_or_raise(self._why_not, accelerator)

    def _why_not(self) -> str | None:
        """Why there will be no figure; sources are looked for before anything is loaded.

        codecarbon is started once to find out; where energy is required, its estimates do not count. Where it or the
        machine's instruments measure, the other one's absence costs its own figures alone.
        """
        requested = self._config.energy_mode
        if requested == "off":
            return NOT_REQUESTED
        if not self._accelerator.is_local_main_process:
            return None
        country, library = self._config.country_iso_code, self._sources.library
        instruments = self._sources.instruments or find_instruments(self._gpus, HostClock())

        unmeasured = _unavailable_reason(instruments.require_any)

        def start_codecarbon() -> None:
            meter = CodecarbonMeter(country, [], 0, library)
            meter.release()
            if meter.cpu_source == "rapl" or unmeasured is None:
                return
            if requested == "required":
                raise MeterUnavailable(_ONLY_ESTIMATES)
            _log_estimate(unmeasured)

        problems = [_unavailable_reason(start_codecarbon), unmeasured]
        if None in problems:
            return None
        reason = "; ".join(filter(None, problems))
        if requested == "required":
            raise EnergyRefused(
                f"energy cannot be measured here: {reason}; set energy: optional to estimate it or run without it, or "
                "energy: off"
            )
        return reason

    @cached_property
    def _power(self) -> Instruments | None:
        """What reads the power of the devices that this process computes on; None where energy is not requested."""
        if self._config.energy_mode == "off":
            return None
        if self._sources.instruments is not None:
            return self._sources.instruments
        own = visible_gpus() if self._config.device_map == "auto" else [self._accelerator.device]
        return find_instruments(uuids_of(own), HostClock())

    @property
    def clock(self) -> Clock:
        """The clock by which power is read: what runs beside it keeps its times by the same one."""
        return HostClock() if self._power is None else self._power.clock

    def measured(
        self, run: Callable[[], tuple[T, Sequence[tuple[float, float]]]], experiment_id: str, folder: Path
    ) -> tuple[T, PowerBeside]:
        """What `run` returns, with the window around it; all processes wait until it is open, and until it is closed.

        Idle power is measured outside, while nothing runs.

        Args:
            run: returns its result, and the windows of its parts by `clock`.
        """
        tracker = all_or_raise(lambda: self._start(experiment_id, folder), self._accelerator)
        power = self._power
        try:
            with nullcontext(()) if power is None else power.power_beside() as traces:
                result, windows = run()
        except BaseException:
            if tracker is not None:
                stop_energy_tracking(tracker, is_at_rest=False)
            raise
        all_or_raise(lambda: self._stop(tracker), self._accelerator)
        return result, PowerBeside(traces, windows, NOT_REQUESTED if power is None else why_no_power(power))

    def _start(self, experiment_id: str, folder: Path) -> EnergyTracker | None:
        if self.reason is not None or not self._accelerator.is_local_main_process:
            return None
        try:
            return start_energy_tracking(
                experiment_id,
                folder,
                self._config.country_iso_code,
                gpu_uuids=self._gpus,
                library=self._sources.library,
                instruments=self._sources.instruments,
                idle_s=self._sources.idle_s,
            )
        except MeterUnavailable as error:
            self._disable(error)
            return None

    def _stop(self, tracker: EnergyTracker | None) -> None:
        if tracker is not None:
            try:
                stop_energy_tracking(tracker)
                if self._config.energy_mode == "required" and not tracker.is_measured:
                    raise MeterUnavailable(f"no meter of the machine gave a reading, and {_ONLY_ESTIMATES}")
            except MeterUnavailable as error:
                self._disable(error)

    def _disable(self, error: MeterUnavailable) -> None:
        """Remember why there is no figure; raises the error where energy is required."""
        if self._config.energy_mode == "required":
            raise error
        self.reason = str(error)


def agreed_meters(
    config: ProfilingConfig, source: ModelSource, given: StageMeasurement | None, accelerator: Accelerator
) -> StageMeasurement | None:
    """`meters_of` this process of a profiling run; raises in all processes what it raises in one."""
    is_spread = config.model.device_map is not None or config.model.tensor_parallel is not None
    # Requests that arrive together have windows of their own.
    mode = "off" if config.model.request_rate is not None else config.measuring.energy
    at = mode, config.machine.device, accelerator.local_process_index, config.task.seed
    return all_or_raise(lambda: meters_of(*at, given, is_spread=is_spread, source=source), accelerator)
