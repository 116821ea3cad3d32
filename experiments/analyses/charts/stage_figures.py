"""The figures of E1 (stages): fractions, growth, operations and parts of the decoder."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiment_core_utils.models.interface import STAGES
from experiments.analyses.charts import style
from experiments.analyses.charts.marks import thinned
from experiments.analyses.charts.style import new_figure, styled
from experiments.analyses.files import MOST_PANELS
from experiments.analyses.stages.analysis import StageAnalysis
from experiments.analyses.stages.fractions import Generation, Regime, grouped, summed_stages
from experiments.analyses.stages.operations import StagePoint
from experiments.analyses.stages.profiles import PARTS, ProfiledRequest, StageParts
from experiments.analyses.stages.scaling import Point, StageLine, points_of

# Parts in the order in which a block runs them; the small ones together are quiet.
PART_COLOURS = {
    "attention": style.BLUE,
    "routing": style.PURPLE,
    "experts": style.VERMILION,
    "ffn_other": style.ORANGE,
    "norm": style.SKY,
    "head": style.GREEN,
    "other": style.LIGHT_GREY,
}
PART_NAMES = {"ffn_other": "rest of FFN", "norm": "norms"}
_STAGE_MARKS = {"vision": "o", "prefill": "s", "decode": "^"}


def draw_stages(found: StageAnalysis, peak_flops_per_s: float | None, caption: str) -> dict[str, Figure]:
    """E1's figures by name: those for which there are data."""
    figures = {
        "e1_stage_shares": draw_fractions(found.by_regime, caption),
        "e1_stages_over_tokens": draw_stages_over_tokens(found.generations, caption),
        "e1_scaling": draw_scaling(found.generations, found.lines, caption),
    }
    if found.points:
        figures["e1_flops_vs_latency"] = draw_flops(found.points, peak_flops_per_s, caption)
    if found.profiles:
        figures["e1_attention_ffn"] = draw_components(found.profiles, caption)
    return figures


def draw_fractions(regimes: Sequence[Regime], caption: str) -> Figure:
    """A figure with a stacked bar for each vision knob and output length: fractions, with the mean total at the end."""
    groups, left_out = _drawn(map(_group, regimes))
    regimes = [each for each in regimes if _group(each) in groups]
    with styled():
        figure = new_figure(8.2, 1.5 + 0.3 * len(regimes), caption + left_out)
        axes = figure.subplots()
        places = _places(regimes)
        for regime, place in zip(regimes, places, strict=True):
            left = 0.0
            for stage in STAGES:
                share = 100 * regime.stages[stage].share
                axes.barh(place, share, 0.78, left, color=style.STAGE_COLOURS[stage], edgecolor="white", linewidth=0.8)
                if share >= 5:
                    axes.text(left + share / 2, place, f"{share:.0f} %", ha="center", va="center", color="white",
                              fontsize=8, fontweight="bold")  # fmt: skip
                left += share
            axes.text(101.5, place, milliseconds(regime.total_ms), va="center", fontsize=8.5, color=style.INK)
        axes.set_yticks(places, [_tokens(each.output_tokens).replace("output ", "") for each in regimes])
        _name_groups(axes, regimes, places)
        axes.set_ylim(max(places) + 0.6, min(places) - 1.1)
        axes.set_xlim(0, 100)
        axes.set_xlabel("part of the time of a request (%)")
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.text(101.5, min(places) - 0.75, "mean total", fontsize=8.5, color=style.QUIET, va="center")
        for stage, x in zip(STAGES, (0, 14, 28), strict=True):
            axes.text(
                x, min(places) - 0.75, f"■ {stage}", color=style.STAGE_COLOURS[stage], fontweight="bold", va="center"
            )
        first, last = regimes[0], regimes[-1]
        axes.set_title(_fractions_title(first, last))
        return figure


def _fractions_title(first: Regime, last: Regime) -> str:
    if last.dominant != "decode" or first.dominant == "decode":
        return "Where the time of a request goes"
    share = 100 * last.stages["decode"].share
    return f"Decode takes over as answers grow: {share:.0f} % of the time at {_tokens(last.output_tokens)}"


def _places(regimes: Sequence[Regime]) -> list[float]:
    """Places of the bars, one below the other, with a gap where the vision knob changes."""
    place, places = 0.0, []
    for before, each in zip([None, *regimes], regimes, strict=False):
        place += 0.0 if before is None else 1.0 if _group(before) == _group(each) else 1.6
        places.append(place)
    return places


def _group(regime: Regime) -> tuple[str, str]:
    return regime.task, regime.vision


def _drawn(groups: Iterable[tuple[str, str]]) -> tuple[list[tuple[str, str]], str]:
    """Each task and vision knob once, at most MOST_PANELS of them, and the caption's note on that."""
    every = list(dict.fromkeys(groups))
    kept = [every[at] for at in thinned(len(every), MOST_PANELS)]
    return kept, "" if len(kept) == len(every) else f"  ·  {len(kept)} of {len(every)} values of vision drawn"


def _name_groups(axes: Axes, regimes: Sequence[Regime], places: Sequence[float]) -> None:
    several_tasks = len({each.task for each in regimes}) > 1
    for group in dict.fromkeys(map(_group, regimes)):
        own = [place for each, place in zip(regimes, places, strict=True) if _group(each) == group]
        name = f"vision\n{group[1]}" + (f"\n{group[0]}" if several_tasks else "")
        axes.text(-0.125, float(np.mean(own)), name, transform=axes.get_yaxis_transform(), ha="right", va="center",
                  fontweight="bold", fontsize=9, color=style.INK)  # fmt: skip


def _tokens(count: int | None) -> str:
    return "own length" if count is None else f"{count} output token{'s' if count > 1 else ''}"


def milliseconds(value: float) -> str:
    """A time as text, such as `1.24 s`, `522 ms`, `8.4 ms`."""
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def draw_stages_over_tokens(generations: Sequence[Generation], caption: str) -> Figure:
    """Areas of the stages' shares over output length, a panel for each vision knob, and where decode is half."""
    by_group = grouped(generations, lambda each: (each.task, each.vision))
    groups, left_out = _drawn(by_group)
    with styled():
        figure = new_figure(1.2 + 2.5 * len(groups), 3.3, caption + left_out)
        panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
        for axes, group in zip(panels, groups, strict=True):
            _areas(axes, by_group[group])
            axes.set_title(f"vision {group[1]}" + (f"\n{group[0]}" if len({task for task, _ in groups}) > 1 else ""))
            axes.set_xlabel("output tokens")
        panels[0].set_ylabel("part of the time (%)")
        return figure


def _areas(axes: Axes, generations: Sequence[Generation]) -> None:
    sums = summed_stages(generations)
    longest = len(sums)
    lengths = range(1, longest + 1)
    fractions = 100 * sums / sums.sum(axis=1, keepdims=True)
    colours = [style.STAGE_COLOURS[stage] for stage in STAGES]
    axes.stackplot(lengths, fractions.T, colors=colours, edgecolor="white", linewidth=0.8)
    axes.set_xlim(1, max(longest, 2))
    axes.set_ylim(0, 100)
    axes.grid(visible=False)
    half = next((n for n, row in zip(lengths, fractions, strict=True) if row[2] >= 50), None)
    if half is not None:
        axes.axvline(half, color="white", linewidth=1.2, linestyle=(0, (4, 3)))
        axes.text(half + 0.03 * longest, 95, f"from {half} tokens on\ndecode is at least half", color="white", va="top")
    axes.text(0.62 * longest, 62, "decode", color="white", fontweight="bold", ha="center")
    place = min(len(lengths) - 1, 2 if len(lengths) > 8 else 1)
    for stage, name_at in ((1, 44), (0, 30)):
        middle = fractions[place, :stage].sum() + fractions[place, stage] / 2
        axes.annotate(STAGES[stage], (lengths[place], middle), (0.36 * longest, name_at), color="white",
                      fontweight="bold", va="center", arrowprops={"arrowstyle": "-", "color": "white"})  # fmt: skip


# Of each stage: what it is plotted against, and how many of its units a slope is for.
SCALING = {
    "vision": ("image features of all crops", 100, "100 features"),
    "prefill": ("prompt tokens, image tokens included", 100, "100 tokens"),
    "decode": ("output tokens", 1, "token"),
}
# A line, the points that it is for, their colour and their name.
ScalingGroup = tuple[StageLine, list[Point], str, str]


def scaling_groups(generations: Sequence[Generation], lines: Sequence[StageLine]) -> dict[str, list[ScalingGroup]]:
    """Stage -> its groups in the first task: all of vision; prefill and decode with the fewest and the most blocks."""
    task = generations[0].task
    own = [each for each in generations if each.task == task]
    blocks = sorted({each.num_active_blocks for each in own})
    colours = {blocks[0]: style.VERMILION, blocks[-1]: style.BLUE}
    found: dict[str, list[ScalingGroup]] = {}
    for stage in SCALING:
        points = points_of(own, stage)
        fits = [each for each in lines if (each.task, each.stage, each.top_k) == (task, stage, None)]
        if stage == "vision":
            found[stage] = [(fits[0], points, style.BLUE, "all settings")]
            continue
        found[stage] = [
            (fit, [each for each in points if each.generation.num_active_blocks == count], colour, f"{count} blocks")
            for count, colour in colours.items()
            for fit in fits
            if fit.num_active_blocks == count
        ]
    return found


def law_of(line: StageLine) -> str:
    """The slope of a line with its interval, or why there is no line."""
    if line.fit is None:
        return f"no line, {line.reason}"
    _, per, unit = SCALING[line.stage]
    ends = line.fit.slope_ci95
    interval = "" if ends is None else f" [{per * ends[0]:.3g} to {per * ends[1]:.3g}]"
    return f"{per * line.fit.slope:.3g} ms per {unit}{interval}"


def draw_scaling(generations: Sequence[Generation], lines: Sequence[StageLine], caption: str) -> Figure:
    """A panel for vision against image features, prefill against prompt tokens, decode against output tokens."""
    with styled():
        figure = new_figure(11.0, 4.0, f"{caption}  ·  lines: least squares [95 % interval of the slope]")
        panels = figure.subplots(1, 3)
        for axes, (stage, groups) in zip(panels, scaling_groups(generations, lines).items(), strict=True):
            _scaling_panel(axes, stage, groups)
            axes.set_title(stage.capitalize())
            axes.set_xlabel(SCALING[stage][0])
        panels[0].set_ylabel("time (ms)")
        return figure


def _scaling_panel(axes: Axes, stage: str, groups: Sequence[ScalingGroup]) -> None:
    highest = 0.0
    for number, (line, points, colour, name) in enumerate(groups):
        x, y = [each.x for each in points], [each.ms for each in points]
        if not points:
            axes.text(0.5, 0.5, "no generation has it", transform=axes.transAxes, ha="center", color=style.QUIET)
            continue
        # As pixels also in the SVG, which would be large otherwise.
        axes.scatter(x, y, s=7 if stage != "decode" else 3, color=colour, alpha=0.25, linewidths=0, rasterized=True)
        highest = max(highest, float(np.percentile(y, 99)))
        if (fit := line.fit) is not None:
            axes.plot([fit.x_min, fit.x_max], [fit.at(fit.x_min), fit.at(fit.x_max)], color=colour, linewidth=2.2)
        axes.text(0.03, 0.98 - 0.13 * number, f"{name}\n{law_of(line)}", transform=axes.transAxes, va="top",
                  color=colour, fontsize=8.5)  # fmt: skip
    axes.set_ylim(0, 1.5 * highest if highest else None)


def draw_flops(points: Sequence[StagePoint], peak_flops_per_s: float | None, caption: str) -> Figure:
    """A figure of time against operations, both logarithmic; diagonals of equal MFU where the peak is known."""
    with styled():
        figure = new_figure(7.4, 4.8, caption)
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.set_yscale("log")
        x, y = np.array([each.tflop for each in points]), np.array([each.ms for each in points])
        limits = (x.min() / 2.5, x.max() * 6), (y.min() / 3, y.max() * 2)
        for name, times, place in () if peak_flops_per_s is None else mfu_diagonals(peak_flops_per_s / 1e15, *limits):
            axes.plot(limits[0], times, color=style.QUIET, linewidth=0.8, linestyle=(0, (2, 3)), zorder=1)
            axes.text(*place, name, color=style.QUIET, fontsize=7.5, ha="center", va="center",
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})  # fmt: skip
        for stage in STAGES:
            own = [each for each in points if each.stage == stage]
            if not own:
                continue
            axes.scatter([each.tflop for each in own], [each.ms for each in own], s=26, marker=_STAGE_MARKS[stage],
                         color=style.STAGE_COLOURS[stage], alpha=0.75, linewidths=0, label=stage)  # fmt: skip
            last = max(own, key=lambda each: each.tflop)
            axes.annotate(f"{stage}{_mfu_range(own)}", (last.tflop, last.ms), xytext=(9, 0), textcoords="offset points",
                          color=style.STAGE_COLOURS[stage], fontweight="bold", va="center",
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85})  # fmt: skip
        axes.set_xlim(*limits[0])
        axes.set_ylim(*limits[1])
        axes.set_xlabel("operations of the stage in one request (TFLOP)")
        axes.set_ylabel("time of the stage (ms)")
        axes.set_title("Operations against time: each mark is one setting")
        return figure


def _mfu_range(points: Sequence[StagePoint]) -> str:
    fractions = [each.mfu for each in points if each.mfu is not None]
    if not fractions:
        return ""
    low, high = 100 * min(fractions), 100 * max(fractions)
    return f"\nMFU {low:.2g} to {high:.2g} %"


MFU_LINES = (1.0, 0.1, 0.01, 0.001, 0.0001)
Ends = tuple[float, float]


def mfu_diagonals(per_ms: float, ends: Ends, heights: Ends) -> Iterator[tuple[str, list[float], Ends]]:
    """For each diagonal in the picture its name, its times at both ends, and the place of the name a little inside.

    Args:
        per_ms: the work that the device's peak does in a millisecond.
        ends, heights: of the picture, in work and in ms.
    """
    for share in MFU_LINES:
        times = [end / (per_ms * share) for end in ends]
        if times[0] < heights[1] and times[1] > heights[0]:
            at = min(ends[1], ends[0] * heights[1] / times[0]) / 1.6
            yield f"{100 * share:g} % MFU", times, (at, at / (per_ms * share))


def part_rows(profiles: Sequence[ProfiledRequest]) -> list[tuple[str, str, dict[str, float]]]:
    """(Stage, host or GPU, mean ms of each part in a call) over all profiles, in the order in which they are drawn."""
    rows: list[tuple[str, str, dict[str, float]]] = []
    for stage, name in (("prefill", "prefill"), ("decode", "a decode step")):
        own = [each.stages[stage] for each in profiles if stage in each.stages]
        if own:
            rows.append((name, "host", _mean_parts(own, on_device=False)))
        if own and all(each.whole.device_ms is not None for each in own):
            rows.append((name, "GPU", _mean_parts(own, on_device=True)))
    return rows


def draw_components(profiles: Sequence[ProfiledRequest], caption: str) -> Figure:
    """A figure of stacked bars of the decoder's parts in prefill and a decode step, over all profiles."""
    rows = part_rows(profiles)
    bars = [(f"{stage}\n{where}", parts) for stage, where, parts in rows]
    with styled():
        figure = new_figure(8.6, 1.3 + 0.72 * len(bars), f"{caption}  ·  {len(profiles)} profiled requests")
        axes = figure.subplots()
        longest = max(sum(parts.values()) for _, parts in bars)
        for place, (_, parts) in enumerate(bars):
            _component_bar(axes, place, parts, longest)
        axes.set_yticks(range(len(bars)), [name for name, _ in bars])
        axes.set_ylim(len(bars) - 0.45, -1.0)
        axes.set_xlim(0, 1.12 * longest)
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("time under the profiler (ms): for shares, not for latencies")
        _component_key(axes, longest)
        has_gpu = any(where == "GPU" for _, where, _ in rows)
        axes.set_title("Parts of the decoder: " + ("issued by the host, done by the GPU" if has_gpu else "on the CPU"))
        return figure


def _mean_parts(stages: Sequence[StageParts], on_device: bool) -> dict[str, float]:
    """Mean milliseconds of each part in a call."""
    return {
        part: float(
            np.mean([((each.parts[part].device_ms or 0.0) if on_device else each.parts[part].host_ms) / each.calls
                     for each in stages])
        )
        for part in PARTS
    }  # fmt: skip


def _component_bar(axes: Axes, place: int, parts: dict[str, float], longest: float) -> None:
    total, left = sum(parts.values()), 0.0
    for part, time_ms in parts.items():
        axes.barh(place, time_ms, 0.7, left, color=PART_COLOURS[part], edgecolor="white", linewidth=0.8)
        if time_ms > 0.045 * longest:
            ink = style.BLACK if part in ("norm", "other", "ffn_other") else "white"
            axes.text(left + time_ms / 2, place, f"{100 * time_ms / total:.0f} %", ha="center", va="center", color=ink,
                      fontsize=8, fontweight="bold")  # fmt: skip
        left += time_ms
    axes.text(left + 0.01 * longest, place, f"{total:.1f} ms", va="center", fontsize=8.5, color=style.INK)


def _component_key(axes: Axes, longest: float) -> None:
    """Write the parts' names above the bars, from left to right as in them."""
    x = 0.0
    for part in PARTS:
        name = f"■ {PART_NAMES.get(part, part)}"
        colour = PART_COLOURS[part] if part != "other" else style.QUIET
        axes.text(x, -0.7, name, color=colour, fontweight="bold", va="center", fontsize=8.5)
        x += longest * (0.03 + 0.0125 * len(name))
