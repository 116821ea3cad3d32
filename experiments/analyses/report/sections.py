"""The sections of a report: the charts of E1, E2 and E3, and why one that a reader expects is missing."""

from collections.abc import Sequence

import pandas as pd

from experiment_core_utils.records.conclusion import Conclusion
from experiments.analyses.charts.knob_charts import STATUS_MARKS, fronts_chart, knob_charts
from experiments.analyses.charts.latency_charts import latency_charts
from experiments.analyses.charts.stage_charts import stage_charts
from experiments.analyses.knobs.analysis import KnobAnalysis
from experiments.analyses.knobs.conclusion import ONE_SETTING, accuracy_says_nothing, why_invalid
from experiments.analyses.knobs.objectives import COSTS, NoObjectives
from experiments.analyses.latency.analysis import budget_sentences, prediction_sentences
from experiments.analyses.report.analyses import Missing, SweepAnalyses
from experiments.analyses.report.findings import energy_findings, stage_findings
from experiments.analyses.report.parts import FrontPicture, Section

# What the button of a cost says.
COST_NAMES = {
    "latency_mean": "mean ms", "latency_p95": "P95 ms", "energy": "energy", "flops": "FLOPs", "memory": "bytes",
}  # fmt: skip


def front_pictures(found: KnobAnalysis, random_weights: bool, conclusions: Sequence[Conclusion]) -> list[FrontPicture]:
    """The front of each task by each cost, or why there is none; nothing where accuracy says nothing.

    Args:
        conclusions: of each task; where one is INVALID its front has no verdicts, and says why.
    """
    pictures = []
    for number, (analysis, concluded) in enumerate(zip(found.tasks, conclusions, strict=True)):
        if random_weights or len(analysis.grid.points) < 2 or accuracy_says_nothing(analysis.grid) is not None:
            continue
        for each in analysis.fronts:
            of = each.of if isinstance(each, NoObjectives) else each.found.of
            panel, reason = None, ""
            if isinstance(each, NoObjectives):
                reason = each.reason
            else:
                (panel,) = fronts_chart([each], why_invalid([concluded])).panels
            name = f"front-{number}-{of.name}"
            pictures.append(FrontPicture(name, analysis.grid.task, COST_NAMES[of.name], panel, reason))
    return pictures


def stage_section(own: SweepAnalyses, settings: pd.DataFrame) -> Section:
    """The section about stages and energy: parts of the decoder only where requests were profiled.

    Args:
        settings: the frame of the sweep's settings.
    """
    title, found, shared = "Where the time goes", own.stages, own.sweep.provenance
    if isinstance(found, Missing):
        return Section("e1", title, "", (), (found.reason,))
    reasons = []
    if not found.points:
        reasons.append("No operations against time: there are no formulas for the architecture.")
    elif shared.peak_flops_per_s is None:
        reasons.append(f"No utilisation (MFU): {shared.peak_reason}.")
    if not found.profiles and found.profiles_reason is not None:
        reasons.append(f"No attention, FFN, routing and experts: {found.profiles_reason}.")
    has_vision = any(each.vision_ms is not None for each in found.generations)
    intro = (
        f"A request runs through {'vision encoding, ' * has_vision}prefill and decode. Each answer also gives the "
        "stage times of every shorter answer, so no length is modelled."
    )
    charts = stage_charts(found, shared.peak_flops_per_s)
    return Section("e1", title, intro, charts, reasons, [*stage_findings(own), *energy_findings(settings)])


def knob_section(found: KnobAnalysis, random_weights: bool, is_invalid: bool) -> Section:
    """The section about knobs: couplings and effects of each task; without accuracy only what the knobs do to costs.

    Args:
        is_invalid: whether any task's conclusion is INVALID; places on fronts are not compared over tasks then.
    """
    reasons = []
    if random_weights:
        reasons.append(
            "No fronts and no coupling: the weights are random, so accuracy cannot be used. What the knobs do to "
            "time, energy and operations does not depend on it and is shown."
        )
    for analysis in found.tasks:
        if len(analysis.grid.points) < 2:
            reasons.append(f"{analysis.grid.task}: {ONE_SETTING}.")
            continue
        missing = [front for front in analysis.fronts if isinstance(front, NoObjectives)]
        reasons += [f"{each.task}, {each.of.label}: {each.reason}." for each in missing]
    if not random_weights and not is_invalid:
        reasons += _difference_lines(found)
    intro = (
        "What the best choice of the other knobs loses with one knob held, and how much of the spread over settings "
        "each knob makes."
    )
    return Section("e2", "What the knobs buy", intro, knob_charts(found.tasks, not random_weights), reasons)


def _difference_lines(found: KnobAnalysis) -> list[str]:
    return [
        f"{difference.key} ({COSTS[name].label}): "
        + ", ".join(f"{task} {STATUS_MARKS[status][0]}" for task, status in difference.statuses.items()) + "."
        for name, differences in found.differences.items()
        for difference in differences
        if difference.difference == "established"
    ]  # fmt: skip


def estimator_section(own: SweepAnalyses, has_budget: bool) -> Section:
    """The section about the estimator: errors, predicted against measured, and where a budget is given the guardrail's
    curve.
    """
    title, found = "Predicting latency", own.model
    if isinstance(found, Missing):
        return Section("e3", title, "", (), (f"No latency estimator: {found.reason}.",), is_folded=True)
    intro = (
        "A model of the stages, fitted on these results. Every prediction here is of a setting that was left out of "
        "the fit."
    )
    charts = [each for each in latency_charts(found) if has_budget or each.name != "e3_guardrail"]
    budgets = budget_sentences(found) if has_budget else ()
    caveats = [f"{caveat.sentence[:1].upper()}{caveat.sentence[1:]}." for caveat in found.caveats]
    findings = [*prediction_sentences(found), *budgets]
    return Section("e3", title, intro, charts, caveats, findings, is_folded=not has_budget)
