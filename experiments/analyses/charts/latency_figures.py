"""The figures of E3 (latency estimator), as PNG and SVG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from experiments.analyses.charts.style import (
    BLUE,
    GREEN,
    ORANGE,
    QUIET,
    SKY,
    VERMILION,
    new_figure,
    save_figure,
    styled,
)
from experiments.analyses.latency.features import TimedSamples
from experiments.analyses.latency.guardrail import GuardrailCounts
from experiments.analyses.latency.recalibration import METHODS, STUDIED, RecalibrationStudy
from experiments.analyses.latency.stage_regression import measured_times
from experiments.analyses.latency.validation import Validation, places_by_setting

LABELS = {
    "T_vision_total": "vision",
    "T_LLM_prefill": "prefill",
    "T_decode_per_token": "decode, per token",
    "T_LLM_decode": "decode",
    "T_first_token": "first token",
    "T_total": "total",
}
BARS = ("T_vision_total", "T_LLM_prefill", "T_first_token", "T_decode_per_token", "T_total")
METHOD_STYLES = {
    "none": (QUIET, "as it is"),
    "global_affine": (ORANGE, "one line for all stages"),
    "stage_affine": (BLUE, "a line for each stage"),
    "refit": (GREEN, "fitted again"),
}
NOISE = "noise of measuring again"
AIM = 0.05
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


def save_figures(
    samples: TimedSamples,
    validation: Validation,
    studies: Sequence[RecalibrationStudy],
    curve: Sequence[GuardrailCounts],
    device: str,
    drift: float | None,
    folder: Path,
) -> None:
    """Save e3_errors, e3_predicted_vs_measured, e3_guardrail, and e3_recalibration_<kind> for studies with errors."""
    with styled():
        figures = {
            "e3_errors": errors_figure(validation, device, drift),
            "e3_predicted_vs_measured": predicted_figure(samples, validation, device),
            "e3_guardrail": guardrail_figure(curve, device),
            **{f"e3_recalibration_{each.kind}": recalibration_figure(each) for each in studies if each.errors},
        }
    for name, figure in figures.items():
        save_figure(figure, folder, name)


def errors_figure(validation: Validation, device: str, drift: float | None) -> Figure:
    """A figure of the error by stage, estimator beside linear model, with the noise of measuring again as a mark.

    Args:
        drift: mean deviation of the control setting over the run, a fraction; None where it was not measured.
    """
    figure = new_figure(11, 4.6, device)
    left, right = figure.subplots(1, 2, sharey=True)
    names = [name for name in reversed(BARS) if name in validation.estimator]
    for axes, title, measure in (
        (left, "the typical request of a setting (medians)", "setting_mape"),
        (right, "a single request", "sample_mape"),
    ):
        rows = np.arange(len(names), dtype=float)
        for shift, found, colour, label in (
            (-0.2, validation.linear, SKY, "plain linear model"),
            (0.2, validation.estimator, BLUE, "this estimator"),
        ):
            values = [float(getattr(found[name], measure)) for name in names]
            axes.barh(rows + shift, values, height=0.38, color=colour, label=label)
            for row, value in zip(rows + shift, values, strict=True):
                axes.text(value + 0.001, row, f"{value:.1%}", va="center", fontsize=8, bbox=LABEL_BOX, zorder=4)
        noise = [float(getattr(validation.repeatability[name], measure)) for name in names]
        axes.scatter(noise, rows, marker="|", s=700, linewidths=2.5, color=VERMILION, zorder=3, label=NOISE)
        axes.set_yticks(rows, [LABELS[name] for name in names])
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_title(title)
        axes.set_xlabel("mean relative error at settings left out of the fit")
        axes.margins(x=0.14)
    left.axvline(AIM, color=QUIET, linestyle=":", linewidth=1.2)
    left.annotate("aim", (AIM, 1.0), xycoords=("data", "axes fraction"), ha="right", va="top", color=QUIET, fontsize=8)
    if drift is not None:
        label = "drift: one setting measured again and again during the run"
        left.axvline(drift, color=GREEN, linestyle="--", linewidth=1.6, label=label)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, markerscale=0.5)
    figure.suptitle("How far predictions are off", fontsize=11)
    return figure


def predicted_figure(samples: TimedSamples, validation: Validation, device: str) -> Figure:
    """A figure of predicted against measured times, a dot a sample, a ring for the medians of a setting."""
    names = [name for name in STUDIED if name in validation.estimator]
    figure = new_figure(3.6 * len(names), 4.6, device)
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        _predicted_panel(axes, PredictedTimes.of(samples, validation, name))
        found = validation.estimator[name]
        axes.set_title(f"{LABELS[name]}: {found.setting_mape:.1%} off by setting")
        axes.set_xlabel("measured [ms]")
    figure.axes[0].set_ylabel("predicted, setting left out of the fit [ms]")
    figure.axes[0].legend(loc="upper left", fontsize=8, frameon=True)
    figure.suptitle("Predicted against measured", fontsize=11)
    return figure


@dataclass(frozen=True)
class PredictedTimes:
    """A time as predicted, its setting left out, against as measured, in ms, where there are both.

    Attributes:
        measured, predicted, settings: [S], of each request.
        medians: setting -> medians of measured and of predicted, in the order in which settings are met.
        start, end: of the axes: a few requests that took several times as long would squeeze all others into a corner.
        beyond: requests slower than `end`.
    """

    measured: np.ndarray
    predicted: np.ndarray
    settings: np.ndarray
    medians: Mapping[str, tuple[float, float]]
    start: float
    end: float
    beyond: int

    @classmethod
    def of(cls, samples: TimedSamples, validation: Validation, name: str) -> Self:
        """Those of one of PREDICTED."""
        measured, predicted = measured_times(samples)[name], validation.left_out.times[name]
        has = np.isfinite(measured) & np.isfinite(predicted)
        measured, predicted, settings = measured[has], predicted[has], samples.settings[has]
        places = sorted(places_by_setting(settings), key=lambda own: int(own[0]))
        medians = {
            str(settings[own[0]]): (float(np.median(measured[own])), float(np.median(predicted[own]))) for own in places
        }
        end = 1.05 * max(float(np.percentile(measured, 98)), float(predicted.max()))
        start = 0.95 * min(float(measured.min()), float(predicted.min()))
        return cls(measured, predicted, settings, medians, start, end, int((measured > end).sum()))


def _predicted_panel(axes: Axes, times: PredictedTimes) -> None:
    line = np.array([times.start, times.end])
    low, high = line * (1 - AIM), line * (1 + AIM)
    axes.fill_between(line, low, high, color=QUIET, alpha=0.25, linewidth=0, label="within 5 %")
    axes.plot(line, line, color=QUIET, linewidth=1)
    axes.scatter(times.measured, times.predicted, s=8, color=SKY, alpha=0.6, linewidths=0, label="one request")
    x, y = zip(*times.medians.values(), strict=True)
    axes.scatter(x, y, s=34, facecolors="none", edgecolors=BLUE, linewidths=1.3, label="median of a setting")
    axes.set(xlim=line, ylim=line, aspect="equal")
    if times.beyond:
        axes.text(0.98, 0.02, f"{times.beyond} slower requests\nto the right", transform=axes.transAxes, ha="right",
                  fontsize=8)  # fmt: skip


def guardrail_figure(curve: Sequence[GuardrailCounts], device: str) -> Figure:
    """A figure of violations and false rejections against the margin."""
    figure = new_figure(7.5, 4.4, device)
    axes = figure.subplots()
    for name, colour, label in (
        ("violation_rate", VERMILION, "broken budgets: of the admitted requests, those that took longer"),
        ("false_rejection_rate", BLUE, "wasted settings: of the requests that would have fitted, those rejected"),
    ):
        points = [(each.margin, getattr(each, name)) for each in curve if getattr(each, name) is not None]
        axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=label)
    axes.axhline(AIM, color=QUIET, linestyle=":", linewidth=1.2, label="5 %")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("margin kept free, as a fraction of the predicted total time")
    axes.set_ylabel("fraction of requests")
    figure.suptitle("A wider margin breaks fewer budgets and wastes more settings", fontsize=11)
    figure.legend(loc="outside lower center", ncols=1, fontsize=8)
    return figure


def recalibration_figure(study: RecalibrationStudy) -> Figure:
    """A figure of the error against the number of samples, a line a method, quartiles over draws as bands."""
    names = [name for name in STUDIED if any(each.name == name for each in study.errors)]
    figure = new_figure(3.3 * len(names), 4.0, f"fitted on: {study.source}  ·  recalibrated to: {study.target}")
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        for method in METHODS:
            points = [each for each in study.errors if each.name == name and each.method == method]
            colour, label = METHOD_STYLES[method]
            sizes = [each.num_samples for each in points]
            axes.plot(sizes, [each.median for each in points], marker="o", color=colour, label=label)
            low, high = [each.low for each in points], [each.high for each in points]
            axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.axhline(study.repeatability[name].sample_mape, color=VERMILION, linestyle=":", label=NOISE)
        axes.set_xscale("log")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(bottom=0)
        axes.set_title(LABELS[name])
        axes.set_xlabel("samples of the target")
    figure.axes[0].set_ylabel("mean relative error on the rest")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, fontsize=8)
    return figure
