"""In: a setting in force and what measures energy; out: the energy of its samples' runs and of a request's stages."""

from collections.abc import Callable, Mapping
from typing import Any

from experiment_core_utils.apportioned_energy import energy_of_part, why_no_power
from experiment_core_utils.meters.instruments import Instruments, find_instruments, uuids_of
from experiment_core_utils.meters.windows import WindowGoal
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.config import ProfilingConfig
from experiment_core_utils.primitives.device import choose_device, out_of_memory_named
from experiment_core_utils.primitives.energy_records import RunsEnergy, SettingEnergy
from experiment_core_utils.primitives.errors import MeterUnavailable, SettingError
from experiment_core_utils.primitives.records import StagedRun
from experiment_core_utils.stage_energy import StageMeasurement, stage_energies


def check_energy(config: ProfilingConfig, given: StageMeasurement | None) -> None:
    """Before anything is written: whether a wish for required energy can be met at all.

    A run whose folder is there already may have nothing left to measure; `means_of` judges it once that is known.

    Args:
        given: as in `means_of`.

    Raises:
        MeterUnavailable: energy is required, and there is nothing to measure that of this machine's first device with.
    """
    if config.energy == "required" and not config.output_dir.exists():
        _require_any(given.using if given is not None else _instruments(config, 0))


def means_of(config: ProfilingConfig, local_rank: int, given: StageMeasurement | None) -> StageMeasurement | None:
    """What this process measures energy with; None where it is not asked for.

    Counters and power readings count as sources, estimates from load do not: a stage has no load of its own.

    Args:
        given: stands in for what is found on the machine.

    Raises:
        MeterUnavailable: energy is required and there is nothing to measure it with.
    """
    if config.energy == "off":
        return None
    using = given.using if given is not None else _instruments(config, local_rank)
    if config.energy == "required":
        _require_any(using)
    return given if given is not None else StageMeasurement(using.calibrated(), WindowGoal(), seed=config.seed)


def _require_any(using: Instruments) -> None:
    try:
        using.require_any()
    except MeterUnavailable as error:
        raise MeterUnavailable(f"--energy required: {error}; --energy optional goes on without it") from error


def _instruments(config: ProfilingConfig, local_rank: int) -> Instruments:
    return find_instruments(uuids_of([choose_device(config.device, local_rank)]), HostClock())


def runs_beside_power(
    run_once: Callable[[], StagedRun], num_runs: int, power: Instruments | None
) -> tuple[tuple[StagedRun, ...], RunsEnergy | None]:
    """That many runs one after the other, and the energy of each, apportioned from power readings taken beside them.

    Args:
        run_once: begins and ends synchronised.
        power: None where energy is not asked for: then nothing is read.
    """
    if power is None:
        return tuple(run_once() for _ in range(num_runs)), None
    sampler = power.power_sampler()
    runs, windows = [], []
    if power.probes:
        sampler.start()
    try:
        for _ in range(num_runs):
            begun_s = power.clock.now_s()
            runs.append(run_once())
            windows.append((begun_s, power.clock.now_s()))
    finally:
        traces = sampler.stop() if power.probes else ()
    parts = [energy_of_part(traces, *window, why_no_power(power)) for window in windows]
    first = next((part for part in parts if part["energy_j"] is not None), parts[0])
    reasons = dict.fromkeys(part["energy_reason"] for part in parts if part["energy_reason"] is not None)
    return tuple(runs), RunsEnergy(
        joules=tuple(part["energy_j"] for part in parts),
        bounds_j=tuple(part["energy_bound_j"] for part in parts),
        source=first["energy_source"],
        basis=first["energy_basis"],
        reason="; ".join(reasons) or None,
    )


def energy_of_setting(
    model: StagedModel,
    request: tuple[int, Mapping[str, Any]] | None,
    max_new_tokens: int,
    how: StageMeasurement,
    experiment_id: str,
    rank: int,
) -> SettingEnergy:
    """The stages of one request under the setting in force; why not, where they cannot be measured.

    Args:
        request: sample id and inputs on the model's device; None where no sample can be read.

    Raises:
        Stopped: someone asked for it.
    """
    missing = dict(how.using.missing)
    if request is None:
        return SettingEnergy(experiment_id, rank, None, None, missing, "no sample can be read")
    sample_id, inputs = request
    try:
        with out_of_memory_named():
            stages = stage_energies(model, inputs, max_new_tokens, model.rewind, how)
    except (MeterUnavailable, SettingError) as error:
        return SettingEnergy(experiment_id, rank, sample_id, None, missing, str(error))
    return SettingEnergy(experiment_id, rank, sample_id, stages, missing, None)
