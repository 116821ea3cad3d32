"""The energy of a setting, of the stages of one request and of passes over many samples, from their windows."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from experiment_core_utils.meters.energy_statistics import act_figures, source_group, sum_of_known
from experiment_core_utils.primitives.statistics import mean_of, rate
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
    EnergyOrigin,
    EnergyPass,
    EnergyPassesEnd,
    EnergySummary,
    IdlePower,
    PassesEnergy,
    SettingEnergy,
    StageEnergies,
    StageFigure,
)


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
        closures=[_closure(closure) for closure in stages.closures] if stages else [],
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
    origins = [window.origin for window in passes[-1].windows]
    alike = [each for each in passes if [window.origin for window in each.windows] == origins]
    readings = [each.idle for each in alike] + ([] if end is None else [end.idle])
    idle = list(zip(*(each for each in readings if [one.origin for one in each] == origins), strict=True))
    figures, ratio = act_figures([divided_acts(each.windows, len(each.sample_ids)) for each in alike], idle)
    tokens = mean_of([each.output_tokens / len(each.sample_ids) for each in alike])
    known: dict[str, Any] = {
        "sample_ids": list(alike[0].sample_ids),
        "output_tokens_per_request": tokens,
        "figures": [_figure(figure) for figure in figures],
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


def divided_acts(windows: Iterable[ActEnergy], number: int) -> tuple[ActEnergy, ...]:
    """The windows with one of `number` equal parts of each act as the act."""

    def part(value: float | None) -> float | None:
        return None if value is None else value / number

    return tuple(
        replace(
            each,
            joules=part(each.joules),
            bound_j=part(each.bound_j),
            act_s=part(each.act_s),
            count=None if each.count is None else each.count * number,
        )
        for each in windows
    )


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
    joules = {name: figure.gross_j.mean for name, figure in own if figure.gross_j is not None}
    closure = next((closure for closure in stages.closures if closure.origin == whole.origin), None)
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
        j_per_output_token=rate(whole.gross_j.mean, stages.output_tokens),
        closure_residual_share=closure.residual_share if closure else None,
        source_ratio=stages.source_ratios[END_TO_END] if whole.origin.component == "gpu" else None,
    )


def _chosen(figures: Sequence[EnergyFigure]) -> EnergyFigure | None:
    for component, basis in PREFERRED_SOURCES:
        alike = [one for one in figures if (one.origin.component, one.origin.basis) == (component, basis)]
        measured = [figure for figure in alike if figure.gross_j is not None]
        if measured and len(measured) == len(alike):
            return next((figure for figure in measured if figure.origin.device == ALL_DEVICES), measured[0])
    return None
