"""In: what each process measured (journals, generated texts, energy); out: the same pooled, every sample once."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from experiment_core_utils.finishing.pooling import twice_and_missing
from experiment_core_utils.models.common.text_generation import results_of_records
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.records.result_files import local_energy_type, raw_result_path, read_json_object
from experiment_core_utils.records.text import (
    BatchRecord,
    EnergyFigures,
    InferenceResults,
    PooledEnergy,
    QueryRecord,
    SavedEnergy,
)

_PROMPTS_NAMED = 10


def pool_inference_results(results: Sequence[InferenceResults]) -> InferenceResults:
    """One whole of what every process generated; rates are computed after pooling.

    Counts are sums. Processes run side by side, so `total_inference_time_s` and `simulated_delay_s` are those of the
    process that ran or waited longest: the whole is as slow as its slowest part.

    Args:
        results: of every process once, in any order; also as read from JSON.

    Raises:
        ResultsError: a process is missing or there twice, processes decoded differently, or the prompts are not each
            there exactly once.
    """
    if not results:
        raise ResultsError("no inference results were given; give those of every process")
    first = results[0]
    processes = [result["process_index"] for result in results]
    if Counter(processes) != Counter(range(first["num_processes"])):
        raise ResultsError(
            f"results of processes {processes} were given for a run of {first['num_processes']}; give those of every "
            "process exactly once"
        )
    if any(result["decoding"] != first["decoding"] for result in results):
        raise ResultsError("the processes' results differ in their decoding: they do not belong to one run")
    queries = [query for result in results for query in result["queries"]]
    found = [query["prompt_index"] for query in queries]
    twice, missing = twice_and_missing(found, range(max(found, default=-1) + 1))
    if twice or missing:
        raise ResultsError(
            f"prompts given twice {twice[:_PROMPTS_NAMED]}, missing {missing[:_PROMPTS_NAMED]}: these are not "
            "the results of one run"
        )
    batches = [batch for result in results for batch in result["batches"]]
    return results_of_records(queries, batches, first["decoding"], None, first["num_processes"])


def with_indices_of_source(pooled: InferenceResults, indices: Sequence[int]) -> InferenceResults:
    """Pooled results, in their order, with the indices that the prompts have in their source.

    Args:
        indices: the index of each prompt in its source, in the order in which the prompts were given to the run.
    """
    queries: list[QueryRecord] = [{**each, "prompt_index": indices[each["prompt_index"]]} for each in pooled["queries"]]
    batches: list[BatchRecord] = [
        {**each, "prompt_indices": [indices[place] for place in each["prompt_indices"]]} for each in pooled["batches"]
    ]
    return {**pooled, "queries": queries, "batches": batches}


def load_and_aggregate_per_process_energy_results(
    experiment_id: str, num_processes: int, *, results_dir: Path = Path("results")
) -> PooledEnergy:
    """The energy of a run, from what each of its processes saved as `local_energy_results`.

    Joules, kilowatt-hours and kilograms add up over processes; no mean of rates is taken.

    Raises:
        ConfigurationError: fewer than one process, or an id that is not a part of a file name.
        ResultsError: the file of a process is missing, torn, or lacks a published figure; names the rank.
    """
    if num_processes < 1:
        raise ConfigurationError(f"the energy of {num_processes} processes was requested; a run has at least one")
    paths = [raw_result_path(experiment_id, local_energy_type(rank), results_dir) for rank in range(num_processes)]
    missing = [str(rank) for rank, path in enumerate(paths) if not path.exists()]
    if missing:
        raise ResultsError(
            f"experiment {experiment_id} has no energy results of process {', '.join(missing)} in {paths[0].parent}; "
            f"every one of its {num_processes} processes saves local_energy_results, also one that did not track"
        )
    return pool_energy([_energy_of(rank, path) for rank, path in enumerate(paths)])


def _energy_of(rank: int, path: Path) -> EnergyFigures:
    content = read_json_object(path)
    SavedEnergy.read(content, f"the energy of process {rank} ({path})", "measure the experiment again")
    return cast(EnergyFigures, content)


def pool_energy(per_process: Sequence[Mapping[str, Any]]) -> PooledEnergy:
    """The energy of a run.

    Args:
        per_process: by rank, what `aggregate_energy_metrics` returned there.
    """
    tracking = [each for each in per_process if each["duration_seconds"] is not None]
    durations = [each["duration_seconds"] for each in tracking]
    total = _sum_of_all("total_energy_kwh", tracking)
    # The total of a machine that uses no GPU is whole without.
    with_gpus = [each for each in tracking if each["gpu_energy_kwh"] is not None or each["total_energy_kwh"] is None]
    return PooledEnergy(
        total_energy_kwh=total,
        avg_energy_per_process_kwh=None if total is None else total / len(per_process),
        per_process_breakdown=[{"process": rank, **each} for rank, each in enumerate(per_process)],
        cpu_energy_kwh=_sum_of_all("cpu_energy_kwh", tracking),
        gpu_energy_kwh=_sum_of_all("gpu_energy_kwh", with_gpus),
        ram_energy_kwh=_sum_of_all("ram_energy_kwh", tracking),
        total_emissions_kg_co2=_sum_of_all("total_emissions_kg_co2", tracking),
        duration_seconds=max(durations, default=None),
        total_duration_seconds=_sum_of_all("duration_seconds", tracking),
        gpu_counter_j=_sum_of_all("gpu_counter_j", with_gpus),
        gpu_power_integral_j=_sum_of_all("gpu_power_integral_j", with_gpus),
        num_processes=len(per_process),
        num_tracking_processes=len(tracking),
        reason=_reason_of_all(per_process),
    )


def _sum_of_all(figure: str, machines: Sequence[Mapping[str, Any]]) -> float | None:
    """The sum over all processes; None where one lacks it: the sum of the others would pass for that of all."""
    values = [each[figure] for each in machines]
    known = [value for value in values if value is not None]
    return math.fsum(known) if known and len(known) == len(values) else None


def _reason_of_all(per_process: Sequence[Mapping[str, Any]]) -> str | None:
    """Why something is missing, each process by its rank; one that a tracking process counts lacks nothing."""
    tracking = [(rank, each) for rank, each in enumerate(per_process) if each["duration_seconds"] is not None]
    concerned = tracking or list(enumerate(per_process))
    found = []
    for rank, each in concerned:
        # codecarbon's, then the instruments', which are the same where nothing was tracked.
        reasons = dict.fromkeys(filter(None, (each.get("reason"), each.get("instruments_reason"))))
        found += [f"process {rank}: {'; '.join(reasons)}"] if reasons else []
    return "; ".join(found) or None
