"""Figures of measurements, a predictor and its validation, as PNG and SVG."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from experiments.analyses.charts import style
from experiments.analyses.charts.style import new_figure, save_figure, styled
from experiments.fitting.scores import HIT
from experiments.performance_prediction.algorithms.convolution import ALGORITHMS, AlgorithmName
from experiments.performance_prediction.prediction.measurements import MeasuredInference, Measurements
from experiments.performance_prediction.prediction.network_predictor import DevicePredictor
from experiments.performance_prediction.prediction.validation import (
    DEVICE,
    INNER_SIZES,
    LAYER,
    MODEL,
    OURS,
    FoldResult,
    PredictedAndMeasured,
)

COLOURS: dict[AlgorithmName, str] = {
    "direct": style.ORANGE,
    "gemm": style.VERMILION,
    "implicit gemm": style.SKY,
    "implicit precomp gemm": style.BLUE,
    "fft": style.PURPLE,
    "fft tiling": "#8C6BB1",
    "winograd": style.GREEN,
    "winograd nonfused": "#66C2A4",
    "guess": style.BLACK,
    "torch": style.QUIET,
}
KERNELS = {1: style.SKY, 3: style.BLUE}
OTHER_KERNEL, FELL_BACK, REST = style.YELLOW, style.VERMILION, style.LIGHT_GREY
_CURVE_POINTS = 13
# A thinner part of the longest bar, about 4 pixels, would be lightened to another colour by an edge.
_LEAST_FRACTION_WITH_EDGE = 0.02


def figure_folders(devices: Sequence[str], folder: Path) -> dict[str, Path]:
    """The folder itself for one device; for several, whose pictures have the same names, a folder in it for each."""
    if len(devices) == 1:
        return {devices[0]: folder}
    return {device: folder / re.sub(r"[^\w.-]+", "_", device) for device in devices}


def save_figures(
    measured: Measurements, predictor: DevicePredictor, results: Sequence[FoldResult], folder: Path
) -> list[Path]:
    """Save time_against_size, layer_breakdown and, where sizes or models were held out, predicted_against_measured."""
    with styled():
        figures = {"time_against_size": size_figure(measured, predictor), "layer_breakdown": breakdown_figure(measured)}
        if results:
            figures["predicted_against_measured"] = predicted_figure(results, predictor.device)
    return [save_figure(figure, folder, name)[0] for name, figure in figures.items()]


def size_figure(measured: Measurements, predictor: DevicePredictor) -> Figure:
    """A panel for each network: measured device times, hollow where layers fell back, on the predictor's curves."""
    models = list(dict.fromkeys(each.model for each in measured.networks))
    figure, panels = _panels(
        models,
        f"{predictor.device}  ·  points: measured (hollow: some layers fell back to guess), lines: fitted to them",
    )
    sizes = sorted({each.input_size for each in measured.networks})
    grid = np.unique(np.linspace(sizes[0], sizes[-1], _CURVE_POINTS).round().astype(int))
    for axes, model in zip(panels, models, strict=False):
        own = [each for each in measured.networks if each.model == model]
        for algorithm in [name for name in ALGORITHMS if any(each.requested == name for each in own)]:
            its = sorted((each for each in own if each.requested == algorithm), key=lambda each: each.input_size)
            _draw_sizes(axes, its, algorithm)
            if algorithm in predictor.algorithms:
                batch = its[0].batch_size
                curve = [1e3 * predictor.predict(model, algorithm, int(size), batch).device_s for size in grid]
                axes.plot(grid, curve, color=COLOURS[algorithm], linewidth=1.0)
        axes.set(title=model, yscale="log", xlabel="input size, pixels", ylabel="time on the device, ms")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    _legend(figure, panels[0])
    return figure


def _draw_sizes(axes: Axes, its: Sequence[MeasuredInference], algorithm: AlgorithmName) -> None:
    for each in its:
        hollow = any(layer.fell_back for layer in each.layers)
        axes.plot(
            each.input_size,
            1e3 * each.device_s,
            marker="o",
            markersize=4,
            linestyle="none",
            color=COLOURS[algorithm],
            markerfacecolor="white" if hollow else COLOURS[algorithm],
        )
    axes.plot([], [], color=COLOURS[algorithm], marker="o", markersize=4, label=algorithm)


def breakdown_figure(measured: Measurements) -> Figure:
    """A panel for each network at the smallest size: a bar for each algorithm, divided by layer, and the rest."""
    models = list(dict.fromkeys(each.model for each in measured.networks))
    size = min(each.input_size for each in measured.networks)
    device = measured.networks[0].device
    figure, panels = _panels(models, f"{device}  ·  {size} pixels, layers in the order of their calls")
    for axes, model in zip(panels, models, strict=False):
        own = {each.requested: each for each in measured.networks if (each.model, each.input_size) == (model, size)}
        thin_s = _LEAST_FRACTION_WITH_EDGE * max((each.device_s for each in own.values()), default=0.0)
        for row, inference in enumerate(own.values()):
            _draw_bar(axes, row, inference, thin_s)
        axes.set_yticks(range(len(own)), list(own))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set(title=model, xlabel="time on the device, ms")
    for colour, label in (
        (KERNELS[1], "1x1"),
        (KERNELS[3], "3x3"),
        (OTHER_KERNEL, "larger kernels"),
        (FELL_BACK, "fell back to guess"),
        (REST, "other operations"),
    ):
        panels[0].barh(0, 0, color=colour, label=label)
    _legend(figure, panels[0])
    return figure


def _draw_bar(axes: Axes, row: int, inference: MeasuredInference, thin_s: float) -> None:
    """Draw one bar; layers of `thin_s` seconds and less have no edge, which would blend with their colour."""
    left = 0.0
    for layer in inference.layers:
        colour = FELL_BACK if layer.fell_back else KERNELS.get(max(layer.shape.kernel), OTHER_KERNEL)
        width, edge = 1e3 * layer.latency_s, 0.2 if layer.latency_s > thin_s else 0.0
        axes.barh(
            row, width, left=left, color=colour, height=0.75, edgecolor="white", linewidth=edge, antialiased=edge > 0
        )
        left += width
    axes.barh(row, max(1e3 * inference.device_s - left, 0.0), left=left, color=REST, height=0.75)


def predicted_figure(results: Sequence[FoldResult], device: str) -> Figure:
    """A figure of layers and networks at sizes left out, and of networks left out; the band is 10 % to either side."""
    figure = new_figure(12.5, 4.6, f"{device}  ·  no point shown was used for fitting  ·  band: within 10 %")
    comparisons = [each for result in results for each in result.comparisons if each.method == OURS]
    panels = list(figure.subplots(1, 3))
    for axes, kind, level, title in (
        (panels[0], INNER_SIZES, LAYER, "layers at sizes left out"),
        (panels[1], INNER_SIZES, DEVICE, "networks at sizes left out"),
        (panels[2], MODEL, DEVICE, "networks left out"),
    ):
        shown = [each for each in comparisons if (each.fold_kind, each.level) == (kind, level)]
        _draw_compared(axes, shown)
        axes.set(title=title, xlabel="measured, ms", ylabel="predicted, ms")
    _legend(figure, panels[1])
    return figure


def _draw_compared(axes: Axes, shown: Sequence[PredictedAndMeasured]) -> None:
    if not shown:
        axes.text(0.5, 0.5, "nothing left out", transform=axes.transAxes, ha="center", color=style.QUIET)
        return
    for algorithm in [name for name in ALGORITHMS if any(each.algorithm == name for each in shown)]:
        its = [each for each in shown if each.algorithm == algorithm]
        measured, predicted = ([1e3 * getattr(each, name) for each in its] for name in ("measured", "predicted"))
        size = 5 if len(shown) > 1000 else 18
        axes.scatter(measured, predicted, s=size, color=COLOURS[algorithm], label=algorithm, alpha=0.7, linewidths=0)
    values = [1e3 * value for each in shown for value in (each.measured, each.predicted)]
    ends = np.array([min(values) / 1.2, max(values) * 1.2])
    axes.fill_between(
        ends, ends * (1 - HIT), ends * (1 + HIT), color=style.LIGHT_GREY, alpha=0.5, linewidth=0, zorder=0
    )
    axes.set(xscale="log", yscale="log", xlim=tuple(ends), ylim=tuple(ends))


def _panels(models: Sequence[str], caption: str) -> tuple[Figure, list[Axes]]:
    """An array of panels, three in a row."""
    rows = -(-len(models) // 3)
    figure = new_figure(12.5, 3.6 * rows + 0.6, caption)
    panels = list(np.atleast_1d(figure.subplots(rows, min(len(models), 3), squeeze=False)).flat)
    for axes in panels[len(models) :]:
        axes.set_visible(False)
    return figure, panels


def _legend(figure: Figure, axes: Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
