"""The charts of E1 (stages): fractions, settings, growth, operations and parts of the decoder."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import numpy as np

from experiment_core_utils.knobs.registry import knob_named
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.primitives.units import time_text
from experiment_core_utils.records.stages import STAGES
from experiments.analyses.charts.chart import (
    Axis,
    Band,
    Chart,
    Dots,
    Line,
    Mark,
    Note,
    Panel,
    Symbol,
    flop_unit,
    stacked_bars,
    thinned,
)
from experiments.analyses.charts.style import (
    BLUE,
    GREEN,
    LIGHT_GREY,
    ORANGE,
    PURPLE,
    QUIET,
    SKY,
    STAGE_COLOURS,
    VERMILION,
)
from experiments.analyses.limits import MOST_PANELS
from experiments.analyses.stages.analysis import NO_PICTURE, StageAnalysis
from experiments.analyses.stages.fractions import Generation, Regime, grouped, summed_stages
from experiments.analyses.stages.operations import StagePoint
from experiments.analyses.stages.profiles import PARTS, ProfiledRequest
from experiments.analyses.stages.scaling import Point, StageLine, points_of

# Parts in the order in which a block runs them; the small ones together are quiet.
PART_COLOURS = {"attention": BLUE, "routing": PURPLE, "experts": VERMILION, "ffn_other": ORANGE, "norm": SKY,
                "head": GREEN, "other": LIGHT_GREY}  # fmt: skip
PART_NAMES = {"ffn_other": "rest of FFN", "norm": "norms"}

# Title, axis, and the step that slopes are given for with its name.
SCALING = {
    "vision": ("Vision against image features", "image features of all crops", 100, "100 features"),
    "prefill": ("Prefill against the prompt", "prompt tokens, image tokens included", 100, "100 tokens"),
    "decode": ("Decode against the answer", "output tokens", 1, "token"),
}

SYMBOLS: dict[str, Symbol] = {"vision": "circle", "prefill": "square", "decode": "triangle"}
# Bars with a name beside them: more names would be larger than their bars.
MOST_NAMES = 90
MFU_LINES = (1.0, 0.1, 0.01, 0.001, 0.0001)


def stage_charts(found: StageAnalysis, peak_flops_per_s: float | None) -> list[Chart]:
    """All charts of E1; operations and parts of the decoder only where they are known."""
    charts = [
        fractions_chart(found.by_regime),
        settings_chart(found.by_setting, found.references),
        stages_over_tokens_chart(found.generations),
        scaling_chart(found.generations, found.lines),
    ]
    if found.points:
        charts.append(operations_chart(found.points, peak_flops_per_s))
    if found.profiles:
        charts.append(decoder_parts_chart(found.profiles))
    return charts


def fractions_chart(regimes: Sequence[Regime]) -> Chart:
    """A stacked bar for each task, vision knob and output length, longest answers last."""
    groups, footnote = some_groups(map(_group, regimes))
    regimes = [regime for regime in regimes if _group(regime) in groups]
    has_tasks = len({each.task for each in regimes}) > 1
    has_pictures = {each.vision for each in regimes} != {NO_PICTURE}
    names = [" · ".join([each.task] * has_tasks + [each.vision] * has_pictures + [_tokens(each)]) for each in regimes]
    parts = {stage: [100 * each.stages[stage].share for each in regimes] for stage in STAGES}
    x = Axis("fraction of the time of a request (%)", limits=(0, 100))
    note = "Each bar's name ends with the mean total. All values of the other knobs are pooled."
    title = f"Where the time of a request goes, by {'vision knob and ' if has_pictures else ''}answer length"
    return Chart("e1_stage_shares", [_stage_bars(title, x, names, regimes, parts, note)],
                 panel_size_in=(8.2, 1.2 + 0.3 * len(regimes)), footnote=footnote)  # fmt: skip


def _stage_bars(
    title: str,
    x: Axis,
    names: Sequence[str],
    regimes: Sequence[Regime],
    parts: Mapping[str, Sequence[float]],
    note: str,
) -> Panel:
    """A bar of the stages' `parts` for each regime, named on the axis; of very many evenly spread ones are.

    A stage that takes no time anywhere is left out.
    """
    stages = [stage for stage, own in parts.items() if any(own)]
    texts = [[_regime_text(*named, stage) for named in zip(names, regimes, strict=True)] for stage in stages]
    ticks = {
        place: f"{names[place]} · {time_text(regimes[place].total_ms)}" for place in thinned(len(names), MOST_NAMES)
    }
    y = Axis(ticks=ticks, is_reversed=True, limits=(-0.6, len(names) - 0.4))
    bars = stacked_bars(
        stages,
        [parts[stage] for stage in stages],
        [STAGE_COLOURS[stage] for stage in stages],
        texts,
        are_percentages=x.limits is not None,
    )
    return Panel(title, x, y, bars, note, height_px=max(360, 110 + 24 * len(ticks)))


def _group(regime: Regime) -> tuple[str, str]:
    return regime.task, regime.vision


def _tokens(regime: Regime) -> str:
    if regime.output_tokens is None:
        return "own length"
    return f"{regime.output_tokens} token{'s' if regime.output_tokens > 1 else ''}"


def some_groups(groups: Iterable[tuple[str, str]]) -> tuple[list[tuple[str, str]], str]:
    """Each task and vision knob once, at most MOST_PANELS of them, and a footnote on those left out."""
    every = list(dict.fromkeys(groups))
    kept = [every[at] for at in thinned(len(every), MOST_PANELS)]
    return kept, "" if len(kept) == len(every) else f"{len(kept)} of {len(every)} values of vision drawn"


def _regime_text(name: str, regime: Regime, stage: str) -> tuple[str, ...]:
    share = regime.stages[stage]
    interval = "" if share.share_ci95 is None else " [{:.1f} to {:.1f}]".format(*(100 * e for e in share.share_ci95))
    return (
        name,
        f"{stage}: {time_text(share.mean_ms)}, {100 * share.share:.1f} %{interval}",
        f"total {time_text(regime.total_ms)}, mean of {counted(regime.n, 'generation')}",
    )


def settings_chart(settings: Sequence[Regime], references: Mapping[str, str]) -> Chart:
    """A stacked bar in ms for each setting, fastest first; the reference of each task has its name marked."""
    ordered = sorted(settings, key=lambda each: each.total_ms)
    has_tasks = len({setting.task for setting in settings}) > 1
    names = [
        (f"{each.task} " if has_tasks else "")
        + f"{each.setting}{', reference' if each.setting == references.get(each.task) else ''}"
        for each in ordered
    ]
    parts = {stage: [each.stages[stage].mean_ms for each in ordered] for stage in STAGES}
    x, note = Axis("time (ms)", from_zero=True), "Each generation counts with its own length."
    panel = _stage_bars("Mean time of a request at each setting, fastest first", x, names, ordered, parts, note)
    left_out = len(ordered) - len(panel.y.ticks or ())
    footnote = f"{left_out} of {len(ordered)} settings are drawn without their names" if left_out else ""
    height_in = 1.2 + 0.22 * len(panel.y.ticks or ())
    return Chart("e1_settings", [panel], panel_size_in=(8.2, height_in), footnote=footnote)


def stages_over_tokens_chart(generations: Sequence[Generation]) -> Chart:
    """Areas of the stages' fractions over output length, a panel for each vision knob, and where decode is half."""
    by_group = grouped(generations, lambda each: (each.task, each.vision))
    groups, footnote = some_groups(by_group)
    has_tasks = len({task for task, _ in groups}) > 1
    panels = []
    for task, vision in groups:
        sums = summed_stages(by_group[task, vision])
        ends = 100 * np.cumsum(sums, axis=1) / sums.sum(axis=1, keepdims=True)
        starts = np.column_stack([np.zeros(len(ends)), ends[:, :-1]])
        # An answer of one token has no width otherwise.
        lengths = range(1, len(sums) + 1) if len(sums) > 1 else (0.5, 1.5)
        rows = np.arange(len(sums)) if len(sums) > 1 else np.zeros(2, int)
        marks: list[Mark] = [
            Band(lengths, starts[rows, at], ends[rows, at], STAGE_COLOURS[stage], stage, opacity=1.0)
            for at, stage in enumerate(STAGES)
            if sums[:, at].any()
        ]
        half = next((n for n, row in enumerate(starts, start=1) if 100 - row[2] >= 50), None)
        panels.append(
            Panel(
                ", ".join([f"vision {vision}"] * (vision != NO_PICTURE) + [task] * (has_tasks or vision == NO_PICTURE)),
                Axis("output tokens", limits=(lengths[0], lengths[-1])),
                Axis("fraction of the time (%)", limits=(0, 100)),
                marks,
                "" if half is None else f"From {half} tokens on decode is at least half.",
                "third",
                320,
            )
        )
    return Chart("e1_stages_over_tokens", panels, min(len(panels), 4), (3.1, 3.0), footnote)


def scaling_chart(generations: Sequence[Generation], lines: Sequence[StageLine]) -> Chart:
    """Each stage's times of the first task over what drives it, with lines of the least and the most of the first of
    `line_knobs`; all values of the others together.
    """
    task = generations[0].task
    own = [each for each in generations if each.task == task]
    has_tasks = len({each.task for each in generations}) > 1
    panels = []
    for stage, (title, *_) in SCALING.items():
        fits = [line for line in lines if (line.task, line.stage) == (task, stage) and len(line.levels) <= 1]
        points = points_of(own, stage)
        if points:
            panels.append(_scaling_panel(f"{title} ({task})" if has_tasks else title, stage, points, fits))
    return Chart("e1_scaling", panels, 3, (3.8, 3.6), "lines: least squares")


def _scaling_panel(title: str, stage: str, points: Sequence[Point], fits: Sequence[StageLine]) -> Panel:
    every, *by_level = fits
    groups = [(every, points, BLUE, "all settings")]
    if by_level:
        # Of a single level the colour of the most.
        ends = [(by_level[0], VERMILION), (by_level[-1], BLUE)][-min(len(by_level), 2) :]
        groups = [
            (fit, [each for each in points if fit.levels.items() <= each.generation.levels.items()], colour, _held(fit))
            for fit, colour in ends
        ]
    x = [point.x for point in points]
    steps = range(int(min(x)), int(max(x)) + 1)
    return Panel(
        title,
        Axis(SCALING[stage][1], ticks={step: str(step) for step in steps} if len(steps) <= 9 else None),
        Axis("time (ms)", limits=(0, 1.05 * float(np.percentile([each.ms for each in points], 99.5)))),
        [mark for group in groups for mark in _with_line(stage, *group)],
        "; ".join(_law(stage, fit, name) for fit, _, _, name in groups) + ".",
        "third",
        340,
    )


def _held(fit: StageLine) -> str:
    return ", ".join(f"{level} {knob_named(name).title}" for name, level in fit.levels.items())


def _with_line(stage: str, fit: StageLine, points: Sequence[Point], colour: str, name: str) -> list[Mark]:
    shown = [points[at] for at in thinned(len(points), 900)]
    unit = SCALING[stage][1].partition(",")[0]
    texts = [
        (each.generation.setting, f"{stage}: {time_text(each.ms)} at {each.x:g} {unit}", f"picture {_picture(each)}")
        for each in shown
    ]
    x, y = [each.x for each in shown], [each.ms for each in shown]
    marks: list[Mark] = [Dots(x, y, colour, None if fit.fit else name, texts, size=4, opacity=0.35)]
    if fit.fit is not None:
        ends = [fit.fit.x_min, fit.fit.x_max]
        marks.append(Line(ends, [fit.fit.at(end) for end in ends], colour, name, width=2.5))
    return marks


def _picture(point: Point) -> str:
    picture = point.generation.picture
    return str(picture[1]) if isinstance(picture, tuple) else str(picture)


def _law(stage: str, fit: StageLine, name: str) -> str:
    _, _, per, unit = SCALING[stage]
    if fit.fit is None:
        return f"{name}: no slope, {fit.reason}"
    ends = fit.fit.slope_ci95
    interval = "" if ends is None else f" [{time_text(per * ends[0])} to {time_text(per * ends[1])}]"
    return f"{name}: {time_text(per * fit.fit.slope)} per {unit}{interval}"


def operations_chart(points: Sequence[StagePoint], peak_flops_per_s: float | None) -> Chart:
    """A mark for each stage of each setting, both axes logarithmic; diagonals of equal MFU where the peak is known."""
    known = [point for point in points if point.tflop > 0]
    divisor, unit = flop_unit(1e12 * max(each.tflop for each in known))
    work, times = [1e12 * each.tflop / divisor for each in known], [each.ms for each in known]
    ends, heights = (min(work) / 2.5, max(work) * 2.5), (min(times) / 2.5, max(times) * 2.5)
    marks = [] if peak_flops_per_s is None else _mfu_diagonals(peak_flops_per_s / divisor / 1e3, ends, heights)
    has_diagonals = bool(marks)
    for stage in STAGES:
        own = [(x, each) for x, each in zip(work, known, strict=True) if each.stage == stage]
        texts = [
            (
                f"{each.task} {each.setting}",
                f"{stage}: {x:.3g} {unit} in {time_text(each.ms)}, {each.tflop_per_s:.3g} TFLOP/s",
                *([] if each.mfu is None else [f"MFU {100 * each.mfu:.3g} %"]),
            )
            for x, each in own
        ]
        marks.append(Dots([x for x, _ in own], [each.ms for _, each in own], STAGE_COLOURS[stage], stage, texts,
                          symbol=SYMBOLS[stage], size=8, opacity=0.75))  # fmt: skip
    panel = Panel(
        "Operations against time: each mark is a stage of one setting",
        Axis(f"operations of the stage in a request ({unit})", ends, is_log=True),
        Axis("time of the stage (ms)", heights, is_log=True),
        marks,
        "Along a dotted line the GPU is used equally well." if has_diagonals else "The device's peak is not known.",
        "full",
        420,
    )
    return Chart("e1_flops_vs_latency", [panel])


def _mfu_diagonals(per_ms: float, ends: tuple[float, float], heights: tuple[float, float]) -> list[Mark]:
    """Lines of equal MFU and their names; `per_ms` is the work that the peak does in a millisecond."""
    marks: list[Mark] = []
    for mfu in MFU_LINES:
        times = [end / (per_ms * mfu) for end in ends]
        if times[1] < heights[0] or times[0] > heights[1]:
            continue
        marks.append(Line(ends, times, QUIET, width=1, dash="dot"))
        # Where the line leaves the picture, a little inside.
        at = min(ends[1], ends[0] * heights[1] / times[0]) / 1.6
        if at > ends[0] and at / (per_ms * mfu) > heights[0]:
            marks.append(Note(at, at / (per_ms * mfu), f"{100 * mfu:g} % MFU", QUIET))
    return marks


def decoder_parts_chart(profiles: Sequence[ProfiledRequest]) -> Chart:
    """The decoder's parts over all profiles as fractions: what the host issues, and what a GPU does of it."""
    rows = _part_times(profiles)
    totals = [sum(parts.values()) for parts in rows.values()]
    parts = [[100 * row[part] / total for row, total in zip(rows.values(), totals, strict=True)] for part in PARTS]
    names = [PART_NAMES.get(part, part) for part in PARTS]
    texts = [
        [(name, f"{label}: {time_text(row[part])}, {100 * row[part] / total:.1f} %",
                    f"mean of {counted(len(profiles), 'profiled request')}")
         for (name, row), total in zip(rows.items(), totals, strict=True)]
        for part, label in zip(PARTS, names, strict=True)
    ]  # fmt: skip
    ticks = {
        place: f"{name} · {time_text(total)}" for place, (name, total) in enumerate(zip(rows, totals, strict=True))
    }
    panel = Panel(
        "Parts of the decoder: what the host issues, and what a GPU does of it",
        Axis("fraction of the stage under the profiler (%)", (0, 100)),
        Axis(ticks=ticks, is_reversed=True, limits=(-0.6, len(rows) - 0.4)),
        stacked_bars(names, parts, [PART_COLOURS[part] for part in PARTS], texts),
        f"{counted(len(profiles), 'profiled request')}. The profiler slows requests down: read the fractions, not the "
        "times.",
        "full",
    )
    return Chart("e1_attention_ffn", [panel], panel_size_in=(8.6, 1.6 + 0.6 * len(rows)),
                 footnote=counted(len(profiles), "profiled request"))  # fmt: skip


def _part_times(profiles: Sequence[ProfiledRequest]) -> dict[str, dict[str, float]]:
    """Bar -> part -> ms of a call, mean over the profiles; of the GPU only where all profiles have it."""
    found = {}
    for stage, label in (("prefill", "prefill"), ("decode", "a decode step")):
        own = [profile.stages[stage] for profile in profiles if stage in profile.stages]
        if not own:
            continue
        found[f"{label}, host"] = {part: fmean(each.parts[part].host_ms / each.calls for each in own) for part in PARTS}
        if all(each.whole.device_ms is not None for each in own):
            found[f"{label}, GPU"] = {
                part: fmean((each.parts[part].device_ms or 0.0) / each.calls for each in own) for part in PARTS
            }
    return found
