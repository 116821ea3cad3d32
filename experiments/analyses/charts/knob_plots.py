"""The section of a report about E2 (knobs)."""

from collections.abc import Sequence

import numpy as np

from experiments.analyses.charts.knob_figures import FAINT, KNOB_COLOURS, KNOB_NAMES, scale_of, short_name
from experiments.analyses.charts.marks import (
    NAMES,
    NAMES_IN_GROUPS,
    axis,
    bars,
    dots,
    hover,
    layout,
    line,
    plain,
    whiskers,
)
from experiments.analyses.charts.style import BLUE, ORANGE, PURPLE, QUIET, SKY, VERMILION, YELLOW
from experiments.analyses.knobs.analysis import KnobAnalysis
from experiments.analyses.knobs.coupling import FixedValue
from experiments.analyses.knobs.effects import Effects, Term, is_beyond_noise
from experiments.analyses.knobs.fronts import FrontPoint, Status
from experiments.analyses.knobs.grid import KNOBS
from experiments.analyses.knobs.objectives import NoObjectives
from experiments.analyses.knobs.records import FrontAnalysis, TaskAnalysis, present
from experiments.analyses.report.analyses import COSTS
from experiments.analyses.report.parts import Plot, Section

TITLE = "What the knobs buy (E2)"
STATUS_MARKS: dict[Status, tuple[str, str, str, int]] = {
    "dominated": ("dominated", FAINT, "circle", 6),
    "possible": ("off the front, could be on it", QUIET, "circle-open", 7),
    "within_noise": ("on the front, only within noise", VERMILION, "circle-open", 10),
    "established": ("on the front, established", BLUE, "circle", 10),
}
TERM_COLOURS = (SKY, YELLOW, PURPLE, VERMILION)


def knob_section(found: KnobAnalysis, random_weights: bool) -> Section:
    """The section about knobs: fronts, couplings and effects of each task; without accuracy only what the knobs do to
    costs.
    """
    plots, reasons = [], []
    if random_weights:
        reasons.append(
            "No fronts and no coupling: the weights are random, so accuracy cannot be used. What the knobs do to "
            "time, energy and operations does not depend on it and is shown."
        )
    for analysis in found.tasks:
        if len(analysis.grid.points) < 2:
            reasons.append(f"{analysis.grid.task}: one setting; a front needs two or more to choose between.")
            continue
        if not random_weights:
            plots += [front_plot(each) for each in present(analysis)]
            plots += coupling_plots(analysis)
        plots += effect_plots(analysis, with_accuracy=not random_weights)
        reasons += [
            f"{each.task}, {each.of.label}: {each.reason}."
            for each in analysis.fronts
            if isinstance(each, NoObjectives)
        ]
    if not random_weights:
        reasons += _difference_lines(found)
    intro = (
        "A setting is on the front where none costs no more and is at least as accurate. Settings are compared on the "
        "same samples; what only noise separates is marked so."
    )
    return Section("e2", TITLE, intro, plots, reasons)


def _difference_lines(found: KnobAnalysis) -> list[str]:
    return [
        f"{each.key} ({of.label}): " + ", ".join(f"{status.replace('_', ' ')} for {task}" for task, status in
                                                each.statuses.items()) + "."
        for of in COSTS
        for each in found.differences.get(of.name, ())
        if each.difference == "established"
    ]  # fmt: skip


def front_plot(each: FrontAnalysis) -> Plot:
    """A plot of all settings of a task against one cost, by how sure their place is, and the front's steps."""
    found, front = each.found, each.front
    scale, unit = scale_of(found)
    names = {point.key: short_name(point) for point in found.points}
    end = 1.04 * max(point.cost for point in front.points) / scale
    steps = [point for point in front.points if point.on_front]
    x, y = [point.cost / scale for point in steps], [point.accuracy for point in steps]
    traces = [line([*x, end], [*y, y[-1]], "front", BLUE, shape="hv", width=2) | {"opacity": 0.5, "showlegend": False}]
    for status, (label, colour, symbol, size) in STATUS_MARKS.items():
        own = [point for point in front.points if point.status == status]
        if not own:
            continue
        x, y = [point.cost / scale for point in own], [point.accuracy for point in own]
        texts = [_point_text(point, scale, unit) for point in own]
        trace = dots(x, y, texts, label, colour, size=size, symbol=symbol)
        if status in ("within_noise", "established"):
            trace["error_y"] = whiskers(y, [point.accuracy_ci95 for point in own]) | {"color": colour}
            ends = [(point.cost_ci95[0] / scale, point.cost_ci95[1] / scale) for point in own]
            trace["error_x"] = whiskers(x, ends) | {"color": colour}
            # Left of a mark, where no better setting is, but right of one at the edge.
            sides = ["top right" if each < 0.18 * end else "top left" for each in x]
            trace |= {"mode": "markers+text", "text": [plain(names[point.key]) for point in own],
                      "textposition": sides, "textfont": {"size": 10}}  # fmt: skip
        traces.append(trace)
    return Plot(
        f"e2-front-{found.of.name}-{found.task}",
        f"{found.task.replace('_', ' ')}: accuracy against {found.of.label}",
        traces,
        layout(
            axis(f"{found.of.label} ({unit})", rangemode="tozero"),
            axis("accuracy", range=_accuracy_range(front.points, found.best)),
        ),
        "half", 430,
        f"{len(front.points)} settings, {found.num_score_samples} samples with a score, {found.num_cost_samples} with "
        f"the cost. Bars are 95 % intervals.",
    )  # fmt: skip


def _accuracy_range(points: Sequence[FrontPoint], best: float) -> list[float]:
    """The range of accuracy that contains all points, with the intervals of the front's, and room for names."""
    low = min(point.accuracy_ci95[0] if point.on_front else point.accuracy for point in points)
    high = max(point.accuracy_ci95[1] if point.on_front else point.accuracy for point in points)
    room = max(0.12 * (high - low), 0.05 * best)
    return [max(low - room, -0.02 * best), high + room]


def _point_text(point: FrontPoint, scale: float, unit: str) -> str:
    lines = [
        f"accuracy {point.accuracy:.3f} [{point.accuracy_ci95[0]:.3f} to {point.accuracy_ci95[1]:.3f}]",
        f"{point.cost / scale:.4g} {unit} [{point.cost_ci95[0] / scale:.4g} to {point.cost_ci95[1] / scale:.4g}]",
        f"{STATUS_MARKS[point.status][0]}; on it in {100 * point.probability:.0f} % of the draws",
    ]
    if point.dominated_by is not None:
        lines.append(f"dominated by {point.dominated_by}")
    if point.not_better_than:
        more = len(point.not_better_than) - 1
        lines.append(f"not surely better than {point.not_better_than[0]}" + (f" and {more} more" if more else ""))
    return hover(point.key, *lines)


def coupling_plots(analysis: TaskAnalysis) -> list[Plot]:
    """Plots of the loss of the first cost's front with a knob held at a value; none where no knob varies."""
    rows = [row for each in present(analysis)[:1] for row in each.fixed if row.loss.share is not None]
    if not rows:
        return []
    of, task = present(analysis)[0].found.of, analysis.grid.task
    traces = []
    for knob in KNOBS:
        own = [row for row in rows if row.knob == knob]
        if not own:
            continue
        names = [f"{KNOB_NAMES[knob]} {row.value}" for row in own]
        fractions = [100 * (row.loss.share or 0.0) for row in own]
        trace = bars(names, fractions, [_loss_text(row, name) for row, name in zip(own, names, strict=True)],
                     KNOB_NAMES[knob], KNOB_COLOURS[knob], is_horizontal=False)  # fmt: skip
        trace["x"] = _grouped(knob, [row.value for row in own])
        trace["marker"]["opacity"] = [1.0 if row.loss.beyond_noise else 0.4 for row in own]
        ends = [row.loss.unseen_ci95 or row.loss.share_ci95 for row in own]
        intervals = [
            (100 * end[0], 100 * end[1]) if end else (share, share) for end, share in zip(ends, fractions, strict=True)
        ]
        trace["error_y"] = whiskers(fractions, intervals) | {"color": QUIET}
        traces.append(trace)
    return [
        Plot(
            f"e2-coupling-{task}",
            f"{task.replace('_', ' ')}: what holding one knob loses of the front",
            traces,
            layout(axis(**NAMES_IN_GROUPS), axis("lost area (%)")),
            "half", 430,
            f"Area under the front of accuracy and {of.label}. Pale: within noise (the bars are intervals on samples "
            "that the choice did not see).",
        )
    ]  # fmt: skip


def _grouped(knob: str, values: Sequence[str | int]) -> list[list[str]]:
    """Places on an axis of knobs and their values."""
    return [[KNOB_NAMES[knob]] * len(values), [plain(str(value)) for value in values]]


def _loss_text(row: FixedValue, name: str) -> str:
    lines = [f"loses {100 * (row.loss.share or 0.0):.1f} % of the joint front's area"]
    if row.loss.unseen_share is not None and row.loss.unseen_ci95 is not None:
        low, high = row.loss.unseen_ci95
        lines.append(f"{100 * row.loss.unseen_share:.1f} % on unseen samples [{100 * low:.1f} to {100 * high:.1f}]")
    lines += [
        "beyond noise" if row.loss.beyond_noise else "within noise",
        f"{row.num_on_joint_front} of its {row.num_settings} settings on the joint front",
    ]
    return hover(f"{name}, the others free", *lines)


def effect_plots(analysis: TaskAnalysis, with_accuracy: bool) -> list[Plot]:
    """Plots of which knobs explain the spread of each figure, and of what a knob's values change in each figure."""
    labels = {each.found.of.name: each.found for each in present(analysis)}
    names = [name for name in ("accuracy", *labels) if name in analysis.effects and (with_accuracy or name in labels)]
    shown = {name: analysis.effects[name] for name in names if analysis.effects[name].terms}
    if not shown:
        return []
    task = analysis.grid.task
    titles = {"accuracy": "accuracy"} | {name: found.of.label for name, found in labels.items()}
    plots = [_fractions_of_spread(task, {titles[name]: effects for name, effects in shown.items()})]
    for name, effects in shown.items():
        scale, unit = (1.0, "score") if name == "accuracy" else scale_of(labels[name])
        if effects.level_means and name != "flops":
            plots.append(_levels_plot(task, name, titles[name], effects, scale, unit))
    return plots


def _fractions_of_spread(task: str, shown: dict[str, Effects]) -> Plot:
    terms = list(dict.fromkeys(term.knobs for effects in shown.values() for term in effects.terms))
    colours = dict(zip((knobs for knobs in terms if len(knobs) > 1), TERM_COLOURS, strict=False))
    traces = []
    for knobs in terms:
        label = " × ".join(KNOB_NAMES[knob] for knob in knobs)
        own = [next((term for term in effects.terms if term.knobs == knobs), None) for effects in shown.values()]
        fractions = [None if term is None or term.share is None else 100 * term.share for term in own]
        texts = [_term_text(title, label, term) for title, term in zip(shown, own, strict=True)]
        inside = [f"{share:.0f} %" if share is not None and share >= 6 else "" for share in fractions]
        colour = KNOB_COLOURS[knobs[0]] if len(knobs) == 1 else colours.get(knobs, ORANGE)
        traces.append(bars(list(shown), fractions, texts, label, colour, is_horizontal=True, labels=inside))
    return Plot(
        f"e2-effects-{task}",
        f"{task.replace('_', ' ')}: which knob explains the spread over settings",
        traces,
        layout(
            axis("part of the variance over settings (%)", range=[0, 100.5]),
            axis(autorange="reversed", **NAMES),
            barmode="stack", bargap=0.35, margin={"l": 10, "r": 14, "t": 56, "b": 10},
        ),
        "half", 380,
        "Main effects and interactions (×). Point at a part to see whether it is beyond noise.",
    )  # fmt: skip


def _term_text(title: str, label: str, term: Term | None) -> str:
    if term is None or term.share is None:
        return hover(title, f"{label}: the grid does not tell")
    lines = [f"{label}: {100 * term.share:.1f} % of the variance"]
    if term.noise_share is not None:
        lines.append(f"noise alone would add {100 * term.noise_share:.1f} %")
    return hover(title, *lines, "beyond noise" if is_beyond_noise(term) else "within noise")


def _levels_plot(task: str, name: str, title: str, effects: Effects, scale: float, unit: str) -> Plot:
    traces = []
    for knob in KNOBS:
        own = [mean for mean in effects.level_means if mean.knob == knob]
        if not own:
            continue
        names = [f"{KNOB_NAMES[knob]} {mean.value}" for mean in own]
        changes = [mean.change / scale for mean in own]
        ends = [(mean.change_ci95[0] / scale, mean.change_ci95[1] / scale) for mean in own]
        texts = [
            hover(each, f"{change:+.4g} {unit} [{low:+.4g} to {high:+.4g}] against {names[0]}",
                  f"mean {mean.mean / scale:.4g} {unit} over the other knobs")
            for each, change, (low, high), mean in zip(names, changes, ends, own, strict=True)
        ]  # fmt: skip
        trace = dots([], changes, texts, KNOB_NAMES[knob], KNOB_COLOURS[knob], size=9)
        trace |= {"mode": "lines+markers", "x": _grouped(knob, [mean.value for mean in own]), "line": {"width": 2}}
        trace["error_y"] = whiskers(changes, ends) | {"color": KNOB_COLOURS[knob]}
        traces.append(trace)
    spread = float(np.max([abs(mean.change) for mean in effects.level_means])) / scale
    return Plot(
        f"e2-levels-{name}-{task}",
        f"{task.replace('_', ' ')}: what each value changes in {title}",
        traces,
        layout(axis(**NAMES_IN_GROUPS), axis(f"change ({unit})", zeroline=True)),
        "half", 380,
        f"Against the knob's smallest value, the other knobs averaged; at most {spread:.4g} {unit}.",
    )  # fmt: skip
