"""In: measured windows of energy and power, of settings, samples or a text run; out: joules, each with its source."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from experiment_core_utils.meters.codecarbon import sum_windows
from experiment_core_utils.meters.correct_answers import AnsweredRequest, with_correct_answers
from experiment_core_utils.meters.energy_files import emissions_path, energy_path, read_energy_windows, read_windows
from experiment_core_utils.meters.energy_statistics import instrument_energy, sum_of_known
from experiment_core_utils.meters.power import allocated_to_query, energy_of_part
from experiment_core_utils.meters.setting_energy import energy_of
from experiment_core_utils.primitives.statistics import rate, spread_of
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.energy import Energy, PowerBeside
from experiment_core_utils.records.setting_result import AccuracyPart
from experiment_core_utils.records.settings import MeasuredSetting
from experiment_core_utils.records.text import (
    AllocatedEnergy,
    BatchRecord,
    EnergyMetrics,
    InferenceResults,
    InstrumentEnergy,
    PartEnergy,
    ProcessPlace,
    QueryRecord,
    all_absent,
)


def aggregate_energy_metrics(
    experiment_id: str, accelerator: ProcessPlace, output_dir: Path = Path("."), untracked_reason: str | None = None
) -> EnergyMetrics:
    """The energy of this process's machine: all windows of `emissions_{experiment_id}.csv` in `output_dir` summed.

    The published figures are codecarbon's, None where it measured not every window. Beside them are those of the
    machine's own counters and power readings, from `energy_{experiment_id}.json`.

    The first process of a machine speaks for it; the others, and one that did not track, get None throughout with the
    reason, so that sums over processes count a machine once. CPU figures are of the whole machine, whoever used it.
    Not counted: disks, network, fans, cooling, losses of the power supply.

    Args:
        untracked_reason: why energy was not tracked, where that is known; then no file is read.

    Raises:
        ConfigurationError: an id that is not a part of a file name.
        ResultsError: the file is torn or not codecarbon's, or the one beside it is not what its name says.
    """
    if untracked_reason is not None:
        return not_tracked(f"energy was not tracked: {untracked_reason}")
    path = emissions_path(experiment_id, output_dir)
    if accelerator.local_process_index != 0:
        return not_tracked(
            f"process {accelerator.process_index} shares its machine: the first process there tracks for all"
        )
    beside = energy_path(experiment_id, output_dir)
    if not path.exists() and not beside.exists():
        return not_tracked(f"energy was not tracked: there is no {path}")
    windows = read_energy_windows(beside) if beside.exists() else ()
    instruments = instrument_energy(windows, None if beside.exists() else f"there is no {beside}")
    failed = [window.codecarbon_reason for window in windows if window.codecarbon_reason is not None]
    if not path.exists() and not failed:
        failed = [f"there is no {path}"]
    if failed:
        # Rows of some windows would pass for those of all.
        reason = f"codecarbon lacks {len(failed)} of {counted(len(windows), 'window')}: {failed[0]}"
        seconds = sum_of_known([None if each.reading is None else each.reading.seconds for each in windows])
        return _without_codecarbon(reason, instruments, seconds, len(windows))
    return sum_windows(read_windows(path), instruments)


def not_tracked(reason: str) -> EnergyMetrics:
    """Energy of which there is no figure at all."""
    return _without_codecarbon(reason, instrument_energy((), reason), None, 0)


def _without_codecarbon(
    reason: str, beside: InstrumentEnergy, duration_seconds: float | None, num_periods: int
) -> EnergyMetrics:
    known = {**beside, "duration_seconds": duration_seconds, "sources": {}, "num_periods": num_periods}
    return all_absent(EnergyMetrics, **known, reason=reason)


def allocated_energy_metrics(results: InferenceResults) -> AllocatedEnergy:
    """The energy of all batches of a text run, or of none: the sum of some would pass for that of all."""
    joules = [energy for batch in results["batches"] if (energy := batch.get("energy_j")) is not None]
    reasons = [reason for batch in results["batches"] if (reason := batch.get("energy_reason")) is not None]
    if not joules or len(joules) < len(results["batches"]):
        return all_absent(AllocatedEnergy, energy_reason="; ".join(dict.fromkeys(reasons)) or None)
    of_queries = [query["energy_j"] for query in results["queries"] if query["energy_j"] is not None]
    return AllocatedEnergy(
        energy_per_batch_j=spread_of(joules),
        energy_per_query_j=spread_of(of_queries),
        energy_per_output_token_j=rate(sum(joules), results["total_output_tokens"]),
        energy_method="apportioned",
        energy_reason=None,
    )


def allocated_energy(pooled: InferenceResults) -> dict[str, Any]:
    """The energy of every batch and query of a text run, from power readings taken beside it."""
    of_batch = (
        "process_index",
        "batch_index",
        "prompt_indices",
        "inference_time_s",
        *PartEnergy.__annotations__,
    )
    of_query = ("prompt_index", "process_index", "batch_index", "input_tokens", "output_tokens", "energy_j")
    return {
        "batches": [{name: value for name, value in batch.items() if name in of_batch} for batch in pooled["batches"]],
        "queries": [{name: value for name, value in query.items() if name in of_query} for query in pooled["queries"]],
    }


def with_batch_energy(results: InferenceResults, power: PowerBeside) -> InferenceResults:
    """What one process generated, with the energy of each batch, and of each query its part of its batch's.

    Args:
        power: with the window of each batch, in their order.
    """
    batches = [
        cast(BatchRecord, {**batch, **energy_of_part(power.traces, *window, power.reason)})
        for batch, window in zip(results["batches"], power.windows, strict=True)
    ]
    return {**results, "batches": batches, "queries": [_with_energy(each, batches) for each in results["queries"]]}


def _with_energy(query: QueryRecord, batches: Sequence[BatchRecord]) -> QueryRecord:
    batch = batches[query["batch_index"]]
    tokens, of_batch = (each["input_tokens"] + each["output_tokens"] for each in (query, batch))
    return {**query, "energy_j": allocated_to_query(batch["energy_j"], tokens, of_batch)}


def setting_energy(
    merged: MeasuredSetting, accuracy: AccuracyPart, answered: Sequence[AnsweredRequest]
) -> Energy | None:
    """The energy of a setting and of its correct answers, over all processes; None where it was not requested."""
    return with_correct_answers(energy_of(merged.energy, merged.energy_passes, merged.energy_end), accuracy, answered)
