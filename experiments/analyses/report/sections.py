"""The sections of a report: the charts of E1, E2 and E3, and why one that a reader expects is missing."""

from experiments.analyses.charts.knob_charts import STATUS_MARKS, knob_study_charts
from experiments.analyses.charts.latency_charts import latency_charts
from experiments.analyses.charts.stage_charts import stage_charts
from experiments.analyses.knobs.analysis import KnobAnalysis
from experiments.analyses.knobs.conclusion import ONE_SETTING
from experiments.analyses.knobs.objectives import COSTS, NoObjectives
from experiments.analyses.latency.analysis import LatencyModel
from experiments.analyses.report.analyses import Missing
from experiments.analyses.report.parts import Section
from experiments.analyses.stages.analysis import StageAnalysis
from experiments.analyses.sweeps import SweepProvenance


def stage_section(found: StageAnalysis | Missing, shared: SweepProvenance) -> Section:
    """The section about stages: parts of the decoder only where requests were profiled."""
    title = "Where the time goes (E1)"
    if isinstance(found, Missing):
        return Section("e1", title, "", (), (found.reason,))
    reasons = []
    if not found.points:
        reasons.append("No operations against time: there are no formulas for the architecture.")
    elif shared.peak_flops_per_s is None:
        reasons.append(f"No utilisation (MFU): {shared.peak_reason}.")
    if not found.profiles and found.profiles_reason is not None:
        reasons.append(f"No attention, FFN, routing and experts: {found.profiles_reason}.")
    intro = (
        "A request runs through vision encoding, prefill and decode. Each answer also gives the stage times of "
        "every shorter answer, so no length is modelled."
    )
    return Section("e1", title, intro, stage_charts(found, shared.peak_flops_per_s), reasons)


def knob_section(found: KnobAnalysis, random_weights: bool) -> Section:
    """The section about knobs: fronts, couplings and effects of each task; without accuracy only what the knobs do to
    costs.
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
        missing = [each for each in analysis.fronts if isinstance(each, NoObjectives)]
        reasons += [f"{each.task}, {each.of.label}: {each.reason}." for each in missing]
    if not random_weights:
        reasons += _difference_lines(found)
    intro = (
        "A setting is on the front if no other is better in accuracy or cost without being worse in the other. "
        "Settings are compared on the same samples; marks show what only noise separates."
    )
    charts = knob_study_charts(found.tasks, with_accuracy=not random_weights)
    return Section("e2", "What the knobs buy (E2)", intro, charts, reasons)


def _difference_lines(found: KnobAnalysis) -> list[str]:
    return [
        f"{each.key} ({COSTS[name].label}): "
        + ", ".join(f"{task} {STATUS_MARKS[status][0]}" for task, status in each.statuses.items()) + "."
        for name, differences in found.differences.items()
        for each in differences
        if each.difference == "established"
    ]  # fmt: skip


def estimator_section(found: LatencyModel | Missing) -> Section:
    """The section about the estimator: errors, the guardrail's curve, and predicted against measured."""
    title = "Predicting latency (E3)"
    if isinstance(found, Missing):
        return Section("e3", title, "", (), (f"No latency estimator: {found.reason}.",))
    intro = (
        "A model of the stages, fitted on these results. Every prediction here is of a setting that was left out of "
        "the fit."
    )
    return Section("e3", title, intro, latency_charts(found))
