"""In: measured windows of energy and power, of settings, samples or a text run; out: joules, each with its source."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from experiment_core_utils.meters.codecarbon import READ_NOTHING, WORLD_MEAN, gpu_missing_reason, number_in
from experiment_core_utils.meters.energy_files import emissions_path, energy_path, read_energy_windows, read_windows
from experiment_core_utils.meters.energy_statistics import (
    act_figures,
    expanded_interval,
    instrument_energy,
    source_group,
    sum_of_known,
)
from experiment_core_utils.meters.power import allocated_to_query, energy_of_part
from experiment_core_utils.primitives.csv_tables import Cell
from experiment_core_utils.primitives.statistics import (
    correlation_of_means,
    describe,
    half_of_interval,
    mean_of,
    positive_interval,
    rate,
    ratio_interval,
    spread_of,
)
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.energy import (
    ALL_DEVICES,
    END_TO_END,
    PREFERRED_SOURCES,
    ActEnergy,
    Closure,
    Energy,
    EnergyClosure,
    EnergyFigure,
    EnergyIdle,
    EnergyOfSource,
    EnergyOrigin,
    EnergyPass,
    EnergyPassesEnd,
    EnergySummary,
    IdlePower,
    PassesEnergy,
    PowerBeside,
    SettingEnergy,
    StageEnergies,
    StageFigure,
)
from experiment_core_utils.records.setting_result import AccuracyPart
from experiment_core_utils.records.text import (
    AllocatedEnergy,
    BatchRecord,
    EnergyFigures,
    EnergyMetrics,
    EnergySource,
    InferenceResults,
    InstrumentEnergy,
    PartEnergy,
    ProcessPlace,
    QueryRecord,
    all_absent,
)

# Published figures, by codecarbon's columns.
_COLUMNS = {
    "total_energy_kwh": "energy_consumed",
    "cpu_energy_kwh": "cpu_energy",
    "gpu_energy_kwh": "gpu_energy",
    "ram_energy_kwh": "ram_energy",
    "total_emissions_kg_co2": "emissions",
    "duration_seconds": "duration",
}
ESTIMATE: EnergySource = {"source": "codecarbon_estimate", "kind": "estimated"}


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


def sum_windows(windows: Sequence[Mapping[str, Cell]], beside: InstrumentEnergy) -> EnergyMetrics:
    """The figures of windows that `read_windows` gave, at least one, and those beside them.

    A part that codecarbon gives as 0 was not read: None. Where GPUs are in use that it does not count, the total and
    the emissions are None, too.
    """
    sums = {name: math.fsum(number_in(window, column) for window in windows) for name, column in _COLUMNS.items()}
    figures = {name: figure or None for name, figure in sums.items()}
    reasons = {name: READ_NOTHING for name, figure in figures.items() if figure is None}
    found = [gpu_missing_reason(window) for window in windows]
    reason = next((each for each, _ in found if each is not None), None)
    if reason is not None:
        reasons["gpu_energy_kwh"] = reason
    if not all(is_complete for _, is_complete in found):
        reasons |= dict.fromkeys(("total_energy_kwh", "total_emissions_kg_co2"), "GPUs in use are not in it")
    known = {name: None if name in reasons else figure for name, figure in figures.items()}
    last = windows[-1]
    return EnergyMetrics(
        **cast(EnergyFigures, known),
        **beside,
        sources=_sources(windows, known),
        num_periods=len(windows),
        tracking_mode=_text(last["tracking_mode"]),
        cpu_model=_text(last["cpu_model"]),
        gpu_model=_text(last["gpu_model"]),
        emissions_basis=_basis(windows),
        reason="; ".join(f"{name}: {why}" for name, why in reasons.items()) or None,
    )


def _sources(windows: Sequence[Mapping[str, Cell]], known: Mapping[str, float | None]) -> dict[str, EnergySource]:
    sources: dict[str, EnergySource] = {
        "cpu_energy_kwh": _cpu_source({window.get("cpu_energy_source") for window in windows}),
        "gpu_energy_kwh": {"source": "nvml_counter", "kind": "measured"},
        "ram_energy_kwh": ESTIMATE,
    }
    parts = {name: source for name, source in sources.items() if known[name] is not None}
    names = [source["source"] for source in parts.values()]
    known_values = [name for name in dict.fromkeys(names) if name is not None]
    total = EnergySource(source=" + ".join(known_values) if None not in names else None, kind="estimated")
    sums = {name: total for name in ("total_energy_kwh", "total_emissions_kg_co2") if known[name] is not None}
    return parts | sums


def _cpu_source(names: set[Cell]) -> EnergySource:
    """Source of the CPU energy of all windows; a file that codecarbon wrote itself does not say."""
    if names == {"rapl"}:
        return {"source": "rapl", "kind": "measured"}
    return ESTIMATE if None not in names else {"source": None, "kind": None}


def _basis(windows: Sequence[Mapping[str, Cell]]) -> str | None:
    """As the file says; from the country where codecarbon wrote it itself."""
    known_values = []
    for window in windows:
        code = window["country_iso_code"]
        of_country = WORLD_MEAN if code is None else f"electricity mix of {code}"
        known_values.append(str(window.get("emissions_basis") or of_country))
    return ", ".join(dict.fromkeys(known_values))


def _text(cell: Cell) -> str | None:
    return None if cell in (None, "") else str(cell)


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


_ABSENT = (None, None, None)


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


def energy_of(
    energy: SettingEnergy | None, passes: Sequence[EnergyPass] = (), end: EnergyPassesEnd | None = None
) -> Energy | None:
    """A setting's energy as its result has it; None where it was not requested.

    Args:
        energy: of the stages of one request; None where they were not measured.
        passes, end: over many samples.
    """
    measured_by = next((each for each in (energy, *passes, end) if each is not None), None)
    if measured_by is None:
        return None
    stages = energy.stages if energy else None
    reasons = dict.fromkeys(each.reason for each in (energy, end) if each is not None and each.reason is not None)
    return Energy.of(
        experiment_id=measured_by.experiment_id,
        rank=measured_by.rank,
        passes=passes_energy(passes, end) if passes else None,
        sample_id=energy.sample_id if energy else None,
        flops_over_mean=energy.flops_over_mean if energy else None,
        output_tokens=stages.output_tokens if stages else None,
        summary=summary_of(stages) if stages else None,
        stages={
            name: [_figure(figure) for figure in figures]
            for name, figures in (stages.figures.items() if stages else ())
        },
        closures=[_closure(each) for each in stages.closures] if stages else [],
        error_goal=stages.error_goal if stages else None,
        source_ratios=dict(stages.source_ratios) if stages else {},
        idle=[_idle(before, after) for before, after in stages.idle] if stages else [],
        missing={name: why for each in (energy, end) if each is not None for name, why in each.missing.items()},
        reason="; ".join(reasons) or None,
    )


def passes_energy(passes: Sequence[EnergyPass], end: EnergyPassesEnd | None) -> PassesEnergy:
    """What the energy passes of a setting, at least one, come to by the best source that measured them.

    Of passes that an earlier run measured by other sources, those by the sources of the last one count.
    """
    origins = [each.origin for each in passes[-1].windows]
    alike = [each for each in passes if [window.origin for window in each.windows] == origins]
    readings = [each.idle for each in alike] + ([] if end is None else [end.idle])
    idle = list(zip(*(each for each in readings if [one.origin for one in each] == origins), strict=True))
    figures, ratio = act_figures([_per_request(each) for each in alike], idle)
    tokens = mean_of([each.output_tokens / len(each.sample_ids) for each in alike])
    known: dict[str, Any] = {
        "sample_ids": list(alike[0].sample_ids),
        "output_tokens_per_request": tokens,
        "figures": [_figure(each) for each in figures],
    }
    if end is not None:
        known |= {name: getattr(end, name) for name in ("num_settings", "ended_by", "error_goal", "limit_s")}
    whole = _chosen(figures)
    if whole is None or whole.gross_j is None:
        return PassesEnergy.of(**known)
    gross = whole.gross_j
    return PassesEnergy.of(
        **asdict(whole.origin),
        **known,
        num_passes=whole.num_windows,
        num_requests=round(whole.count or 0),
        window_s=whole.window_s,
        request_s=whole.act_s,
        j_per_request=gross.mean,
        j_per_request_by_pass=_by_pass(alike, whole.origin),
        j_per_request_ci95_low=gross.ci_low,
        j_per_request_ci95_high=gross.ci_high,
        j_per_request_uncertainty=whole.uncertainty_j,
        idle_w=whole.idle_w,
        idle_j_per_request=whole.idle_j,
        net_j_per_request=whole.net_j,
        net_j_per_request_uncertainty=whole.net_uncertainty_j,
        j_per_output_token=rate(gross.mean, tokens or 0.0),
        source_ratio=ratio if whole.origin.component == "gpu" else None,
    )


def _by_pass(passes: Sequence[EnergyPass], origin: EnergyOrigin) -> list[float]:
    """Gross energy of a request by one source in each pass, in order: over the processes that measured the pass, each
    with its own samples; passes that not all of them have are left out.
    """
    group, ranks = source_group(origin), {each.rank for each in passes}
    found: dict[int, dict[int, tuple[float, int]]] = {}
    for each in passes:
        windows = [one for one in each.windows if source_group(one.origin) == group]
        joules = sum_of_known([one.joules for one in windows])
        if joules is not None:
            found.setdefault(each.pass_index, {})[each.rank] = joules, len(each.sample_ids)
    whole = [of_ranks.values() for _, of_ranks in sorted(found.items()) if of_ranks.keys() == ranks]
    return [sum(joules for joules, _ in own) / sum(count for _, count in own) for own in whole]


def _per_request(one: EnergyPass) -> list[ActEnergy]:
    """The windows of a pass, with one request as the act."""
    number = len(one.sample_ids)

    def part(value: float | None) -> float | None:
        return None if value is None else value / number

    return [
        replace(
            each,
            joules=part(each.joules),
            bound_j=part(each.bound_j),
            act_s=part(each.act_s),
            count=None if each.count is None else each.count * number,
        )
        for each in one.windows
    ]


def _figure(figure: EnergyFigure) -> StageFigure:
    gross, values = figure.gross_j, asdict(figure)
    mean = {
        "gross_j": gross.mean if gross else None,
        "gross_j_ci95_low": gross.ci_low if gross else None,
        "gross_j_ci95_high": gross.ci_high if gross else None,
    }
    return StageFigure.of(**values.pop("origin"), num_acts=values.pop("count"), **(values | mean))


def _closure(closure: Closure) -> EnergyClosure:
    values = asdict(closure)
    return EnergyClosure.of(**values.pop("origin"), **values)


def _idle(before: IdlePower, after: IdlePower) -> EnergyIdle:
    reasons = dict.fromkeys(each.reason for each in (before, after) if each.reason is not None)
    return EnergyIdle.of(
        **asdict(before.origin),
        before_w=before.watts,
        after_w=after.watts,
        seconds=before.seconds,
        reason="; ".join(reasons) or None,
    )


def summary_of(stages: StageEnergies) -> EnergySummary | None:
    """The figures of the best source that measured the whole request, over its devices; None where none did."""
    whole = _chosen(stages.figures[END_TO_END])
    if whole is None or whole.gross_j is None:
        return None
    own = [(name, each) for name, figures in stages.figures.items() for each in figures if each.origin == whole.origin]
    joules = {name: each.gross_j.mean for name, each in own if each.gross_j is not None}
    closure = next((each for each in stages.closures if each.origin == whole.origin), None)
    decode_j = joules.get("decode")
    return EnergySummary.of(
        **asdict(whole.origin),
        vision_j=joules.get("vision"),
        prefill_j=joules.get("prefill"),
        decode_j=decode_j,
        decode_j_per_token=None if decode_j is None else decode_j / stages.decode_steps,
        end_to_end_j=whole.gross_j.mean,
        end_to_end_uncertainty_j=whole.uncertainty_j,
        end_to_end_idle_j=whole.idle_j,
        end_to_end_net_j=whole.net_j,
        j_per_output_token=whole.gross_j.mean / stages.output_tokens,
        closure_residual_share=closure.residual_share if closure else None,
        source_ratio=stages.source_ratios[END_TO_END] if whole.origin.component == "gpu" else None,
    )


class AnsweredRequest(NamedTuple):
    """What a sample's request took, and what its answer is worth."""

    joules: float | None  #: None where it was not measured
    score: float | None  #: None where the metric has no value for it
    picture: str


def with_correct_answers(
    energy: Energy | None, accuracy: AccuracyPart, answered: Sequence[AnsweredRequest] = ()
) -> Energy | None:
    """A setting's energy with what a correct answer takes: made anew where answers are scored anew.

    Joules per correct answer = joules of a request / (accuracy / best score). A score between 0 and the best counts as
    that fraction of a correct answer.

    Of passes it is a ratio of two means over pictures. Its interval is `ratio_interval` of the accuracy's own (all
    samples) and of the energy's: how much requests of different pictures take, and what passes and ticks leave open, in
    squares. Requests that take more and are answered better make the two correlated, which enters.

    Of the one request whose stages were measured (`summary`), what requests differ in energy is not in the interval.

    Args:
        answered: the setting's samples.
    """
    if energy is None:
        return None
    known: dict[str, Any] = {}
    if energy.summary is not None:
        whole = next(each for each in energy.stages[END_TO_END] if energy_origin(each) == energy_origin(energy.summary))
        gross = energy.summary.end_to_end_j
        assert gross is not None
        known["summary"] = _with_correct_answers(
            energy.summary, gross, _half_width_of(whole), "the uncertainty of the energy is not known", accuracy
        )
    if energy.passes is not None and energy.passes.j_per_request is not None:
        known["passes"] = _passes_with_correct_answers(energy.passes, energy.passes.j_per_request, accuracy, answered)
    return energy.with_keys(**known)


def _half_width_of(figure: StageFigure) -> float | None:
    """Half of the 95 % interval of a figure, with the bound of ticks in it; None where its uncertainty is not known."""
    if figure.uncertainty_j is None or figure.gross_j is None:
        return None
    low, high = figure.gross_j_ci95_low, figure.gross_j_ci95_high
    assert low is not None and high is not None and figure.num_windows is not None
    of_spread = half_of_interval(figure.gross_j, low, high)
    return expanded_interval(figure.gross_j, of_spread, figure.num_windows, figure.uncertainty_j)[1] - figure.gross_j


def _passes_with_correct_answers(
    passes: PassesEnergy, gross: float, accuracy: AccuracyPart, answered: Sequence[AnsweredRequest]
) -> PassesEnergy:
    whole = next(each for each in passes.figures if energy_origin(each) == energy_origin(passes))
    measured = [(each.joules, each.picture) for each in answered if each.joules is not None]
    scored = [(each.score, each.picture) for each in answered if each.score is not None]
    pictures = [picture for _, picture in measured]
    spread, of_passes = describe([joules for joules, _ in measured], pictures), _half_width_of(whole)
    if spread is None or spread.ci_low is None or spread.ci_high is None:
        why = "the energies of requests are known for fewer than 2 pictures"
        return _with_correct_answers(passes, gross, None, why, accuracy)
    if of_passes is None:
        return _with_correct_answers(passes, gross, None, "the uncertainty of the energy is not known", accuracy)
    of_pictures = half_of_interval(spread.mean, spread.ci_low, spread.ci_high)
    half = math.hypot(of_pictures, of_passes)
    correlation = 0.0
    if half > 0 and scored:
        shared = correlation_of_means([joules for joules, _ in measured], pictures, *zip(*scored, strict=True))
        correlation = shared * of_pictures / half
    return _with_correct_answers(passes, gross, half, "", accuracy, correlation)


Summary = TypeVar("Summary", EnergySummary, PassesEnergy)


def _with_correct_answers(
    summary: Summary,
    gross: float,
    half_width: float | None,
    why_unknown: str,
    accuracy: AccuracyPart,
    correlation: float = 0.0,
) -> Summary:
    """The figures with those of a correct answer, and why one of these is not there.

    Args:
        half_width: half of the interval of `gross`, the joules of a request; None for the reason `why_unknown`.
        correlation: of the joules and the accuracy.
    """
    (joules, low, high), reason = _per_correct_answer(gross, half_width, why_unknown, accuracy, correlation)
    return summary.with_keys(
        j_per_correct_answer=joules,
        j_per_correct_answer_ci95_low=low,
        j_per_correct_answer_ci95_high=high,
        j_per_correct_answer_reason=reason,
    )


def _per_correct_answer(
    gross: float, half_width: float | None, why_unknown: str, accuracy: AccuracyPart, correlation: float
) -> tuple[tuple[float | None, float | None, float | None], str | None]:
    """The figure with its interval, and why one of them is not there."""
    if accuracy.metric_best != 1.0:
        return _ABSENT, f"{accuracy.metric} gives up to {accuracy.metric_best:g}: it counts no correct answers"
    if accuracy.accuracy is None:
        return _ABSENT, "no answer has a score"
    if accuracy.accuracy <= 0:
        return _ABSENT, "no answer is correct"
    fraction = accuracy.accuracy
    if half_width is None or accuracy.accuracy_ci95 is None:
        return (gross / fraction, None, None), why_unknown or "the interval of the accuracy is not known"
    least, most = accuracy.accuracy_ci95
    energy = positive_interval(gross, half_width)
    low, high = ratio_interval(gross, energy, fraction, (least, most), correlation)
    return (gross / fraction, low, high), None if high is not None else "the accuracy may be 0: there is no upper end"


def energy_origin(figure: EnergyOfSource) -> tuple[str | None, ...]:
    return figure.device, figure.component, figure.source, figure.kind, figure.basis


def _chosen(figures: Sequence[EnergyFigure]) -> EnergyFigure | None:
    for component, basis in PREFERRED_SOURCES:
        found = [each for each in figures if (each.origin.component, each.origin.basis) == (component, basis)]
        measured = [each for each in found if each.gross_j is not None]
        if measured and len(measured) == len(found):
            return next((each for each in measured if each.origin.device == ALL_DEVICES), measured[0])
    return None
