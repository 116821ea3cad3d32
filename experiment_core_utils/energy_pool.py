"""In: each process's energy figures; out: those of the run, what was measured summed, what is missing named."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiment_core_utils.primitives.records import PooledEnergy


def pool_energy(per_process: Sequence[Mapping[str, Any]]) -> PooledEnergy:
    """The energy of a run.

    Args:
        per_process: by rank, what `aggregate_energy_metrics` returned there.
    """
    tracking = [each for each in per_process if each["duration_seconds"] is not None]
    durations = [each["duration_seconds"] for each in tracking]
    total = _sum("total_energy_kwh", tracking)
    with_gpus = [each for each in tracking if not _has_no_gpu(each)]
    return PooledEnergy(
        total_energy_kwh=total,
        avg_energy_per_process_kwh=None if total is None else total / len(per_process),
        per_process_breakdown=[{"process": rank, **each} for rank, each in enumerate(per_process)],
        cpu_energy_kwh=_sum("cpu_energy_kwh", tracking),
        gpu_energy_kwh=_sum("gpu_energy_kwh", with_gpus),
        ram_energy_kwh=_sum("ram_energy_kwh", tracking),
        total_emissions_kg_co2=_sum("total_emissions_kg_co2", tracking),
        duration_seconds=max(durations, default=None),
        total_duration_seconds=_sum("duration_seconds", tracking),
        gpu_counter_j=_sum("gpu_counter_j", with_gpus),
        gpu_power_integral_j=_sum("gpu_power_integral_j", with_gpus),
        num_processes=len(per_process),
        num_tracking_processes=len(tracking),
        reason=_reason(per_process),
    )


def _sum(figure: str, machines: Sequence[Mapping[str, Any]]) -> float | None:
    """None where one of them lacks it: the sum of the others would pass for that of all."""
    # Files from before the joules were there have none.
    values = [each.get(figure) for each in machines]
    known = [value for value in values if value is not None]
    return math.fsum(known) if known and len(known) == len(values) else None


def _has_no_gpu(machine: Mapping[str, Any]) -> bool:
    """Whether it uses none: its total is whole without."""
    return machine["gpu_energy_kwh"] is None and machine["total_energy_kwh"] is not None


def _reason(per_process: Sequence[Mapping[str, Any]]) -> str | None:
    """Why something is missing, each process by its rank; one that a tracking process counts lacks nothing."""
    tracking = [(rank, each) for rank, each in enumerate(per_process) if each["duration_seconds"] is not None]
    concerned = tracking or list(enumerate(per_process))
    told = [(rank, _reasons_of(each)) for rank, each in concerned]
    return "; ".join(f"process {rank}: {why}" for rank, why in told if why) or None


def _reasons_of(each: Mapping[str, Any]) -> str:
    """codecarbon's, then the instruments', which are the same where nothing was tracked."""
    reasons = (each.get("reason"), each.get("instruments_reason"))
    return "; ".join(dict.fromkeys(reason for reason in reasons if reason))
