"""The charts of E3 (latency estimator): errors, predicted against measured, guardrail and recalibration."""

from collections.abc import Sequence

import numpy as np

from experiment_core_utils.primitives.texts import counted
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
    thinned,
)
from experiments.analyses.charts.style import BLUE, GREEN, ORANGE, QUIET, SKY, VERMILION
from experiments.analyses.latency.analysis import LatencyModel
from experiments.analyses.latency.features import TimedSamples
from experiments.analyses.latency.guardrail import AIM, BUDGET_PERCENTILES, GuardrailCounts
from experiments.analyses.latency.recalibration import METHODS, STUDIED, RecalibrationStudy
from experiments.analyses.latency.stage_regression import measured_times
from experiments.analyses.latency.validation import Errors, Validation, places_by_setting

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

NOISE = "noise of measuring a sample again"
SPREAD = "spread of a setting's samples"


def latency_charts(found: LatencyModel, studies: Sequence[RecalibrationStudy] = ()) -> list[Chart]:
    """All charts of E3; recalibration for each study with errors."""
    return [
        errors_chart(found.validation),
        guardrail_chart(found.curve),
        predicted_chart(found.samples, found.validation),
        *(recalibration_chart(study) for study in studies if study.errors),
    ]


def errors_chart(validation: Validation) -> Chart:
    """The error by stage beside those of three rivals."""
    rules: list[Mark] = [Rule(100 * AIM, True, QUIET, f"aim: {100 * AIM:.0f} %")]
    panels = [
        _errors_panel(validation, "the typical request of a setting (medians)", "setting_mape", rules),
        _errors_panel(validation, "a single request", "sample_mape", ()),
    ]
    return Chart("e3_errors", panels, 2, (5.6, 4.0))


def _errors_panel(validation: Validation, subject: str, measure: str, rules: Sequence[Mark]) -> Panel:
    """Bars of one measure of Errors."""
    names = [name for name in BARS if name in validation.estimator]
    ticks = {place: LABELS[name] for place, name in enumerate(names)}
    marks: list[Mark] = []
    longest = max((each.at for each in rules if isinstance(each, Rule)), default=0.0)
    for shift, found, colour, label in (
        (-0.3, validation.linear, SKY, "line of the same terms"),
        (-0.1, validation.logs, GREEN, "model that adds in logs"),
        (0.1, validation.forest, ORANGE, "random forest"),
        (0.3, validation.estimator, BLUE, "this estimator"),
    ):
        errors = [100 * float(getattr(found[name], measure)) for name in names]
        texts = [_error_text(f"{LABELS[name]}: {label}", found[name]) for name in names]
        longest = max(longest, *errors)
        labels = [f"{error:.1f} %" for error in errors]
        marks.append(Bars([place + shift for place in ticks], errors, colour, label, texts, labels, thickness=0.19))
    noise = {
        place: 100 * float(getattr(validation.noise[name], measure))
        for place, name in enumerate(names)
        if name in validation.noise
    }
    longest = max(longest, *noise.values(), 0.0)
    texts = [(ticks[place], f"{each:.1f} % by {NOISE}") for place, each in noise.items()]
    marks.append(Dots([*noise.values()], [*noise], VERMILION, NOISE, texts, symbol="tick", size=16))
    return Panel(
        f"How far predictions are off: {subject}",
        # Room for the numbers behind the bars.
        Axis("mean relative error, setting left out of the fit (%)", (0, 1.15 * max(longest, 1e-9))),
        Axis(ticks=ticks, is_reversed=True, limits=(-0.6, len(names) - 0.4)),
        [*marks, *rules],
        "No model can be better than the noise." if noise else "No sample has two runs: the noise is not known.",
        height_px=520,
    )


def _error_text(heading: str, found: Errors) -> tuple[str, ...]:
    between = found.setting_mape_ci95
    interval = "" if between is None else f" ({100 * between[0]:.1f} to {100 * between[1]:.1f})"
    return (
        heading,
        f"{100 * found.setting_mape:.1f} % off at the typical request of a setting{interval}",
        f"{100 * found.sample_mape:.1f} % at a single request, bias {100 * found.bias:+.1f} %",
        counted(found.num_samples, "sample"),
    )


def predicted_chart(samples: TimedSamples, validation: Validation) -> Chart:
    """Predicted against measured times of each stage: a dot a request, a ring for the medians of a setting."""
    measured = measured_times(samples)
    names = [name for name in STUDIED if name in validation.estimator]
    panels = [_predicted_panel(name, measured[name], samples.settings, validation) for name in names]
    return Chart("e3_predicted_vs_measured", panels, len(panels), (3.6, 3.8))


def _predicted_panel(name: str, measured: np.ndarray, settings: np.ndarray, validation: Validation) -> Panel:
    predicted = validation.left_out.times[name]
    has = np.flatnonzero(np.isfinite(measured) & np.isfinite(predicted))
    measured, predicted, settings = measured[has], predicted[has], settings[has]
    # A few requests that took several times as long would squeeze all others into a corner; they are counted instead.
    end = 1.05 * max(float(np.percentile(measured, 98)), float(predicted.max()))
    start = 0.95 * min(float(measured.min()), float(predicted.min()))
    shown = thinned(len(measured))
    of_requests = [
        (str(settings[at]), f"one request: measured {measured[at]:.4g} ms, predicted {predicted[at]:.4g} ms")
        for at in shown
    ]
    # In the order in which they are met.
    places = sorted(places_by_setting(settings), key=lambda own: int(own[0]))
    medians = [(float(np.median(measured[own])), float(np.median(predicted[own]))) for own in places]
    of_settings = [
        (str(settings[own[0]]), f"medians: measured {x:.4g} ms, predicted {y:.4g} ms", f"{100 * (y / x - 1):+.1f} %")
        for own, (x, y) in zip(places, medians, strict=True)
    ]
    ends = np.array([start, end])
    beyond = int((measured > end).sum())
    found = validation.estimator[name]
    return Panel(
        f"{LABELS[name]}: {100 * found.setting_mape:.1f} % off by setting",
        Axis("measured (ms)", (start, end)),
        Axis("predicted, setting left out (ms)", (start, end)),
        [
            Band(ends, ends * (1 - AIM), ends * (1 + AIM), QUIET, f"within {100 * AIM:.0f} %"),
            Line(ends, ends, QUIET, width=1),
            Dots(measured[shown], predicted[shown], SKY, "a request", of_requests, size=4, opacity=0.5),
            Dots([x for x, _ in medians], [y for _, y in medians], BLUE, "median of a setting", of_settings,
                 symbol="ring", size=8),
        ],
        f"{100 * found.setting_mape:.1f} % off by setting, {100 * found.sample_mape:.1f} % by request; "
        f"{100 * validation.coverage[name].share:.0f} % of the requests lie inside their interval."
        + (f" {beyond} slower requests lie to the right of the picture." if beyond else ""),
        height_px=420,
        is_square=True,
    )  # fmt: skip


def guardrail_chart(curve: Sequence[GuardrailCounts]) -> Chart:
    """Violated budgets and wasted settings against the margin."""
    marks: list[Mark] = []
    for violations, colour, label in (
        (True, VERMILION, "broken: admitted, but over budget"),
        (False, BLUE, "wasted: rejected, but would have fitted"),
    ):
        rates = [(each, each.violation_rate if violations else each.false_rejection_rate) for each in curve]
        known = [(each, rate) for each, rate in rates if rate is not None]
        texts = [
            (
                f"margin {100 * each.margin:+.0f} %",
                f"{each.violations:g} of {each.admitted} admitted were over budget"
                if violations
                else f"{each.false_rejections:g} of {each.fitting:g} that fit were rejected",
                f"{100 * rate:.1f} %",
            )
            for each, rate in known
        ]
        x, y = [100 * each.margin for each, _ in known], [100 * rate for _, rate in known]
        marks.append(Line(x, y, colour, label, texts, symbol="circle"))
    panel = Panel(
        "A wider margin breaks fewer budgets and wastes more settings",
        Axis("margin kept free (% of the predicted total)"),
        Axis("requests (%)", from_zero=True),
        [*marks, Rule(100 * AIM, False, QUIET, f"{100 * AIM:.0f} %")],
        f"Summed over budgets at the {BUDGET_PERCENTILES[0]}th to {BUDGET_PERCENTILES[-1]}th percentile of the "
        "measured totals.",
    )
    return Chart("e3_guardrail", [panel])


def recalibration_chart(study: RecalibrationStudy) -> Chart:
    """The error against the number of samples, a line a method, quartiles over draws as bands."""
    panels = []
    for name in [name for name in STUDIED if any(each.name == name for each in study.errors)]:
        marks: list[Mark] = []
        sizes: list[int] = []
        for method in METHODS:
            points = [error for error in study.errors if error.name == name and error.method == method]
            colour, label = METHOD_STYLES[method]
            sizes = [point.num_samples for point in points]
            marks.append(Band(sizes, [100 * e.low for e in points], [100 * e.high for e in points], colour))
            marks.append(Line(sizes, [100 * e.median for e in points], colour, label, symbol="circle"))
        marks.append(Rule(100 * study.repeatability[name].sample_mape, False, VERMILION, SPREAD))
        panels.append(
            Panel(
                LABELS[name],
                Axis("samples of the target", ticks={size: str(size) for size in sizes}, is_log=True),
                Axis("mean relative error on the rest (%)", from_zero=True),
                marks,
                width="third",
            )
        )
    footnote = f"fitted on {study.source}, recalibrated to {study.target}"
    return Chart(f"e3_recalibration_{study.kind}", panels, len(panels), (3.3, 3.6), footnote)
