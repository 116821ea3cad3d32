"""What energy is measured with where it was requested, or why it cannot be."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from experiment_core_utils.config.parts import Device, ProfiledEnergyMode
from experiment_core_utils.meters.codecarbon import CodecarbonLibrary, LoadEstimate, codecarbon_library
from experiment_core_utils.meters.instruments import Instruments, find_instruments, uuids_of
from experiment_core_utils.meters.load import with_descendants
from experiment_core_utils.meters.nvml import processes_by_gpu
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.models.source import ModelSource
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.device import choose_device, visible_gpus
from experiment_core_utils.primitives.errors import EnergyRefused, MeterUnavailable
from experiment_core_utils.primitives.texts import first_of

LOGGER = logging.getLogger(__name__)
ESTIMATED = "energy is estimated by codecarbon from the CPU's load and nominal power"
ONLY_ESTIMATES = "codecarbon only estimates here, from load and nominal power"


@cache
def log_estimate(reason: str) -> None:
    """Warn, once in a process, that energy is only estimated, and why nothing measures it."""
    LOGGER.warning("%s; %s", reason, ESTIMATED)


def unavailable_reason(measure: Callable[[], object]) -> str | None:
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
        using = found_instruments(device, 0, None if given is None else given.using, source=source)
        if not output_dir.exists():
            using.require_any()
    except MeterUnavailable as error:
        raise refused_energy(error) from error


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
        using = found_instruments(device, local_rank, given, source=source)
    except MeterUnavailable as error:
        reason: str | None = str(error)
    else:
        reason = unavailable_reason(using.require_any)
        if reason is not None and mode == "optional":
            no_estimate = unavailable_reason(codecarbon_library)
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
    reason = unavailable_reason(using.require_any)
    if reason is None:
        return using
    try:
        estimate = LoadEstimate(using.clock, library)
    except MeterUnavailable as error:
        return replace(using, missing={**using.missing, "codecarbon's estimate": str(error)})
    log_estimate(reason)
    return replace(using, estimate=estimate)


def refused_energy(reason: object, named: str = "--energy ") -> EnergyRefused:
    """The error of energy that is required where nothing measures it.

    Args:
        named: how the user requests it, before the mode.
    """
    return EnergyRefused(f"{named}required: {reason}; use {named}optional to run without it")


def found_instruments(
    device: Device,
    local_rank: int,
    preset: Instruments | None = None,
    *,
    is_spread: bool = False,
    source: ModelSource | None = None,
) -> Instruments:
    """What reads the energy of the devices that this process, or the server of its model, computes on.

    Args:
        preset: what is returned in place of what is found.
        is_spread, source: as in `meters_of`.

    Raises:
        MeterUnavailable: see `energy_gpus`.
    """
    gpus = None if source is None else energy_gpus(source)
    if preset is not None:
        return preset
    if gpus is None:
        first = choose_device(device, local_rank)
        gpus = uuids_of(visible_gpus() if is_spread and first.type == "cuda" else [first])
    return find_instruments(gpus, HostClock())
