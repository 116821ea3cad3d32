"""The figures of E2 (knobs): fronts, couplings and effects."""

from collections.abc import Sequence
from math import ceil

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.analyses.charts.marks import thinned
from experiments.analyses.charts.style import BLUE, GREEN, INK, ORANGE, PURPLE, QUIET, VERMILION, new_figure, styled
from experiments.analyses.files import MOST_DRAWN, MOST_SETTINGS
from experiments.analyses.knobs.coupling import FixedValue, moving_knobs
from experiments.analyses.knobs.effects import NOT_SPLIT, Effects, LevelMean, Term, is_beyond_noise
from experiments.analyses.knobs.fronts import FrontPoint, on_front
from experiments.analyses.knobs.grid import KNOBS, KnobPoint
from experiments.analyses.knobs.objectives import LATENCY_MEAN, Cost, Objectives
from experiments.analyses.knobs.records import FrontAnalysis, TaskAnalysis, present

KNOB_NAMES = {"vision": "vision", "top_k": "top-k", "num_active_blocks": "blocks"}
KNOB_COLOURS = {"vision": BLUE, "top_k": ORANGE, "num_active_blocks": GREEN}
VALUE_COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE)
FAINT = "#C4C4C4"
# By status; the later ones are drawn over the earlier.
INKS = {"dominated": FAINT, "possible": QUIET, "within_noise": VERMILION, "established": BLUE}
# Names of a front's settings in a panel, and of a knob's values: more would be larger than the panel.
MOST_NAMES, MOST_VALUE_NAMES = 30, 12


def short_name(point: KnobPoint) -> str:
    """A setting's name in pictures, such as `high k8 b16`."""
    experts = "" if point.top_k is None else f" k{point.top_k}"
    return f"{point.vision}{experts} b{point.num_active_blocks}"


def scale_of(found: Objectives) -> tuple[float, str]:
    """The divisor of costs in pictures, and their unit then."""
    if found.of.unit != "FLOPs":
        return 1.0, found.of.unit
    return (1e12, "TFLOP") if float(found.cost.max()) >= 1e12 else (1e9, "GFLOP")


def draw_knobs(analyses: Sequence[TaskAnalysis], costs: Sequence[Cost], caption: str) -> dict[str, Figure]:
    """The figures: fronts for each cost, of all tasks; for each task one of coupling and one of effects."""
    figures = {}
    for of in costs:
        panels = [each for analysis in analyses for each in present(analysis) if each.found.of.name == of.name]
        if panels:
            figures[f"e2_front_{of.name}"] = draw_fronts(panels, caption)
    for analysis in analyses:
        found = present(analysis)
        if found and moving_knobs(found[0].found):
            task = analysis.grid.task
            shown = caption if len(analyses) == 1 else f"{task.replace('_', ' ')} of:  {caption}"
            if found[0].front.hypervolume.value > 0:
                figures[f"e2_coupling_{task}"] = draw_coupling(found[0], shown)
            figures[f"e2_effects_{task}"] = draw_effects(analysis, shown)
    return figures


def draw_fronts(panels: Sequence[FrontAnalysis], caption: str) -> Figure:
    """A figure with a panel for each task: the front's steps, its settings by name, what is sure and what is noise."""
    columns = min(len(panels), 2)
    rows = ceil(len(panels) / columns)
    with styled():
        figure = new_figure(1.0 + 5.4 * columns, 0.9 + 4.2 * rows, caption)
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes, each in zip(grid.flat, panels, strict=False):
            _front_panel(axes, each)
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_axis_off()
        figure.legend(handles=_front_key(), loc="outside upper left", ncols=2 * columns, fontsize=8.5)
        figure.canvas.draw()
        for axes, each in zip(grid.flat, panels, strict=False):
            _name_front(axes, each)
        return figure


def _front_key() -> list[Line2D]:
    def mark(colour: str, filled: bool, name: str) -> Line2D:
        face = colour if filled else "white"
        return Line2D([], [], marker="o", linestyle="", color=colour, markerfacecolor=face, markersize=6.5, label=name)

    return [
        mark(BLUE, True, "on the front, established"),
        mark(VERMILION, False, "on the front, but only within noise"),
        mark(QUIET, False, "off, could be on it"),
        mark(FAINT, True, "dominated"),
    ]


def _front_panel(axes: Axes, each: FrontAnalysis) -> None:
    found, front = each.found, each.front
    scale, unit = scale_of(found)
    _steps(axes, found, np.arange(len(found.points)), scale, color=BLUE, linewidth=1.6, alpha=0.55, zorder=2)
    off = [point for point in front.points if not point.on_front]
    drawn = list(front.points)
    if len(drawn) > MOST_SETTINGS:
        drawn = [*(off[at] for at in thinned(len(off), MOST_DRAWN)), *(p for p in drawn if p.on_front)]
    for status, ink in INKS.items():
        own = [point for point in drawn if point.status == status]
        x, y = np.array([point.cost / scale for point in own]), np.array([point.accuracy for point in own])
        on_it = status in ("established", "within_noise")
        if own and on_it:
            sides = np.array([point.cost_ci95 for point in own]).T / scale
            ends = np.array([point.accuracy_ci95 for point in own]).T
            away = [np.maximum([at - low, high - at], 0) for at, (low, high) in ((x, sides), (y, ends))]
            axes.errorbar(x, y, xerr=away[0], yerr=away[1], fmt="none", color=ink, alpha=0.35, linewidth=0.9, zorder=1)
        face = ink if status in ("established", "dominated") else "white"
        axes.plot(x, y, "o", color=ink, markerfacecolor=face, markersize=6.5 if on_it else 4,
                  markeredgewidth=1.4 if on_it else 0.9, zorder=4 if on_it else 3)  # fmt: skip
    axes.set_xlabel(f"{found.of.label} ({unit})")
    axes.set_ylabel("accuracy" if found.best == 1 else f"score (0 to {found.best:g})")
    on, sure = [
        sum(test) for test in ([p.on_front for p in front.points], [p.status == "established" for p in front.points])
    ]
    thin = "" if len(drawn) == len(front.points) else f"; {len(front.points) - len(drawn)} off it not drawn"
    axes.set_title(f"{found.task.replace('_', ' ')}: {sure} of {on} front settings are established{thin}")
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -0.02 * found.best), high + 0.12 * (high - low))
    axes.set_xlim(0, None)


def _steps(axes: Axes, found: Objectives, members: np.ndarray, scale: float, **style: object) -> tuple[float, float]:
    """Draw the front of some settings from its cheapest one to the panel's right end; returns its first corner."""
    cost, accuracy = found.cost[members], found.accuracy[members]
    own = np.flatnonzero(on_front(cost, accuracy))
    own = own[np.argsort(cost[own], kind="stable")]
    x, y = cost[own] / scale, accuracy[own]
    end = float(found.cost.max()) / scale * 1.04
    axes.step([*x, end], [*y, y[-1]], where="post", **style)  # type: ignore[arg-type]
    return float(x[0]), float(y[0])


def _name_front(axes: Axes, each: FrontAnalysis) -> None:
    """Write names to the upper left of their points, where no setting can be; moved up where they would touch."""
    scale, _ = scale_of(each.found)
    names = {point.key: short_name(point) for point in each.found.points}
    places: dict[tuple[float, float], list[FrontPoint]] = {}
    for point in each.front.points:
        if point.on_front:
            places.setdefault((point.accuracy, point.cost), []).append(point)
    corners = sorted(places)
    figure = axes.get_figure(root=True)
    assert figure is not None
    pixel = figure.dpi / 72
    line, last_top, last_right = 10.5 * pixel, -np.inf, -np.inf
    for accuracy, cost in (corners[at] for at in thinned(len(corners), MOST_NAMES)):
        point, *equal = places[accuracy, cost]
        name = names[point.key] + (f" and {len(equal)} equal" if equal else "")
        x, y = axes.transData.transform((cost / scale, accuracy))
        left = x - (8 + 4.8 * len(name)) * pixel
        lift = 3 * pixel
        if left < last_right and y + lift < last_top + line:
            lift = last_top + line - y
        last_top, last_right = y + lift, x
        axes.annotate(name, (cost / scale, accuracy), xytext=(-8, lift / pixel),
                      textcoords="offset points", ha="right", va="bottom", fontsize=7.5, color=INKS[point.status],
                      arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.7, "shrinkB": 3})  # fmt: skip


def draw_coupling(each: FrontAnalysis, caption: str) -> Figure:
    """Draw, for each knob, fronts with it held at each value, and below what that loses of the joint front."""
    knobs = list(dict.fromkeys(row.knob for row in each.fixed))
    with styled():
        figure = new_figure(0.8 + 3.7 * len(knobs), 6.2, caption)
        grid = figure.subplots(2, len(knobs), squeeze=False, sharey="row", height_ratios=(1.55, 1))
        for column, knob in enumerate(knobs):
            rows = [row for row in each.fixed if row.knob == knob]
            _fixed_fronts(grid[0, column], each.found, rows)
            _losses(grid[1, column], rows)
        grid[0, 0].set_ylabel("accuracy")
        grid[1, 0].set_ylabel("lost of the front's area (%)\nfilled: more than noise")
        for axes in grid[0]:
            axes.set_xlabel(f"{each.found.of.label} ({scale_of(each.found)[1]})")
            axes.set_xlim(0, None)
        return figure


def _fixed_fronts(axes: Axes, found: Objectives, rows: Sequence[FixedValue]) -> None:
    scale, _ = scale_of(found)
    _steps(axes, found, np.arange(len(found.points)), scale, color=FAINT, linewidth=6, zorder=1, solid_capstyle="butt")
    named = thinned(len(rows), MOST_VALUE_NAMES)
    for number, row in enumerate(rows):
        members = np.array([at for at, point in enumerate(found.points) if point.value(row.knob) == row.value])
        colour = VALUE_COLOURS[number % len(VALUE_COLOURS)]
        _steps(axes, found, members, scale, color=colour, linewidth=1.7, zorder=3,
               label=str(row.value) if number in named else None)  # fmt: skip
    losses = [100 * row.loss.share for row in rows if row.loss.share is not None]
    cost = f" costs {min(losses):.1f} to {max(losses):.1f} %" if losses else ""
    axes.set_title(f"Holding {KNOB_NAMES[rows[0].knob]}{cost}")
    handles, labels = axes.get_legend_handles_labels()
    handles.append(Line2D([], [], color=FAINT, linewidth=6))
    axes.legend(handles, [*labels, "all knobs free"], loc="lower right", fontsize=8.5, labelcolor=INK)


def _losses(axes: Axes, rows: Sequence[FixedValue]) -> None:
    # Side by side fewer fit than in a list.
    named = thinned(len(rows), MOST_VALUE_NAMES if len(rows) <= MOST_VALUE_NAMES else 4)
    for place, row in enumerate(rows):
        loss, colour = row.loss, VALUE_COLOURS[place % len(VALUE_COLOURS)]
        if loss.share is None or loss.share_ci95 is None:
            axes.text(place, 0, "no hypervolume", ha="center", color=QUIET, fontsize=8)
            continue
        low, high = loss.unseen_ci95 or loss.share_ci95
        axes.plot([place, place], [100 * low, 100 * high], color=colour, linewidth=2, alpha=0.5)
        axes.plot(place, 100 * loss.share, "o", color=colour, markersize=7,
                  markerfacecolor=colour if loss.beyond_noise else "white", markeredgewidth=1.4)  # fmt: skip
        if place in named:
            axes.annotate(f"{100 * loss.share:.1f} %", (place, 100 * loss.share), xytext=(7, 3),
                          textcoords="offset points", fontsize=8.5, color=INK)  # fmt: skip
    axes.axhline(0, color=QUIET, linewidth=0.9)
    axes.set_xticks(named, [str(rows[at].value) for at in named])
    axes.set_xlim(-0.5, len(rows) - 0.3)
    axes.set_xlabel(f"{KNOB_NAMES[rows[0].knob]} held at")
    axes.grid(visible=False, axis="x")


def draw_effects(analysis: TaskAnalysis, caption: str) -> Figure:
    """A figure with a row for each figure of merit: fractions of the spread by term, and changes by knob."""
    scales = {"accuracy": (100.0, "Accuracy", "points") if analysis.grid.best == 1 else (1.0, "Score", "score")}
    for each in analysis.fronts:
        # Of the two latencies the first one is enough in a picture.
        if isinstance(each, FrontAnalysis) and each.found.of.name != LATENCY_MEAN.name:
            divisor, unit = scale_of(each.found)
            label = each.found.of.label
            scales[each.found.of.name] = (1 / divisor, label[0].upper() + label[1:], unit)
    knobs = [knob for knob in KNOBS if any(knob in term.knobs for e in analysis.effects.values() for term in e.terms)]
    with styled():
        # A figure that is the same everywhere needs a line, no panels.
        heights = [2.4 if analysis.effects[name].terms else 0.5 for name in scales]
        figure = new_figure(4.6 + 2.1 * len(knobs), 0.7 + sum(heights), caption)
        shape = len(scales), 1 + len(knobs)
        ratios = [1.5, *[1] * len(knobs)]
        grid = figure.subplots(*shape, squeeze=False, width_ratios=ratios, height_ratios=heights)
        for row, (name, (scale, title, unit)) in zip(grid, scales.items(), strict=True):
            effects = analysis.effects[name]
            _fraction_bars(row[0], effects, title, drifts="latency" in name)
            for axes, knob in zip(row[1:], knobs, strict=True):
                shown = () if effects.reason else [mean for mean in effects.level_means if mean.knob == knob]
                _level_line(axes, shown, scale)
            _same_heights(row[1:])
            if len(knobs):
                row[1].set_ylabel(f"change ({unit})")
        for axes, knob in zip(grid[-1, 1:], knobs, strict=True):
            axes.set_xlabel(KNOB_NAMES[knob], color=KNOB_COLOURS[knob], fontweight="bold")
        return figure


def _fraction_bars(axes: Axes, effects: Effects, title: str, drifts: bool) -> None:
    terms = [term for term in effects.terms if term.share is not None]
    is_too_large = effects.reason is not None and effects.reason.startswith(NOT_SPLIT)
    axes.set_title(f"{title}: {effects.reason}" if is_too_large else _effects_title(title, terms))
    if not terms:
        axes.set_axis_off()
        return
    for place, term in enumerate(terms):
        share, sure = 100 * (term.share or 0.0), is_beyond_noise(term)
        is_rest = drifts and len(term.knobs) > 1 and place == len(terms) - 1
        colour = KNOB_COLOURS[term.knobs[0]] if len(term.knobs) == 1 else FAINT if is_rest else QUIET
        axes.barh(place, share, 0.68, color=colour if sure else "white", edgecolor=colour, linewidth=1.0)
        note = " and drift" if is_rest and sure else "" if sure else " noise"
        axes.text(share + 1.5, place, f"{share:.1f} %{note}", va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(terms)), [" × ".join(KNOB_NAMES[knob] for knob in term.knobs) for term in terms])
    axes.set_ylim(len(terms) - 0.4, -0.6)
    axes.set_xlim(0, 125)
    axes.set_xticks([0, 50, 100], ["0", "50", "100 %"])
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def _effects_title(title: str, terms: Sequence[Term]) -> str:
    sure = [term for term in terms if len(term.knobs) == 1 and is_beyond_noise(term)]
    if not terms:
        return f"{title}: the same at all settings"
    if not sure:
        return f"{title}: no main effect beyond noise"
    first = max(sure, key=lambda term: term.share or 0.0)
    return f"{title}: {KNOB_NAMES[first.knobs[0]]} is {100 * (first.share or 0.0):.0f} % of its spread"


def _level_line(axes: Axes, means: Sequence[LevelMean], scale: float) -> None:
    if not means:
        axes.set_axis_off()
        return
    places, colour = range(len(means)), KNOB_COLOURS[means[0].knob]
    changes = np.array([mean.change for mean in means]) * scale
    low, high = (np.array([mean.change_ci95[side] for mean in means]) * scale for side in (0, 1))
    axes.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(places, changes, "o-", color=colour, markersize=4.5)
    axes.set_xticks(places, [str(mean.value) for mean in means])
    axes.set_xlim(-0.3, len(means) - 0.4)
    axes.axhline(0, color=QUIET, linewidth=0.8)
    last = changes[-1]
    axes.annotate(f"{last:+,.0f}" if abs(last) >= 100 else f"{last:+.2g}", (len(means) - 1, last), xytext=(0, 7),
                  textcoords="offset points", ha="center", fontsize=8, color=INK)  # fmt: skip


def _same_heights(panels: Sequence[Axes]) -> None:
    shown = [axes for axes in panels if axes.axison]
    if shown:
        ends = [axes.get_ylim() for axes in shown]
        low, high = min(end[0] for end in ends), max(end[1] for end in ends)
        for axes in shown:
            axes.set_ylim(low, high + 0.12 * (high - low))
