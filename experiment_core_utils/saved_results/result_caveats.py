"""The caveats of a finished result: one function of the record, for runs, rescoring and verification alike."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from experiment_core_utils.config.parts import EnergyMode
from experiment_core_utils.knobs.answer_limit import answer_limit_at
from experiment_core_utils.knobs.batch_size import batch_size_of
from experiment_core_utils.knobs.loading import ENGINE
from experiment_core_utils.knobs.setting import setting_of
from experiment_core_utils.knobs.variant import OWN
from experiment_core_utils.meters.codecarbon import ESTIMATE
from experiment_core_utils.meters.energy_statistics import LEAST_WINDOW_S
from experiment_core_utils.meters.steadiness import BACKGROUND_LOAD, throttling_of
from experiment_core_utils.primitives.statistics import fraction_of, half_of_interval
from experiment_core_utils.records.caveats import ANSWER_KINDS, Caveat, caveat, sentences
from experiment_core_utils.records.energy import (
    END_TO_END,
    GPU_COUNTER,
    Energy,
    EnergySummary,
    PassesEnergy,
    StageFigure,
)
from experiment_core_utils.records.sample_result import SampleResult
from experiment_core_utils.records.setting_result import AccuracyPart, Conditions, OpenLoop, SettingResult
from experiment_core_utils.records.text import InferenceResults, PooledEnergy

AnyResult = TypeVar("AnyResult", bound=SettingResult)
# Kinds that follow from a result's figures. All others were noted by the run: nothing else in the file shows them.
DERIVED_KINDS = frozenset(
    {
        *ANSWER_KINDS,
        "answers_cut",
        "batch_stages_differ",
        "client_late",
        "copy_stages_differ",
        "energy_closure",
        "energy_closure_unknown",
        "energy_estimated",
        "energy_goal_missed",
        "energy_passes_differ",
        "energy_short_windows",
        "energy_without_gpu",
        "foreign_load_cpu",
        "foreign_load_gpu",
        "knobs_not_seen",
        "open_loop_short",
        "runs_discarded",
        "server_behind",
        "throttled",
    }
)

# Above this fraction of unreadable, empty, one-token or cut answers a result has a caveat.
MOST_UNREADABLE = 0.05
# Above this fraction of answers of a single token a text run has measured prefills.
_MOST_ONE_TOKEN = 0.5
ANSWER_CAVEATS = frozenset({"answers_cut", "answers_ended_at_once"})
CLOSURE_LIMIT = 0.05
# Of the requests a second that came, answered at least; below it a server did not keep up.
KEPT_UP = 0.9
# Of fewer requests a batch chance decides: of 64 at 10 a second, answered after 1 s in the median (0.6 apart in
# logarithm), one server in eight that keeps up seems not to; of 100, one in a hundred.
FEWEST_FOR_A_RATE = 100


def caveats_of(result: SettingResult) -> list[Caveat]:
    """All caveats of a result: those that the run noted, then those that follow from its figures."""
    variables, samples = result.provenance.experimental_variables, result.per_sample_results
    found = conditions_caveats(result.conditions) + open_loop_caveats(result.open_loop)
    found += discarded_caveats(samples) + energy_caveats(result.energy)
    if not_seen := (result.realised or {}).get("knobs_not_seen"):
        found.append(caveat("knobs_not_seen", reasons=dict(not_seen)))
    found += copy_caveats(result)
    found += batch_caveats(result)
    found += answer_caveats(result, len(samples), result.share_one_token)
    if variables.max_new_tokens is not None:
        limit = answer_limit_at(setting_of(result), variables.max_new_tokens)
        found += cut_caveats([sample.output_ended for sample in samples], limit)
    # Commit dfe8f148, whose results name no run, had other tests: only answers are read anew.
    derived = DERIVED_KINDS if result.provenance.run_uid is not None else frozenset(ANSWER_KINDS)
    kinds = derived | {each.kind for each in found}
    noted = [each for each in result.provenance.caveat_records if each.kind not in kinds]
    return noted + found


def copy_caveats(result: SettingResult) -> list[Caveat]:
    """Whether a copy of the model was run by something else than the model as it is, without the knob of it."""
    realised = result.realised or {}
    loading = (realised.get("counted") or {}).get("loading") or {}
    stages, own = realised.get("execution_stages"), loading.get("own_execution_stages")
    if not stages or not own or stages == own or setting_of(result).value(ENGINE.name) != OWN:
        return []
    return [caveat("copy_stages_differ", stages=[*stages.values()], own_stages=[own.get(name) for name in stages])]


def batch_caveats(result: SettingResult) -> list[Caveat]:
    """Whether requests that run together were run by something else than a request alone."""
    stages, own = (result.realised or {}).get("execution_stages"), result.provenance.model.execution_stages
    alone = {} if own is None else own.model_dump()
    if not stages or not alone or batch_size_of(setting_of(result)) == 1:
        return []
    own_stages = [alone.get(name) for name in stages]
    if [*stages.values()] == own_stages:
        return []
    return [caveat("batch_stages_differ", stages=[*stages.values()], own_stages=own_stages)]


def with_caveats(result: AnyResult) -> AnyResult:
    """The result with its caveats made anew."""
    records = caveats_of(result)
    if records == result.provenance.caveat_records:
        return result
    provenance = result.provenance.with_keys(caveats=sentences(records), caveat_records=records)
    return result.with_keys(provenance=provenance)


def conditions_caveats(entries: Sequence[Conditions]) -> list[Caveat]:
    """A caveat each for throttling and for background load, of the process that had most of it; none where none had."""
    caveats = []
    throttled = [entry for entry in entries if throttling_of(entry)]
    if throttled:
        what = sorted({name for each in throttled for name in throttling_of(each)})
        caveats.append(caveat("throttled", reasons=what))
    cpu = max((each.foreign_cpu_share for each in entries if each.foreign_cpu_share is not None), default=0.0)
    if cpu > BACKGROUND_LOAD:
        caveats.append(caveat("foreign_load_cpu", cpu_fraction=cpu))
    loaded = [each for each in entries if (each.utilisation_percent_at_open or 0) > 100 * BACKGROUND_LOAD]
    if any(each.foreign_gpu_processes_max for each in loaded):
        caveats.append(caveat("foreign_load_gpu"))
    return caveats


def open_loop_caveats(found: OpenLoop | None) -> list[Caveat]:
    """The caveats of a server that did not keep up, of batches too short for the load to become full, and of a client
    that was late; none where there is none of these.
    """
    if found is None:
        return []
    figures, caveats = found.content(), []
    batch = round(found.num_requests / found.num_batches)
    # By Little's law the load grows for as many requests as it has in the end.
    is_short = found.most_under_way > max(batch / 2, 1)
    kept_up = 1.0 if found.achieved_rate is None else found.achieved_rate / found.request_rate
    if kept_up < KEPT_UP and batch >= FEWEST_FOR_A_RATE:
        caveats.append(caveat("server_behind", fraction=1 - kept_up, is_short=is_short, **figures))
    if is_short:
        caveats.append(caveat("open_loop_short", batch=batch, fraction=found.most_under_way / batch, **figures))
    if found.num_late:
        caveats.append(caveat("client_late", fraction=found.num_late / found.num_requests, **figures))
    return caveats


def discarded_caveats(samples: Sequence[SampleResult]) -> list[Caveat]:
    """The caveat of runs that were disturbed, whether they were measured again or not; none where none was."""
    discarded = sum(sample.num_discarded_runs or 0 for sample in samples)
    kept = [sample for sample in samples if sample.disturbances]
    if not discarded and not kept:
        return []
    timed, alone = sum(bool(each.runs) for each in samples), sum(not each.num_discarded_runs for each in kept)
    figures = {"num_kept": len(kept), "num_unrepeated": alone, "num_samples": timed}
    return [caveat("runs_discarded", num_runs=discarded, **figures)]


def energy_caveats(energy: Energy | None) -> list[Caveat]:
    """A caveat each for what weakens the figures of a setting's `energy`."""
    if energy is None:
        return []
    summary, passes = energy.summary, energy.passes
    has_passes = passes is not None and passes.j_per_request is not None
    figures = [] if summary is not None else list(energy.stages.get(END_TO_END, ()))
    figures += passes.figures if passes is not None and not has_passes else []
    reason = energy.reason or next((each.reason for each in figures if each.reason), None)
    best = passes if has_passes else summary
    caveats = [caveat("energy_not_measured", reason=reason)] if best is None or reason is not None else []
    if summary is not None:
        caveats += _stage_caveats(energy, summary)
    if passes is not None and passes.j_per_request is not None:
        caveats += _passes_caveats(passes, passes.j_per_request)
    if best is None:
        return caveats
    if best.kind == "estimated":
        caveats.append(caveat("energy_estimated", source=best.source))
    if best.component != "gpu" and any(name.startswith(GPU_COUNTER) for name in energy.missing):
        caveats.append(caveat("energy_without_gpu"))
    return caveats


def _stage_caveats(energy: Energy, summary: EnergySummary) -> list[Caveat]:
    caveats = []
    fraction = summary.closure_residual_share
    if fraction is None:
        caveats.append(caveat("energy_closure_unknown"))
    elif abs(fraction) > CLOSURE_LIMIT:
        caveats.append(caveat("energy_closure", fraction=fraction))
    own = {name: each for name, figures in energy.stages.items() for each in figures if each.is_from_source_of(summary)}
    least_s = {name: LEAST_WINDOW_S * (each.num_windows or 0) for name, each in own.items()}
    short = [name for name, each in own.items() if (each.window_s or 0.0) < least_s[name]]
    if short:
        caveats.append(caveat("energy_short_windows", stages=short, least_s=LEAST_WINDOW_S))
    return caveats + _missed_goal(own, energy.error_goal)


def _passes_caveats(passes: PassesEnergy, gross: float) -> list[Caveat]:
    """What is open of the joules of a request, where it is more than the goal."""
    whole = next(each for each in passes.figures if each.is_from_source_of(passes))
    caveats = _missed_goal({"passes": whole}, passes.error_goal)
    (low, high), goal = (passes.j_per_request_ci95_low, passes.j_per_request_ci95_high), passes.error_goal
    fraction = None if low is None or high is None else half_of_interval(gross, low, high) / gross
    if goal is not None and (fraction is None or fraction > goal):
        caveats.append(caveat("energy_passes_differ", num_passes=passes.num_passes, fraction=fraction, goal=goal))
    return caveats


def _missed_goal(figures: Mapping[str, StageFigure], goal: float | None) -> list[Caveat]:
    """One caveat for all stages whose longest window was not long enough."""
    errors = {name: each.window_error for name, each in figures.items() if each.window_error is not None}
    missed = {name: error for name, error in errors.items() if goal is not None and error > goal}
    return [caveat("energy_goal_missed", errors=missed, goal=goal)] if missed else []


def answer_caveats(accuracy: AccuracyPart, num_answers: int, share_one_token: float | None) -> list[Caveat]:
    """Caveats of answers that could not be read, are empty or end after one token, where those are more than a few,
    and of those that have no score or too few references.

    An empty answer cannot be read either, nor can one whose scoring failed; each is named once.
    """
    details = accuracy.metric_details or {}
    few, unscored, failed = (
        fraction_of(details.get(name, 0), num_answers) or 0.0
        for name in ("few_references", "unscored", "scoring_failed")
    )
    empty = accuracy.share_empty or 0.0
    fractions = {
        "answers_unparsed": max((accuracy.share_unparsed or 0.0) - empty - failed, 0.0),
        "answers_empty": empty,
        "answers_one_token": share_one_token or 0.0,
    }
    found = {kind: fraction for kind, fraction in fractions.items() if fraction > MOST_UNREADABLE}
    found |= {kind: each for kind, each in (("answers_unscored", unscored), ("few_references", few)) if each}
    return [caveat(kind, fraction=fraction, metric=accuracy.metric) for kind, fraction in found.items()]


def cut_caveats(ended: Sequence[bool | None], limit: int) -> list[Caveat]:
    """The caveat of more than 5 % of answers that the limit of tokens cut; none otherwise.

    Args:
        ended: whether each answer came to its end.
    """
    cut = ended.count(False)
    if not ended or cut / len(ended) <= MOST_UNREADABLE:
        return []
    return [caveat("answers_cut", num_cut=cut, num_answers=len(ended), limit=limit)]


def text_answer_caveats(results: InferenceResults, limit: int) -> list[Caveat]:
    """The caveats of the answers of a text run: cut at the limit, or most of them ended at once."""
    queries = results["queries"]
    at_once = sum(query["ended"] and query["output_tokens"] == 1 for query in queries)
    is_fixed = results["decoding"].get("ignore_eos")
    caveats = [] if is_fixed else cut_caveats([query["ended"] for query in queries], limit)
    if queries and at_once / len(queries) > _MOST_ONE_TOKEN:
        caveats.append(caveat("answers_ended_at_once", num_answers=at_once, num_prompts=len(queries)))
    return caveats


def text_energy_caveats(energy: PooledEnergy, mode: EnergyMode, waiting_s: float) -> list[Caveat]:
    """The caveats of a text run's energy: estimated on a machine, not there, or with waiting in it; none where off."""
    if mode == "off":
        return []
    caveats = [] if waiting_s <= 0 else [caveat("simulated_waiting", waiting_s=waiting_s)]
    machines = [each for each in energy["per_process_breakdown"] if each["duration_seconds"] is not None]
    if not machines:
        return [caveat("energy_not_measured", reason=energy["reason"]), *caveats]
    if all(_is_measured(each) for each in machines):
        return caveats
    return [caveat("energy_estimated", source=ESTIMATE["source"]), *caveats]


def _is_measured(machine: Mapping[str, Any]) -> bool:
    kinds = [each["kind"] for each in machine["sources"].values()]
    kinds += [each["origin"]["kind"] for each in machine["instruments"] or () if each["gross_j"] is not None]
    return "measured" in kinds
