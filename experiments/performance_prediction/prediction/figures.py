"""Figures of measurements, a predictor and its validation, as PNG and SVG."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiment_core_utils.primitives.texts import counted
from experiments.analyses.charts import style
from experiments.analyses.charts.chart import (
    MOST_DOTS,
    Axis,
    Band,
    Bars,
    Chart,
    Dots,
    Line,
    Mark,
    Note,
    Panel,
    Symbol,
)
from experiments.analyses.charts.matplotlib_charts import save_chart
from experiments.analyses.charts.style import joined_caption
from experiments.fitting.held_out import HIT
from experiments.performance_prediction.algorithms.convolution import ALGORITHMS, AlgorithmName
from experiments.performance_prediction.prediction.measurements import MeasuredInference, MeasuredLayer, Measurements
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
KERNEL_PARTS = {1: "1x1", 3: "3x3"}
LARGER_KERNELS, FELL_BACK, REST = "larger kernels", "fell back to guess", "other operations"
PART_COLOURS = {"1x1": style.SKY, "3x3": style.BLUE, LARGER_KERNELS: style.YELLOW, FELL_BACK: style.VERMILION,
                REST: style.LIGHT_GREY}  # fmt: skip
# Whether layers fell back -> symbol of the measured point.
_MEASURED: tuple[tuple[bool, Symbol], ...] = ((False, "circle"), (True, "ring"))
_CURVE_POINTS = 13
_PANEL_IN = (4.1, 3.6)


def figure_folders(devices: Sequence[str], folder: Path) -> dict[str, Path]:
    """The folder itself for one device; for several, whose pictures have the same names, a folder in it for each."""
    if len(devices) == 1:
        return {devices[0]: folder}
    return {device: folder / re.sub(r"[^\w.-]+", "_", device) for device in devices}


def save_figures(
    measured: Measurements, predictor: DevicePredictor, results: Sequence[FoldResult], folder: Path
) -> list[Path]:
    """Save time_against_size, layer_breakdown and, where sizes or models were held out, predicted_against_measured."""
    charts = [
        size_chart(measured, predictor),
        breakdown_chart(measured),
        *([predicted_chart(results)] if results else []),
    ]
    caption = joined_caption([predictor.device, f"n = {counted(len(measured.inferences), 'inference')}"])
    return [save_chart(chart, caption, folder)[0] for chart in charts]


def size_chart(measured: Measurements, predictor: DevicePredictor) -> Chart:
    """A panel for each network: measured device times, hollow where layers fell back, on the predictor's curves."""
    sizes = sorted({network.input_size for network in measured.networks})
    grid = np.unique(np.linspace(sizes[0], sizes[-1], _CURVE_POINTS).round().astype(int))
    panels = []
    for model in dict.fromkeys(each.model for each in measured.networks):
        own = [each for each in measured.networks if each.model == model]
        by_algorithm = [[each for each in own if each.requested == name] for name in ALGORITHMS]
        marks = [mark for its in by_algorithm if its for mark in _size_marks(its, predictor, grid)]
        panels.append(Panel(model, Axis("input size (pixels)"), Axis("time on the device (ms)", is_log=True), marks))
    note = "points: measured (hollow: some layers fell back to guess), lines: fitted to them"
    return Chart("time_against_size", panels, 3, _PANEL_IN, note)


def _size_marks(its: Sequence[MeasuredInference], predictor: DevicePredictor, sizes: np.ndarray) -> list[Mark]:
    """One algorithm of a network: what was measured, and over the sizes what the predictor says of it."""
    first = min(its, key=lambda each: each.input_size)
    colour = COLOURS[first.requested]
    marks: list[Mark] = []
    for fell_back, symbol in _MEASURED:
        shown = [each for each in its if any(layer.fell_back for layer in each.layers) == fell_back]
        x, y = [each.input_size for each in shown], [1e3 * each.device_s for each in shown]
        marks.append(Dots(x, y, colour, None if fell_back else first.requested, symbol=symbol, size=5))
    if first.requested in predictor.algorithms:
        found = [predictor.predict(first.model, first.requested, int(size), first.batch_size) for size in sizes]
        marks.append(Line(sizes, [1e3 * each.device_s for each in found], colour, width=1.0))
    return marks


def breakdown_chart(measured: Measurements) -> Chart:
    """A panel for each network at the smallest size: a bar for each algorithm, divided by layer, and the rest."""
    size = min(network.input_size for network in measured.networks)
    panels = []
    for model in dict.fromkeys(each.model for each in measured.networks):
        own = {each.requested: each for each in measured.networks if (each.model, each.input_size) == (model, size)}
        parts: dict[str, list[tuple[int, float, float]]] = {name: [] for name in PART_COLOURS}
        for row, inference in enumerate(own.values()):
            left = 0.0
            for layer in inference.layers:
                parts[_part_of(layer)].append((row, left, 1e3 * layer.latency_s))
                left += 1e3 * layer.latency_s
            parts[REST].append((row, left, max(1e3 * inference.device_s - left, 0.0)))
        panels.append(
            Panel(
                model,
                Axis("time on the device (ms)", from_zero=True),
                Axis(ticks=dict(enumerate(own)), is_reversed=True, limits=(-0.6, len(own) - 0.4)),
                [
                    Bars([row for row, _, _ in each], [length for *_, length in each], PART_COLOURS[name], name,
                         starts=[start for _, start, _ in each])
                    for name, each in parts.items()
                    if each
                ],
            )
        )  # fmt: skip
    note = f"{size} pixels, layers in the order of their calls"
    return Chart("layer_breakdown", panels, 3, _PANEL_IN, note)


def _part_of(layer: MeasuredLayer) -> str:
    return FELL_BACK if layer.fell_back else KERNEL_PARTS.get(max(layer.shape.kernel), LARGER_KERNELS)


def predicted_chart(results: Sequence[FoldResult]) -> Chart:
    """Layers and networks at sizes left out, and networks left out; the band is 10 % to either side."""
    comparisons = [comparison for result in results for comparison in result.comparisons if comparison.method == OURS]
    panels = [
        _compared_panel(title, [each for each in comparisons if (each.fold_kind, each.level) == (kind, level)])
        for kind, level, title in (
            (INNER_SIZES, LAYER, "layers at sizes left out"),
            (INNER_SIZES, DEVICE, "networks at sizes left out"),
            (MODEL, DEVICE, "networks left out"),
        )
    ]
    return Chart("predicted_against_measured", panels, 3, (4.1, 4.0), "no point shown was used for fitting")


def _compared_panel(title: str, shown: Sequence[PredictedAndMeasured]) -> Panel:
    if not shown:
        empty = Axis(limits=(0, 1), ticks={})
        return Panel(title, empty, empty, [Note(0.5, 0.5, "nothing left out", style.QUIET)])
    values = [1e3 * value for each in shown for value in (each.measured, each.predicted)]
    ends = np.array([min(values) / 1.2, max(values) * 1.2])
    marks: list[Mark] = [Band(ends, ends * (1 - HIT), ends * (1 + HIT), style.LIGHT_GREY, f"within {HIT:.0%}", 0.5)]
    for algorithm in [name for name in ALGORITHMS if any(each.algorithm == name for each in shown)]:
        its = [each for each in shown if each.algorithm == algorithm]
        measured, predicted = ([1e3 * getattr(each, name) for each in its] for name in ("measured", "predicted"))
        size = 3 if len(shown) > MOST_DOTS // 2 else 5.3
        marks.append(Dots(measured, predicted, COLOURS[algorithm], algorithm, size=size, opacity=0.7))
    limits = (float(ends[0]), float(ends[1]))
    return Panel(title, Axis("measured (ms)", limits, is_log=True), Axis("predicted (ms)", limits, is_log=True), marks,
                 is_square=True)  # fmt: skip
