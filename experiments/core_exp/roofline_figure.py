"""In: times of stages run in several ways, their work, and what a device attains; out: the picture of its roofline."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.core_exp.execution_table import STAGES, Rates, Work
from experiments.core_exp.figures import BLUE, GREEN, INK, ORANGE, PURPLE, QUIET, VERMILION, new_figure, styled

COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE)
MARKERS = dict(zip(STAGES, "so^", strict=True))
# Of the first case and of the last one: hollow markers of two sizes in one place are both seen.
LARGEST, SMALLEST = 11.0, 4.0
# Ways in the same place stand beside each other, each this many times the abscissa of the one before.
STEP = 1.12
NOTE = f"a stage of a case has one abscissa: its ways are drawn around it, each {STEP:g} times as far right as the last"


def draw_roofline(rows: Sequence[Mapping[str, Any]], work: Mapping[str, Mapping[str, Work]], rates: Rates) -> Figure:
    """Operations per second over operations per byte, of each stage, way and case, below what the device attains.

    Colours tell ways, shapes stages, sizes cases.
    """
    ways = list(dict.fromkeys(row["way"] for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    colours = {way: COLOURS[place % len(COLOURS)] for place, way in enumerate(ways)}
    sizes = dict(zip(cases, np.linspace(LARGEST, SMALLEST, len(cases)).tolist(), strict=True))
    with styled():
        figure = new_figure(8.0, 4.8, NOTE)
        axes = figure.subplots()
        _draw_roof(axes, rates)
        for row in rows:
            shift = STEP ** (ways.index(row["way"]) - (len(ways) - 1) / 2)
            for stage, done in work[row["case"]].items():
                if row[f"{stage}_ms"]:
                    at, reached = done.flops / done.bytes, done.flops / (row[f"{stage}_ms"] * 1e-3)
                    style = _style(MARKERS[stage], colours[row["way"]], sizes[row["case"]])
                    axes.plot(at * shift, reached, **style)
        axes.set(xlabel="operations per byte (as the floor counts them)", ylabel="operations per second")
        stages = [stage for stage in STAGES if any(stage in each for each in work.values())]
        keys = [
            *(Line2D([], [], label=way, **_style("o", colour, 7.0)) for way, colour in colours.items()),
            *(Line2D([], [], label=stage, **_style(MARKERS[stage], QUIET, 7.0)) for stage in stages),
            *(Line2D([], [], label=case, **_style("o", QUIET, size)) for case, size in sizes.items()),
        ]
        figure.legend(handles=keys, loc="outside right upper", fontsize=8)
    return figure


def _draw_roof(axes: Axes, rates: Rates) -> None:
    knee = rates.flops_per_s / rates.bytes_per_s
    ends = [0.1, knee, max(10 * knee, 2e4)]
    axes.loglog(ends, [min(rates.flops_per_s, at * rates.bytes_per_s) for at in ends], color=INK)


def _style(marker: str, colour: str, size: float) -> dict[str, Any]:
    return {
        "marker": marker,
        "linestyle": "none",
        "markersize": size,
        "markeredgecolor": colour,
        "markerfacecolor": "none",
        "markeredgewidth": 1.4,
    }
