"""The charts of E2 (knobs): fronts, couplings and effects."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from experiment_core_utils.knobs.placebo import PLACEBO
from experiment_core_utils.knobs.variant import reference_meaning
from experiment_core_utils.primitives.contrasts import ACCURACY_MARGIN
from experiment_core_utils.primitives.texts import counted, first_of
from experiments.analyses.charts.chart import (
    Axis,
    Band,
    Bars,
    Chart,
    Dots,
    Line,
    Mark,
    Panel,
    Rule,
    Symbol,
    flop_unit,
    thinned,
)
from experiments.analyses.charts.style import (
    BLUE,
    GREEN,
    INDIGO,
    INK,
    OLIVE,
    ORANGE,
    PURPLE,
    QUIET,
    SKY,
    VERMILION,
    WINE,
    YELLOW,
)
from experiments.analyses.knobs.coupling import FixedValue
from experiments.analyses.knobs.effects import Effects, LevelMean, Term, is_beyond_noise
from experiments.analyses.knobs.fronts import FrontPoint, Status, on_front
from experiments.analyses.knobs.grid import SWEEP, KnobPoint, knob_names, knob_title, levels_of
from experiments.analyses.knobs.objectives import MEMORY, Cost, Objectives
from experiments.analyses.knobs.records import FrontAnalysis, TaskAnalysis, present
from experiments.analyses.limits import MOST_DRAWN, MOST_SETTINGS

# Of knobs in the order of `all_knobs`, from the first again where there are more; PURPLE is the sweep's.
# Of the three knobs that most runs turn, which no other has, and of the others in turn.
KNOB_COLOURS = {"vision": BLUE, "top_k": ORANGE, "num_active_blocks": GREEN}
FURTHER_COLOURS = (SKY, YELLOW, VERMILION, WINE, OLIVE, INDIGO)
VALUE_COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE)
FAINT = "#C4C4C4"
# Of the fronts of several sweeps; apart from those of STATUS_MARKS.
SWEEP_COLOURS = (ORANGE, GREEN, PURPLE, SKY)

# By status; the later ones are drawn over the earlier.
STATUS_MARKS: dict[Status, tuple[str, str, Symbol, int]] = {
    "dominated": ("front: no", FAINT, "circle", 6),
    "possible": ("front: can't tell, off by figures", QUIET, "ring", 7),
    "within_noise": ("front: likely or can't tell, on by figures", VERMILION, "ring", 10),
    "established": ("front: yes", BLUE, "circle", 10),
}

INTERACTION_COLOURS = (SKY, YELLOW, PURPLE, VERMILION)
# Names of a front's settings in a panel, and of a knob's values: more would be larger than the panel.
MOST_NAMES, MOST_VALUE_NAMES = 30, 12
MOST_LETTERS_SIDE_BY_SIDE = 4


def knob_study_charts(
    analyses: Sequence[TaskAnalysis], invalid: Mapping[str, str] = MappingProxyType({})
) -> list[Chart]:
    """The fronts of each cost with a panel for each task, and each task's charts where a knob varies.

    Args:
        invalid: as of `fronts_chart`.
    """
    several = [each for each in analyses if len(each.grid.points) > 1]
    fronts: dict[Cost, list[FrontAnalysis]] = {}
    for each in (each for analysis in several for each in present(analysis)):
        fronts.setdefault(each.found.of, []).append(each)
    return [*(fronts_chart(own, invalid) for own in fronts.values()), *knob_charts(analyses)]


def knob_charts(analyses: Sequence[TaskAnalysis], with_accuracy: bool = True) -> list[Chart]:
    """`knob_study_charts` without the fronts: what holding a knob loses, and what the knobs do to each figure."""
    charts = []
    for analysis in (each for each in analyses if len(each.grid.points) > 1):
        found = present(analysis)
        if with_accuracy and found and found[0].fixed and found[0].found.of_grid.accuracy.any():
            charts.append(coupling_chart(found[0]))
        charts += effects_charts(analysis, with_accuracy)
    return charts


def knob_colour(name: str) -> str:
    """The colour of one of `knob_names`."""
    if name == SWEEP or name in KNOB_COLOURS:
        return KNOB_COLOURS.get(name, PURPLE)
    # A placebo is in no picture, and takes no knob's colour away.
    further = [knob for knob in knob_names() if knob not in KNOB_COLOURS and knob != PLACEBO.name]
    return FURTHER_COLOURS[further.index(name) % len(FURTHER_COLOURS)]


def short_name(point: KnobPoint) -> str:
    """A setting's name in pictures, which is its key, with the word `reference` where it is that."""
    return f"{point.key}, reference" if point.is_reference else point.key


def _scale(found: Objectives) -> tuple[float, str]:
    """The divisor of costs in pictures, and the resulting unit."""
    most = float(found.cost.max())
    if found.of.unit == "bytes":
        return (1e9, "GB") if most >= 1e9 else (1e6, "MB")
    return flop_unit(most) if found.of.unit == "FLOPs" else (1.0, found.of.unit)


def _axis_of_scores(name: str, best: float, shown: Sequence[float] | np.ndarray) -> Axis:
    """The axis of what is shown, to a little above the best score, so that marks there are whole."""
    low, high = float(np.min(shown)), float(np.max(shown))
    room = max(0.12 * (high - low), 0.02 * best)
    limits = max(low - room, -0.02 * best), min(high + room, 1.05 * best)
    return Axis(name if best == 1 else f"{name} (0 to {best:g})", limits)


def fronts_chart(fronts: Sequence[FrontAnalysis], invalid: Mapping[str, str] = MappingProxyType({})) -> Chart:
    """A panel for each task of one cost: the front's steps, its settings by name, what is sure and what is noise.

    Args:
        invalid: task -> why its run is INVALID; its settings are drawn alike then, without verdicts.
    """
    panels = [_front_panel(front, invalid.get(front.found.task, "")) for front in fronts]
    return Chart(f"e2_front_{fronts[0].found.of.name}", panels, 2, (6.2, 4.4))


def _front_panel(each: FrontAnalysis, invalid: str) -> Panel:
    found, front = each.found, each.front
    scale, unit = _scale(found)
    drawn, labels = _drawn(front.points), _labels(each)
    by_status = [[point for point in drawn if point.status == status] for status in STATUS_MARKS]
    dots = [_status_dots(own, labels, found) for own in by_status if own]
    on_it = [point for point in front.points if point.on_front]
    sure = sum(point.status == "established" for point in on_it)
    left_out = len(front.points) - len(drawn)
    thin = f" {left_out} off the front are not drawn." if left_out else ""
    heights = [end for point in front.points for end in (point.accuracy_ci95 if point.on_front else (point.accuracy,))]
    verdict, bars = f"{sure} of {len(on_it)} front settings are surely on it", " Bars are 95 % intervals."
    if invalid:
        verdict, bars = "no verdicts, since the run is INVALID", f" {invalid}."
    elif found.have_waited:
        verdict, bars = "no verdicts, since requests waited for each other", f" {str(found.no_verdict).capitalize()}."
    if invalid or found.have_waited:
        costs, scores = [point.cost / scale for point in drawn], [point.accuracy for point in drawn]
        texts, names = [_figure_text(point, found) for point in drawn], [labels.get(point.key, "") for point in drawn]
        dots = [Dots(costs, scores, QUIET, "setting", texts, names)]
    return Panel(
        f"{found.task.replace('_', ' ')}: {verdict}",
        Axis(f"{found.of.label} ({unit})", (0, 1.04 * float(found.cost.max()) / scale)),
        _axis_of_scores(found.score_name, found.best, heights),
        [
            _steps(found, np.arange(len(found.points)), BLUE, None, 1.8, 0.55),
            *_sweep_steps(found),
            *dots,
            *_reference_mark(each, scale),
        ],
        f"{counted(len(front.points), 'setting')}, {counted(found.num_score_samples, 'sample')} with a score, "
        f"{found.num_cost_samples} with the cost.{bars}{thin}",
        height_px=430,
    )


def _reference_mark(each: FrontAnalysis, scale: float) -> list[Dots]:
    """A mark around each setting that is the model as it is, with its name where the front does not name it."""
    names = {point.key: short_name(point) for point in each.found.points if point.is_reference}
    own = [point for point in each.front.points if point.key in names]
    costs, heights = [point.cost / scale for point in own], [point.accuracy for point in own]
    # Of several sweeps they would lie on each other.
    labels = ["" if point.on_front or len(own) > 1 else names[point.key] for point in own]
    name = "reference"
    texts = [(point.key, f"reference: {reference_meaning(point.key)}") for point in own]
    return [Dots(costs, heights, INK, name, texts, labels, "open diamond", 13)] if own else []


def _sweep_steps(found: Objectives) -> list[Line]:
    """The front of each sweep alone, where there are several."""
    labels = levels_of(found.points, SWEEP)
    if len(labels) < 2:
        return []
    members = [np.flatnonzero([point.value(SWEEP) == label for point in found.points]) for label in labels]
    return [
        _steps(found, own, SWEEP_COLOURS[at % len(SWEEP_COLOURS)], f"front of {labels[at]} alone", 1.5)
        for at, own in enumerate(members)
    ]


def _drawn(points: Sequence[FrontPoint]) -> list[FrontPoint]:
    """All settings; of very many those on the front, over some of the others."""
    if len(points) <= MOST_SETTINGS:
        return list(points)
    off = [point for point in points if not point.on_front]
    return [*(off[at] for at in thinned(len(off), MOST_DRAWN)), *(point for point in points if point.on_front)]


def _status_dots(points: Sequence[FrontPoint], labels: Mapping[str, str], found: Objectives) -> Dots:
    """Settings of one status; names and intervals of those on the front by the figures alone."""
    name, colour, symbol, size = STATUS_MARKS[points[0].status]
    scale, _ = _scale(found)
    on_it = points if any(point.on_front for point in points) else ()
    costs = [(point.on_front and point.cost_ci95) or (point.cost, point.cost) for point in on_it]
    return Dots(
        [point.cost / scale for point in points], [point.accuracy for point in points], colour, name,
        [_point_text(point, found) for point in points],
        [labels.get(point.key, "") for point in on_it],
        symbol, size,
        x_intervals=[(low / scale, high / scale) for low, high in costs],
        y_intervals=[point.accuracy_ci95 if point.on_front else (point.accuracy, point.accuracy) for point in on_it],
    )  # fmt: skip


def _labels(each: FrontAnalysis) -> dict[str, str]:
    """The names of at most MOST_NAMES front settings; settings at one place have one."""
    names = {point.key: short_name(point) for point in each.found.points}
    places: dict[tuple[float, float], list[FrontPoint]] = {}
    for point in each.front.points:
        if point.on_front:
            places.setdefault((point.accuracy, point.cost), []).append(point)
    corners = sorted(places)
    labels = {}
    for at in thinned(len(corners), MOST_NAMES):
        first, *equal = places[corners[at]]
        labels[first.key] = names[first.key] + (f" and {len(equal)} equal" if equal else "")
    return labels


def _figure_text(point: FrontPoint, found: Objectives) -> tuple[str, ...]:
    scale, unit = _scale(found)
    cost_ends = " to ".join(f"{end / scale:.4g}" for end in point.cost_ci95 or ())
    return (
        point.key,
        f"{found.score_name} {point.accuracy:.3f} [{point.accuracy_ci95[0]:.3f} to {point.accuracy_ci95[1]:.3f}]",
        f"{point.cost / scale:.4g} {unit} [{cost_ends or 'no interval'}]",
    )


def _point_text(point: FrontPoint, found: Objectives) -> tuple[str, ...]:
    lines = [f"front: {point.word}"]
    if point.surely_dominated_by is not None:
        lines.append(f"surely cheaper and not worse by {ACCURACY_MARGIN * found.best:g}: {point.surely_dominated_by}")
    elif point.dominated_by is not None:
        lines.append(f"by the figures dominated by {point.dominated_by}")
    if point.not_better_than:
        lines.append(f"not surely better than {first_of(point.not_better_than, 1)}")
    return (*_figure_text(point, found), *lines)


def _steps(
    found: Objectives, members: np.ndarray, colour: str, name: str | None, width: float, opacity: float = 1.0
) -> Line:
    """The front of some settings from its cheapest one to the dearest cost of all."""
    scale, _ = _scale(found)
    cost, accuracy = found.cost[members], found.accuracy[members]
    own = np.flatnonzero(on_front(cost, accuracy))
    own = own[np.argsort(cost[own], kind="stable")]
    x, y = [*cost[own] / scale, 1.04 * float(found.cost.max()) / scale], [*accuracy[own], accuracy[own][-1]]
    return Line(x, y, colour, name, width=width, is_step=True, opacity=opacity)


def coupling_chart(each: FrontAnalysis) -> Chart:
    """For each knob, fronts with it held at each value, and below what that loses of the joint front."""
    knobs = list(dict.fromkeys(row.knob for row in each.fixed))
    rows = [[row for row in each.fixed if row.knob == knob] for knob in knobs]
    inside = each.found.of_grid
    panels = [*(_held_panel(inside, own) for own in rows), *(_loss_panel(inside, own) for own in rows)]
    return Chart(f"e2_coupling_{each.found.task}", panels, len(knobs), (3.9, 3.1))


def _held_panel(found: Objectives, rows: Sequence[FixedValue]) -> Panel:
    _, unit = _scale(found)
    named = thinned(len(rows), MOST_VALUE_NAMES)
    marks: list[Mark] = [_steps(found, np.arange(len(found.points)), FAINT, "all knobs free", 6)]
    for number, row in enumerate(rows):
        members = np.array([at for at, point in enumerate(found.points) if point.value(row.knob) == row.value])
        name = f"{knob_title(row.knob)} {row.value}" if number in named else None
        marks.append(_steps(found, members, VALUE_COLOURS[number % len(VALUE_COLOURS)], name, 1.7))
    title = f"{found.task.replace('_', ' ')}: {knob_title(rows[0].knob)} held"
    cost = Axis(f"{found.of.label} ({unit})", from_zero=True)
    scores = _axis_of_scores(found.score_name, found.best, found.accuracy)
    return Panel(title, cost, scores, marks, width="third", height_px=330)


def _loss_panel(found: Objectives, rows: Sequence[FixedValue]) -> Panel:
    knob = knob_title(rows[0].knob)
    losses = {at: 100 * row.loss.share for at, row in enumerate(rows) if row.loss.share is not None}
    # Side by side fewer names fit than in a list.
    named = thinned(len(rows), MOST_VALUE_NAMES if len(rows) <= MOST_VALUE_NAMES else 4)
    lost = f"costs {min(losses.values()):.1f} to {max(losses.values()):.1f} %" if losses else ""
    return Panel(
        f"Holding {knob} {lost}" if lost else f"Holding {knob}: no hypervolume",
        Axis(f"{knob} held at", (-0.6, len(rows) - 0.4), {at: str(rows[at].value) for at in named}),
        Axis("lost of the front's area (%)"),
        [
            *(_loss_dots(rows, losses, is_beyond, named) for is_beyond in (True, False)),
            Rule(0, False, QUIET, dash="solid"),
        ],
        f"Of the area under the front of {found.score_name} and {found.of.label}. Whiskers are intervals on samples "
        "that the choice did not see.",
        "third",
        300,
    )


def _loss_dots(rows: Sequence[FixedValue], losses: Mapping[int, float], is_beyond: bool, named: Sequence[int]) -> Dots:
    """The losses in percent of the values that are beyond noise, or of those within it, by place."""
    own = {at: rows[at] for at in losses if rows[at].loss.beyond_noise == is_beyond}
    name = "more than noise" if is_beyond else "within noise"
    ends = {at: row.loss.unseen_ci95 or row.loss.share_ci95 for at, row in own.items()}
    return Dots(
        list(own), [losses[at] for at in own], knob_colour(rows[0].knob), name if own else None,
        [_loss_text(row) for row in own.values()],
        [f"{losses[at]:.1f} %" if at in named else "" for at in own],
        "circle" if is_beyond else "ring",
        9,
        y_intervals=[(100 * end[0], 100 * end[1]) if end else (losses[at], losses[at]) for at, end in ends.items()],
    )  # fmt: skip


def _loss_text(row: FixedValue) -> tuple[str, ...]:
    lines = [f"loses {100 * (row.loss.share or 0.0):.1f} % of the joint front's area"]
    if row.loss.unseen_share is not None and row.loss.unseen_ci95 is not None:
        low, high = row.loss.unseen_ci95
        lines.append(f"{100 * row.loss.unseen_share:.1f} % on unseen samples [{100 * low:.1f} to {100 * high:.1f}]")
    lines += [
        "beyond noise" if row.loss.beyond_noise else "within noise",
        f"{row.num_on_joint_front} of its {counted(row.num_settings, 'setting')} on the joint front",
    ]
    return (f"{knob_title(row.knob)} {row.value}, the others free", *lines)


def effects_charts(analysis: TaskAnalysis, with_accuracy: bool = True) -> list[Chart]:
    """A chart of two panels for accuracy and for each cost: fractions of the spread by term, and the change that each
    value of a knob makes; none where no knob varies.
    """
    name = analysis.grid.score_name
    scales = {"accuracy": (0.01, name, "points") if analysis.grid.best == 1 else (1.0, name, "score")}
    latencies = [each.found.of.name for each in present(analysis) if each.found.of.unit == "ms"]
    for each in present(analysis):
        # Of two latencies the first one is enough in a picture; memory is a formula of the knobs.
        if each.found.of.name not in latencies[1:] and each.found.of != MEMORY:
            divisor, unit = _scale(each.found)
            scales[each.found.of.name] = divisor, each.found.of.label, unit
    if not with_accuracy:
        del scales["accuracy"]
    panels = []
    for name, (divisor, title, unit) in scales.items():
        effects = analysis.effects.get(name)
        if effects is not None and (effects.terms or effects.is_too_large):
            panels.append(_spread_panel(effects, title))
            panels.append(_change_panel(effects, title, divisor, unit))
    return [Chart(f"e2_effects_{analysis.grid.task}", panels, 2, (6.0, 2.9))] if panels else []


def _spread_panel(effects: Effects, title: str) -> Panel:
    """Bars of each term's fraction of the spread over settings; pale where it is not beyond noise."""
    terms = [term for term in effects.terms if term.share is not None]
    marks: list[Mark] = []
    for place, term in enumerate(terms):
        interaction = INTERACTION_COLOURS[place % len(INTERACTION_COLOURS)]
        colour = knob_colour(term.knobs[0]) if len(term.knobs) == 1 else interaction
        lines = [f"{_term_name(term)}: {100 * (term.share or 0.0):.1f} % of the variance"]
        if term.noise_share is not None:
            lines.append(f"noise alone would add {100 * term.noise_share:.1f} %")
        text = (title, *lines, "beyond noise" if is_beyond_noise(term) else "within noise")
        marks.append(Bars([place], [100 * (term.share or 0.0)], colour, None, [text], pale=[not is_beyond_noise(term)]))
    ticks = {
        place: f"{_term_name(term)} {100 * (term.share or 0.0):.1f} %"
        + ("" if is_beyond_noise(term) else " (can't tell)")
        for place, term in enumerate(terms)
    }
    return Panel(
        f"{title[0].upper()}{title[1:]}: {_spread_title(effects, terms)}",
        Axis("fraction of the variance over settings (%)", (0, 100)),
        Axis(ticks=ticks, limits=(-0.6, max(len(terms), 1) - 0.4), is_reversed=True),
        marks,
        "Main effects and interactions (×). Pale: can't tell from noise.",
        height_px=330,
    )


def _spread_title(effects: Effects, terms: Sequence[Term]) -> str:
    if effects.reason is not None and effects.is_too_large:
        return effects.reason
    sure = [term for term in terms if len(term.knobs) == 1 and is_beyond_noise(term)]
    if not terms:
        return "the same at all settings"
    if not sure:
        return "no knob surely changes it"
    first = max(sure, key=lambda term: term.share or 0.0)
    return f"{knob_title(first.knobs[0])} is {100 * (first.share or 0.0):.0f} % of its spread"


def _term_name(term: Term) -> str:
    return " × ".join(knob_title(knob) for knob in term.knobs)


def _change_panel(effects: Effects, title: str, divisor: float, unit: str) -> Panel:
    """The change against each knob's smallest value, the other knobs averaged; knobs side by side."""
    marks: list[Mark] = []
    ticks: dict[float, str] = {}
    means = () if effects.reason else effects.level_means
    for knob in knob_names():
        own = [mean for mean in means if mean.knob == knob]
        if not own:
            continue
        places = [len(ticks) + at for at in range(len(own))]
        # Of long labels every second one is a line lower.
        lower = "\n" if max(len(str(mean.value)) for mean in own) > MOST_LETTERS_SIDE_BY_SIDE else ""
        ticks |= {place: lower * (at % 2) + str(own[at].value) for at, place in enumerate(places)}
        low, high = ([mean.change_ci95[side] / divisor for mean in own] for side in (0, 1))
        texts = [_change_text(title, own[0], mean, divisor, unit) for mean in own]
        changes = [mean.change / divisor for mean in own]
        marks.append(Band(places, low, high, knob_colour(knob)))
        marks.append(Line(places, changes, knob_colour(knob), knob_title(knob), texts, symbol="circle"))
    if len(ticks) > MOST_VALUE_NAMES:
        kept = thinned(len(ticks), 6)
        ticks = {place: text for place, text in ticks.items() if place in kept}
    most = max((abs(mean.change) / divisor for mean in means), default=0.0)
    return Panel(
        f"Change in {title}",
        Axis("value of the knob", ticks=ticks),
        Axis(f"change ({unit})"),
        [*marks, Rule(0, False, QUIET, dash="solid")],
        f"Against the knob's smallest value, the other knobs averaged; at most {most:.4g} {unit}.",
        height_px=330,
    )


def _change_text(title: str, first: LevelMean, mean: LevelMean, divisor: float, unit: str) -> tuple[str, ...]:
    low, high = (end / divisor for end in mean.change_ci95)
    name = knob_title(mean.knob)
    return (
        f"{title}: {name} {mean.value}",
        f"{mean.change / divisor:+.4g} {unit} [{low:+.4g} to {high:+.4g}] against {name} {first.value}",
        f"mean {mean.mean / divisor:.4g} {unit} over the other knobs",
    )
