"""The section of a report about E1 (stages)."""

from collections.abc import Sequence

import numpy as np

from experiment_core_utils.models.interface import STAGES
from experiments.analyses.charts.marks import NAMES, Trace, axis, bars, dots, hover, layout, line, note, plain, thinned
from experiments.analyses.charts.stage_figures import (
    PART_COLOURS,
    PART_NAMES,
    SCALING,
    law_of,
    mfu_diagonals,
    milliseconds,
    part_rows,
    scaling_groups,
)
from experiments.analyses.charts.style import QUIET, STAGE_COLOURS
from experiments.analyses.report.analyses import Missing
from experiments.analyses.report.parts import Plot, Section, Width
from experiments.analyses.stages.analysis import StageAnalysis
from experiments.analyses.stages.fractions import Regime
from experiments.analyses.stages.operations import StagePoint
from experiments.analyses.stages.profiles import PARTS, ProfiledRequest
from experiments.analyses.stages.scaling import Point, StageLine

TITLE = "Where the time goes (E1)"
STAGE_SYMBOLS = {"vision": "circle", "prefill": "square", "decode": "triangle-up"}


def stage_section(found: StageAnalysis | Missing, peak_flops_per_s: float | None, peak_reason: str | None) -> Section:
    """The section about stages: fractions, settings, growth, operations, and parts of the decoder where profiled."""
    if isinstance(found, Missing):
        return Section("e1", TITLE, "", (), (found.reason,))
    plots = [
        fractions_plot(found.by_regime),
        settings_plot(found.by_setting, fractions_plot_height(len(found.by_regime))),
        *scaling_plots(found),
    ]
    reasons = []
    if found.points:
        plots.append(flops_plot(found.points, peak_flops_per_s, "half" if found.profiles else "full"))
        if peak_flops_per_s is None:
            reasons.append(f"No utilisation (MFU): {peak_reason}.")
    else:
        reasons.append("No operations against time: there are no formulas for the architecture.")
    if found.profiles:
        plots.append(components_plot(found.profiles))
    elif found.profiles_reason is not None:
        reasons.append(f"No attention, FFN, routing and experts: {found.profiles_reason}.")
    intro = (
        "A request runs through vision encoding, prefill and decode. Each answer also gives the stage times of "
        "every shorter answer, so no length is modelled."
    )
    return Section("e1", TITLE, intro, plots, reasons)


def fractions_plot(regimes: Sequence[Regime]) -> Plot:
    """A plot with a bar for each task, vision knob and output length, longest answers last."""
    has_tasks = len({each.task for each in regimes}) > 1
    names = [(f"{each.task} · " if has_tasks else "") + f"{each.vision} · {each.output_tokens} tok" for each in regimes]
    traces = []
    for stage in STAGES:
        fractions = [100 * each.stages[stage].share for each in regimes]
        texts = [_regime_text(each, name, stage) for each, name in zip(regimes, names, strict=True)]
        labels = [f"{share:.0f} %" if share >= 6 else "" for share in fractions]
        colour = STAGE_COLOURS[stage]
        traces.append(bars(names, fractions, texts, stage, colour, is_horizontal=True, labels=labels))
    totals = [
        note(1.01, plain(name), milliseconds(each.total_ms), xref="paper", xanchor="left")
        for each, name in zip(regimes, names, strict=True)
    ]
    return Plot(
        "e1-shares",
        "Shares of the stages by vision knob and output length",
        traces,
        layout(
            axis("part of the time of a request (%)", range=[0, 100]),
            axis(autorange="reversed", **NAMES),
            barmode="stack", bargap=0.22, annotations=totals, margin={"l": 10, "r": 64, "t": 34, "b": 10},
        ),
        "half", fractions_plot_height(len(regimes)),
        "At the right the mean total. All top-k and block counts are pooled.",
    )  # fmt: skip


def _regime_text(regime: Regime, name: str, stage: str) -> str:
    share = regime.stages[stage]
    interval = (
        "" if share.share_ci95 is None else " [{:.1f} to {:.1f}]".format(*(100 * end for end in share.share_ci95))
    )
    return hover(
        name,
        f"{stage}: {milliseconds(share.mean_ms)}, {100 * share.share:.1f} %{interval}",
        f"total {milliseconds(regime.total_ms)}, mean of {regime.n} generations",
    )


def fractions_plot_height(num_bars: int) -> int:
    """Height in pixels for so many bars, axis and legend."""
    return max(360, 110 + 24 * num_bars)


def settings_plot(settings: Sequence[Regime], height_px: int) -> Plot:
    """A plot with a bar in ms for each setting, fastest first."""
    ordered = sorted(settings, key=lambda each: each.total_ms)
    has_tasks = len({each.task for each in settings}) > 1
    names = [f"{each.task} {each.setting}" if has_tasks else str(each.setting) for each in ordered]
    traces = []
    for stage in STAGES:
        texts = [_regime_text(each, name, stage) for each, name in zip(ordered, names, strict=True)]
        times = [each.stages[stage].mean_ms for each in ordered]
        traces.append(bars(names, times, texts, stage, STAGE_COLOURS[stage], is_horizontal=False))
    return Plot(
        "e1-settings",
        "Mean time of a request at each setting, fastest first",
        traces,
        layout(
            axis(f"{len(ordered)} settings", showticklabels=False, **NAMES),
            axis("ms", rangemode="tozero"),
            barmode="stack", bargap=0.12,
        ),
        "half", height_px,
        "Each generation counts with its own length. Point at a bar to see which setting it is.",
    )  # fmt: skip


def scaling_plots(found: StageAnalysis) -> list[Plot]:
    """Plots of the first task: each stage's times with the lines of the fewest and the most blocks."""
    plots = []
    for stage, groups in scaling_groups(found.generations, found.lines).items():
        points = [point for _, own, _, _ in groups for point in own]
        if not points:
            continue
        title, label = f"{stage.capitalize()} against {SCALING[stage][0].partition(',')[0]}", SCALING[stage][0]
        task = found.generations[0].task
        highest = float(np.percentile([each.ms for each in points], 99.5))
        # Whole steps where the points span few tokens.
        steps = {"dtick": 1} if np.ptp([each.x for each in points]) <= 8 else {}
        plots.append(
            Plot(
                f"e1-scaling-{stage}",
                title if len({each.task for each in found.generations}) == 1 else f"{title} ({task})",
                [trace for group in groups for trace in _with_line(stage, *group)],
                layout(axis(label, **steps), axis("ms", range=[0, 1.05 * highest])),
                "third", 340,
                "; ".join(f"{name}: {law_of(fit)}" for fit, _, _, name in groups) + ".",
            )
        )  # fmt: skip
    return plots


def _with_line(stage: str, fit: StageLine, points: Sequence[Point], colour: str, name: str) -> list[Trace]:
    shown = [points[at] for at in thinned(len(points), 900)]
    unit = SCALING[stage][0].partition(",")[0]
    texts = [
        hover(each.generation.setting, f"{stage}: {each.ms:.3g} ms at {each.x:g} {unit}", f"picture {_picture(each)}")
        for each in shown
    ]
    x, y = [each.x for each in shown], [each.ms for each in shown]
    traces = [dots(x, y, texts, name, colour, size=4, opacity=0.35) | {"showlegend": fit.fit is None}]
    if fit.fit is not None:
        ends = [fit.fit.x_min, fit.fit.x_max]
        traces.append(line(ends, [fit.fit.at(end) for end in ends], name, colour, width=3))
    return traces


def _picture(point: Point) -> str:
    picture = point.generation.picture
    return str(picture[1]) if isinstance(picture, tuple) else str(picture)


def flops_plot(points: Sequence[StagePoint], peak_flops_per_s: float | None, width: Width) -> Plot:
    """A plot with a mark for each stage of each setting; diagonals of equal MFU where the peak is known."""
    known = [each for each in points if each.tflop > 0]
    factor, unit = (1.0, "TFLOP") if max(each.tflop for each in known) >= 1 else (1e3, "GFLOP")
    work, times = [factor * each.tflop for each in known], [each.ms for each in known]
    ends, heights = (min(work) / 2.5, max(work) * 2.5), (min(times) / 2.5, max(times) * 2.5)
    per_ms = None if peak_flops_per_s is None else peak_flops_per_s * factor / 1e15
    diagonals = [] if per_ms is None else list(mfu_diagonals(per_ms, ends, heights))
    traces = [line(ends, times, "", QUIET, width=1, dash="dot") | {"showlegend": False} for _, times, _ in diagonals]
    notes = [note(np.log10(x), np.log10(y), name, font={"size": 10}) for name, _, (x, y) in diagonals]
    for stage in STAGES:
        own = [each for each in known if each.stage == stage]
        texts = [
            hover(
                f"{each.task} {each.setting}",
                f"{stage}: {factor * each.tflop:.3g} {unit} in {each.ms:.3g} ms, {each.tflop_per_s:.3g} TFLOP/s",
                *([] if each.mfu is None else [f"MFU {100 * each.mfu:.3g} %"]),
            )
            for each in own
        ]
        x, y = [factor * each.tflop for each in own], [each.ms for each in own]
        symbol = STAGE_SYMBOLS[stage]
        traces.append(dots(x, y, texts, stage, STAGE_COLOURS[stage], size=8, symbol=symbol, opacity=0.75))
    return Plot(
        "e1-flops",
        "Operations against time",
        traces,
        layout(
            axis(f"operations of the stage in a request ({unit})", type="log", dtick=1, range=np.log10(ends).tolist()),
            axis("time of the stage (ms)", type="log", dtick=1, range=np.log10(heights).tolist()),
            annotations=notes,
        ),
        width, 420,
        "A mark is a stage of one setting. "
        + ("Along a dotted line the GPU is used equally well." if notes else "The peak of the device is not known."),
    )  # fmt: skip


def components_plot(profiles: Sequence[ProfiledRequest]) -> Plot:
    """A plot of the decoder's parts over all profiles: what the host issues, and what a GPU does of it."""
    rows = [(f"{stage}, {where}", parts) for stage, where, parts in part_rows(profiles)]
    names = [name for name, _ in rows]
    traces = []
    for part in PARTS:
        label = PART_NAMES.get(part, part)
        fractions = [100 * parts[part] / sum(parts.values()) for _, parts in rows]
        texts = [
            hover(name, f"{label}: {parts[part]:.3g} ms, {share:.1f} %", f"mean of {len(profiles)} profiled requests")
            for (name, parts), share in zip(rows, fractions, strict=True)
        ]
        labels = [f"{share:.0f} %" if share >= 6 else "" for share in fractions]
        traces.append(bars(names, fractions, texts, label, PART_COLOURS[part], is_horizontal=True, labels=labels))
    return Plot(
        "e1-components",
        "Parts of the decoder",
        traces,
        layout(
            axis("part of the stage under the profiler (%)", range=[0, 100]),
            axis(autorange="reversed", **NAMES),
            barmode="stack", bargap=0.3, margin={"l": 10, "r": 14, "t": 56, "b": 10},
        ),
        "half", 420,
        f"{len(profiles)} profiled requests. The profiler slows requests down: read the shares, not the times.",
    )  # fmt: skip
