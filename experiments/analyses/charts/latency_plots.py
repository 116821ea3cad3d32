"""The section of a report about E3 (latency estimator)."""

from collections.abc import Sequence

from experiments.analyses.charts.latency_figures import AIM, BARS, LABELS, PredictedTimes
from experiments.analyses.charts.marks import NAMES, axis, bars, dots, hover, layout, line, note, thinned
from experiments.analyses.charts.style import BLUE, QUIET, SKY, VERMILION
from experiments.analyses.latency.analysis import LatencyModel
from experiments.analyses.latency.features import TimedSamples
from experiments.analyses.latency.guardrail import BUDGET_PERCENTILES, GuardrailCounts
from experiments.analyses.latency.validation import Validation
from experiments.analyses.report.analyses import Missing
from experiments.analyses.report.parts import Plot, Section

TITLE = "Predicting latency (E3)"
ABOVE_A_NOTE = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.06, "yanchor": "bottom", "traceorder": "normal"}
COMPARED = ("T_vision_total", "T_LLM_prefill", "T_decode_per_token", "T_total")


def estimator_section(found: LatencyModel | Missing) -> Section:
    """The section about the estimator: errors, predicted against measured, and the guardrail's curve."""
    if isinstance(found, Missing):
        return Section("e3", TITLE, "", (), (f"No latency estimator: {found.reason}.",))
    intro = (
        "A model of the stages, fitted on these results. Every prediction here is of a setting that was left out of "
        "the fit."
    )
    plots = [
        errors_plot(found.validation),
        guardrail_plot(found.curve),
        *(
            predicted_plot(found.samples, found.validation, name)
            for name in COMPARED
            if name in found.validation.estimator
        ),
    ]
    return Section("e3", TITLE, intro, plots)


def errors_plot(validation: Validation) -> Plot:
    """A plot of the error of a setting's typical request, beside a plain linear model and the noise of repetition."""
    names = [name for name in BARS if name in validation.estimator]
    labels = [LABELS[name] for name in names]
    traces = []
    for found, colour, label in (
        (validation.estimator, BLUE, "this estimator"),
        (validation.linear, SKY, "plain linear model"),
    ):
        errors = [100 * found[name].setting_mape for name in names]
        texts = [
            hover(
                f"{LABELS[name]}: {label}",
                f"{100 * found[name].setting_mape:.1f} % off at the typical request of a setting",
                f"{100 * found[name].sample_mape:.1f} % at a single request, bias {100 * found[name].bias:+.1f} %",
                f"{found[name].num_samples} samples",
            )
            for name in names
        ]
        traces.append(bars(labels, errors, texts, label, colour, is_horizontal=True))
    noise = [100 * validation.repeatability[name].setting_mape for name in names]
    texts = [hover(label, f"{value:.1f} % by measuring again") for label, value in zip(labels, noise, strict=True)]
    marks = dots(noise, [], texts, "noise of measuring again", VERMILION, size=22, symbol="line-ns-open")
    traces.append(marks | {"y": labels, "marker": marks["marker"] | {"line": {"width": 3}}})
    return Plot(
        "e3-errors",
        "How far predictions are off, setting left out",
        traces,
        layout(
            axis("mean relative error (%)", rangemode="tozero"),
            axis(autorange="reversed", **NAMES),
            barmode="group", bargap=0.3,
            margin={"l": 10, "r": 14, "t": 76, "b": 10}, legend=ABOVE_A_NOTE,
            shapes=[{"type": "line", "xref": "x", "yref": "paper", "x0": 100 * AIM, "x1": 100 * AIM, "y0": 0, "y1": 1,
                     "line": {"color": QUIET, "width": 1, "dash": "dot"}}],
            annotations=[note(100 * AIM, 1, "aim", yref="paper", yanchor="bottom")],
        ),
        "half", 400,
        "Medians of a setting's requests. No model can be surely better than the noise.",
    )  # fmt: skip


def guardrail_plot(curve: Sequence[GuardrailCounts]) -> Plot:
    """A plot of violated budgets and wasted settings against the margin."""
    traces = []
    for violations, colour, label in (
        (True, VERMILION, "broken: admitted, but over budget"),
        (False, BLUE, "wasted: rejected, but would have fitted"),
    ):
        points = [(each, each.violation_rate if violations else each.false_rejection_rate) for each in curve]
        known = [(each, rate) for each, rate in points if rate is not None]
        texts = [
            hover(
                f"margin {100 * each.margin:+.0f} %",
                f"{each.violations} of {each.admitted} admitted were over budget"
                if violations
                else f"{each.false_rejections} of {each.fitting} that fit were rejected",
                f"{100 * rate:.1f} %",
            )
            for each, rate in known
        ]
        x, y = [100 * each.margin for each, _ in known], [100 * rate for _, rate in known]
        traces.append(line(x, y, label, colour, texts=texts) | {"mode": "lines+markers", "marker": {"size": 8}})
    budgets = f"{BUDGET_PERCENTILES[0]}th to {BUDGET_PERCENTILES[-1]}th"
    return Plot(
        "e3-guardrail",
        "A budget kept by prediction: what a margin costs and saves",
        traces,
        layout(
            axis("margin kept free (% of the predicted total)", zeroline=False),
            axis("requests (%)", rangemode="tozero"),
        ),
        "half", 400,
        f"Summed over budgets at the {budgets} percentile of the measured totals.",
    )  # fmt: skip


def predicted_plot(samples: TimedSamples, validation: Validation, name: str) -> Plot:
    """A plot with a ring for the medians of each setting and a dot for each request."""
    times = PredictedTimes.of(samples, validation, name)
    measured, predicted, start, end = times.measured, times.predicted, times.start, times.end
    shown = thinned(len(measured))
    of_requests = [
        hover(str(times.settings[at]), f"one request: measured {measured[at]:.4g} ms, predicted {predicted[at]:.4g} ms")
        for at in shown
    ]
    of_settings = [
        hover(each, f"medians: measured {x:.4g} ms, predicted {y:.4g} ms", f"{100 * (y / x - 1):+.1f} %")
        for each, (x, y) in times.medians.items()
    ]
    medians = list(times.medians.values())
    band = line([start, end, end, start], [start * (1 - AIM), end * (1 - AIM), end * (1 + AIM), start * (1 + AIM)],
                "within 5 %", QUIET, width=0)  # fmt: skip
    traces = [
        band | {"fill": "toself", "fillcolor": "rgba(128,128,128,0.18)"},
        line([start, end], [start, end], "equal", QUIET, width=1) | {"showlegend": False},
        dots(measured[shown], predicted[shown], of_requests, "a request", SKY, size=4, opacity=0.5),
        dots([x for x, _ in medians], [y for _, y in medians], of_settings, "median of a setting", BLUE, size=8,
             symbol="circle-open"),
    ]  # fmt: skip
    found = validation.estimator[name]
    return Plot(
        f"e3-predicted-{name}",
        f"{LABELS[name]}: predicted against measured",
        traces,
        layout(
            axis("measured (ms)", range=[start, end]),
            axis("predicted, setting left out (ms)", range=[start, end]),
        ),
        "half", 420,
        f"{100 * found.setting_mape:.1f} % off by setting, {100 * found.sample_mape:.1f} % by request; "
        f"{100 * validation.coverage[name].share:.0f} % of the requests lie inside their interval."
        + (f" {times.beyond} slower requests lie to the right of the picture." if times.beyond else ""),
    )  # fmt: skip
