"""The energy of a setting and of a sample as its result has it, and what weakens it.

Joules, watts and seconds, as the names say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from experiment_core_utils.meters.energy_statistics import LEAST_WINDOW_S, expanded_interval
from experiment_core_utils.primitives.distributions import ratio_interval
from experiment_core_utils.primitives.energy_records import (
    ALL_DEVICES,
    END_TO_END,
    PREFERRED_SOURCES,
    Closure,
    EnergyFigure,
    EnergyOrigin,
    IdlePower,
    SettingEnergy,
    StageEnergies,
)
from experiment_core_utils.primitives.records import MeasuredSample
from experiment_core_utils.setting_result import (
    AccuracyPart,
    Energy,
    EnergyClosure,
    EnergyIdle,
    EnergySummary,
    StageFigure,
)

CLOSURE_LIMIT = 0.05
_ABSENT = (None, None, None)


def sample_energy(sample: MeasuredSample) -> dict[str, Any]:
    """The energy keys of one entry of `per_sample_results`: of the run whose times are published."""
    energy, place = sample.energy, sample.run_place
    if energy is None or place is None:
        return dict.fromkeys(("energy_j", "energy_bound_j", "energy_method", "energy_source", "energy_reason"))
    joules = energy.joules[place]
    return {
        "energy_j": joules,
        "energy_bound_j": energy.bounds_j[place],
        "energy_method": None if joules is None else "apportioned",
        "energy_source": None if joules is None else f"{energy.source} ({energy.basis})",
        "energy_reason": energy.reason,
    }


def energy_of(energy: SettingEnergy | None) -> Energy | None:
    """A setting's energy as its result has it; None where it was not requested."""
    if energy is None:
        return None
    stages = energy.stages
    return Energy.model_construct(
        experiment_id=energy.experiment_id,
        rank=energy.rank,
        sample_id=energy.sample_id,
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
        missing=dict(energy.missing),
        reason=energy.reason,
    )


def _figure(figure: EnergyFigure) -> StageFigure:
    gross = figure.gross_j
    return StageFigure.model_construct(
        **asdict(figure.origin),
        gross_j=gross.mean if gross else None,
        gross_j_ci95_low=gross.ci_low if gross else None,
        gross_j_ci95_high=gross.ci_high if gross else None,
        uncertainty_j=figure.uncertainty_j,
        idle_w=figure.idle_w,
        idle_j=figure.idle_j,
        net_j=figure.net_j,
        net_uncertainty_j=figure.net_uncertainty_j,
        act_s=figure.act_s,
        num_acts=figure.count,
        window_s=figure.window_s,
        num_windows=figure.num_windows,
        reason=figure.reason,
        remark=figure.remark,
        window_error=figure.window_error,
    )


def _closure(closure: Closure) -> EnergyClosure:
    values = asdict(closure)
    return EnergyClosure.model_construct(**values.pop("origin"), **values)


def _idle(before: IdlePower, after: IdlePower) -> EnergyIdle:
    reasons = dict.fromkeys(each.reason for each in (before, after) if each.reason is not None)
    return EnergyIdle.model_construct(
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
    found = {name: _of(figures, whole.origin) for name, figures in stages.figures.items()}
    joules = {name: each.gross_j.mean for name, each in found.items() if each is not None and each.gross_j is not None}
    closure = next((each for each in stages.closures if each.origin == whole.origin), None)
    decode_j = joules.get("decode")
    return EnergySummary.model_construct(
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


def with_correct_answers(energy: Energy | None, accuracy: AccuracyPart) -> Energy | None:
    """A setting's energy with what a correct answer takes in its summary: made anew where answers are scored anew.

    Joules per correct answer = `end_to_end_j` / (accuracy / best score): what one request takes over the share of
    requests that are answered correctly. A score between 0 and the best counts as that share of a correct answer. The
    energy is of one request, repeated in windows, not of the samples that accuracy is of, so that the two are
    independent: the interval is `ratio_interval` of the accuracy's own (over samples, by picture) and of the energy's
    (`expanded_interval`: windows and ticks). What requests differ in energy is in neither.
    """
    if energy is None or energy.summary is None:
        return energy
    (joules, low, high), reason = _per_correct_answer(energy.summary, energy.stages[END_TO_END], accuracy)
    summary = energy.summary.with_keys(
        j_per_correct_answer=joules,
        j_per_correct_answer_ci95_low=low,
        j_per_correct_answer_ci95_high=high,
        j_per_correct_answer_reason=reason,
    )
    return energy.with_keys(summary=summary)


def _per_correct_answer(
    summary: EnergySummary, figures: Sequence[StageFigure], accuracy: AccuracyPart
) -> tuple[tuple[float | None, float | None, float | None], str | None]:
    """The figure with its interval, and why one of them is not there."""
    if accuracy.metric_best != 1.0:
        return _ABSENT, f"{accuracy.metric} gives up to {accuracy.metric_best:g}: it counts no correct answers"
    if accuracy.accuracy is None:
        return _ABSENT, "no answer has a score"
    if accuracy.accuracy <= 0:
        return _ABSENT, "no answer is correct"
    gross, share = summary.end_to_end_j, accuracy.accuracy
    assert gross is not None
    whole = next(each for each in figures if _origin_of(each) == _origin_of(summary))
    if whole.uncertainty_j is None or accuracy.accuracy_ci95 is None:
        return (gross / share, None, None), "the uncertainty of the energy is not known"
    assert whole.gross_j_ci95_high is not None and whole.num_windows is not None
    energy = expanded_interval(gross, whole.gross_j_ci95_high - gross, whole.num_windows, whole.uncertainty_j)
    least, most = accuracy.accuracy_ci95
    low, high = ratio_interval(gross, energy, share, (least, most))
    return (gross / share, low, high), None if high is not None else "the accuracy may be 0: there is no upper end"


def _origin_of(figure: StageFigure | EnergySummary) -> tuple[str | None, ...]:
    return figure.device, figure.component, figure.source, figure.kind, figure.basis


def _chosen(figures: Sequence[EnergyFigure]) -> EnergyFigure | None:
    for component, basis in PREFERRED_SOURCES:
        found = [each for each in figures if (each.origin.component, each.origin.basis) == (component, basis)]
        measured = [each for each in found if each.gross_j is not None]
        if measured and len(measured) == len(found):
            return next((each for each in measured if each.origin.device == ALL_DEVICES), measured[0])
    return None


def _of(figures: Sequence[EnergyFigure], origin: EnergyOrigin) -> EnergyFigure | None:
    return next((each for each in figures if each.origin == origin), None)


def energy_caveats(energy: Energy | None) -> list[str]:
    """A sentence each for what weakens the figures of a setting's `energy`."""
    if energy is None:
        return []
    summary = energy.summary
    if summary is None:
        return [f"energy: not measured: {energy.reason or _first_reason(energy)}"]
    source = (summary.component, summary.basis, summary.device)
    caveats = []
    share = summary.closure_residual_share
    if share is None:
        caveats.append("energy: whether the stages add up to the whole is not known: a stage was not measured")
    elif abs(share) > CLOSURE_LIMIT:
        caveats.append(f"energy: the stages and the whole request differ by {share:+.1%}")
    own = {
        name: each
        for name, figures in energy.stages.items()
        for each in figures
        if (each.component, each.basis, each.device) == source
    }
    short = [name for name, each in own.items() if each.num_windows and _mean_window_s(each) < LEAST_WINDOW_S]
    if short:
        caveats.append(f"energy: the windows of {', '.join(short)} are shorter than {LEAST_WINDOW_S:g} s")
    caveats += _missed_goal(own, energy.error_goal)
    if summary.kind == "estimated":
        caveats.append(f"energy: estimated by {summary.source}, not measured")
    if summary.component != "gpu" and any(name.startswith("energy counter of") for name in energy.missing):
        caveats.append("energy: the GPU's own energy is not in it")
    return caveats


def _missed_goal(figures: Mapping[str, StageFigure], goal: float | None) -> list[str]:
    """One sentence for all stages whose longest window was not long enough."""
    errors = {name: each.window_error for name, each in figures.items() if each.window_error is not None}
    missed = [f"{name} {error:.1%}" for name, error in errors.items() if goal is not None and error > goal]
    if not missed:
        return []
    return [
        f"energy: the longest windows leave an error of up to {', '.join(missed)}, more than the goal of {goal:.1%}"
    ]


def _mean_window_s(figure: StageFigure) -> float:
    assert figure.window_s is not None and figure.num_windows
    return figure.window_s / figure.num_windows


def _first_reason(energy: Energy) -> str | None:
    return next((each.reason for each in energy.stages.get(END_TO_END, ()) if each.reason), None)
