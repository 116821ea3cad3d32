"""In: what was found in a sweep; out: what it says, in sentences whose numbers and choices are all computed. Pure."""

from collections.abc import Iterator

import pandas as pd

from experiments.core_exp.e2_entries import FrontAnalysis, TaskAnalysis, present
from experiments.core_exp.e2_figures import KNOB_NAMES
from experiments.core_exp.e3_figures import AIM
from experiments.core_exp.knob_effects import LevelMean
from experiments.core_exp.report_analyses import Analyses, LatencyModel, Missing, StageAnalysis
from experiments.core_exp.stage_decomposition import tokens_until_decode_is_half
from experiments.core_exp.stage_plots import milliseconds


def report_statements(found: Analyses) -> list[str]:
    """Times first, then knobs, accuracy, energy, prediction; only what the results hold."""
    lines = [*_extremes(found.settings)]
    if not isinstance(found.stages, Missing):
        lines += _stages(found.stages)
    random_weights = found.sweep.provenance.random_weights
    for analysis in found.knobs.tasks:
        lines += _knobs(analysis)
        if not random_weights:
            lines += _fronts(analysis)
    lines += _energy(found.settings)
    if not isinstance(found.model, Missing):
        lines += _model(found.model)
    return lines


def _extremes(frame: pd.DataFrame) -> Iterator[str]:
    for task, own in frame[frame["T_total_mean_ms"].notna()].groupby("task", sort=False):
        if len(own) < 2:
            continue
        fast, slow = own.loc[own["T_total_mean_ms"].idxmin()], own.loc[own["T_total_mean_ms"].idxmax()]
        yield (
            f"{task}: of {len(own)} settings {fast['setting']} is fastest with {milliseconds(fast['T_total_mean_ms'])} a "
            f"request on average, {slow['setting']} slowest with {milliseconds(slow['T_total_mean_ms'])} "
            f"({slow['T_total_mean_ms'] / fast['T_total_mean_ms']:.2f} times as long)."
        )


def _stages(found: StageAnalysis) -> Iterator[str]:
    counts = {stage: sum(each.dominant == stage for each in found.by_setting) for stage in ("vision", "prefill", "decode")}
    parts = [f"{stage} in {count}" for stage, count in counts.items() if count]
    yield f"The longest stage is {', '.join(parts)} of the {len(found.by_setting)} settings."
    for task in dict.fromkeys(each.task for each in found.generations):
        halves = []
        for vision in dict.fromkeys(each.vision for each in found.generations if each.task == task):
            own = [each for each in found.generations if (each.task, each.vision) == (task, vision)]
            length = tokens_until_decode_is_half(own)
            halves.append(f"{vision}: " + ("never" if length is None else f"from {length} output tokens on"))
        yield f"{task}: decode takes at least half of the time ({'; '.join(halves)})."


def _knobs(analysis: TaskAnalysis) -> Iterator[str]:
    """What each knob changes in the tail latency between its ends."""
    for each in present(analysis)[:1]:
        means = analysis.effects[each.found.of.name].level_means
        ends = [_ends([mean for mean in means if mean.knob == knob]) for knob in dict.fromkeys(m.knob for m in means)]
        if ends and each.found.of.unit == "ms":
            yield f"{analysis.grid.task}: in {each.found.of.label}, {'; '.join(ends)}."


def _ends(means: list[LevelMean]) -> str:
    first, last = means[0], means[-1]
    low, high = last.change_ci95
    sure = "" if low > 0 or high < 0 else ", which may be noise"
    return (
        f"{KNOB_NAMES[last.knob]} {first.value} → {last.value} changes {last.change:+.0f} ms "
        f"({100 * last.change / first.mean:+.0f} %) [{low:+.0f} to {high:+.0f}]{sure}"
    )


def _fronts(analysis: TaskAnalysis) -> Iterator[str]:
    for each in present(analysis)[:1]:
        yield _best_and_cheaper(each)
        on = [point for point in each.front.points if point.on_front]
        sure = sum(point.status == "established" for point in on)
        yield (
            f"{analysis.grid.task}: {len(on)} of {len(each.front.points)} settings are on the front of accuracy and "
            f"{each.found.of.label}; {sure} of them are established, the others only within noise."
        )


def _best_and_cheaper(each: FrontAnalysis) -> str:
    best = max(each.front.points, key=lambda point: (point.accuracy, -point.cost))
    places = {point.key: at for at, point in enumerate(each.found.points)}
    beaten = each.found.more_accurate[places[best.key]]
    # A setting is not surely less accurate where the best one is not confidently more accurate than it.
    level = [point for point in each.front.points if point.key == best.key or not beaten[places[point.key]]]
    cheapest = min(level, key=lambda point: point.cost)
    text = (
        f"{each.found.task}: {best.key} is the most accurate, {best.accuracy:.3f} [{best.accuracy_ci95[0]:.3f} to "
        f"{best.accuracy_ci95[1]:.3f}] on {each.found.num_score_samples} samples"
    )
    if cheapest.key == best.key:
        return f"{text}; every cheaper setting is confidently less accurate."
    return (
        f"{text}; the cheapest one that is not confidently less accurate is {cheapest.key} ({cheapest.accuracy:.3f}), at "
        f"{100 * cheapest.cost / best.cost:.0f} % of its {each.found.of.label}."
    )


def _energy(frame: pd.DataFrame) -> Iterator[str]:
    known = frame[frame["energy_j_per_output_token"].notna()]
    if known.empty:
        return
    low, high = (known.loc[at] for at in (known["energy_j_per_output_token"].idxmin(),
                                          known["energy_j_per_output_token"].idxmax()))  # fmt: skip
    kinds = ", ".join(sorted({str(kind) for kind in known["energy_kind"].dropna()}))
    yield (
        f"Energy ({kinds}): from {low['energy_j_per_output_token']:.3g} J an output token ({low['task']} {low['setting']}) "
        f"to {high['energy_j_per_output_token']:.3g} J ({high['task']} {high['setting']})."
    )


def _model(found: LatencyModel) -> Iterator[str]:
    total = "T_total"
    yield (
        f"Total times of settings that were left out of the fit are predicted with {_share(found, total)} error; a plain "
        f"linear model has {100 * found.validation.linear[total].setting_mape:.1f} %, measuring again differs by "
        f"{100 * found.validation.repeatability[total].setting_mape:.1f} %."
    )
    kept = [each for each in found.curve if each.violation_rate is not None and each.violation_rate <= AIM]
    if kept and kept[0].false_rejection_rate is not None:
        rate = kept[0].violation_rate or 0.0
        yield (
            f"A latency budget is kept with a margin of {100 * kept[0].margin:+.0f} %: {100 * rate:.1f} % of the admitted "
            f"requests take longer, and {100 * kept[0].false_rejection_rate:.1f} % of those that would fit are rejected."
        )


def _share(found: LatencyModel, name: str) -> str:
    return f"{100 * found.validation.estimator[name].setting_mape:.1f} %"
