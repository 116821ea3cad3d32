"""The figure of an evaluation: policies among the static settings on the same requests."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.analyses.charts import style
from experiments.analyses.charts.style import new_figure, styled
from experiments.analyses.knobs.fronts import on_front
from experiments.controller.evaluation.record import BEST_STATIC, ORACLE, Evaluation, PolicyEvaluation, feasible_budgets

COLOURS = (style.BLUE, style.VERMILION, style.GREEN, style.PURPLE, style.SKY, style.ORANGE)
OWN_COLOURS: Mapping[str, str] = {BEST_STATIC: style.QUIET, ORACLE: style.BLACK}
# From the line drawn first, at the bottom, to those above it: each is thinner and has a smaller hollow marker of
# another shape, and all but the first have gaps, so that of lines in the same place all can be seen.
DASHES = ("-", (0, (7, 1)), (0, (5, 1.2)), (0, (3, 1.5)), (0, (2, 2)), (0, (1, 3)))
WIDTHS = (4.6, 3.6, 2.6, 1.7, 1.4, 1.0)
MARKERS = ("o", "s", "D", "^", "v", "x")
MARKER_SIZES = (11.0, 9.0, 7.0, 5.0, 4.5, 3.0)


def line_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Policy -> how its lines are drawn, in the order in which they are drawn, one over the other."""
    free = iter(COLOURS * len(names))
    return {
        name: {
            "color": OWN_COLOURS.get(name) or next(free),
            "linestyle": DASHES[place % len(DASHES)],
            "linewidth": WIDTHS[place % len(WIDTHS)],
            "marker": MARKERS[place % len(MARKERS)],
            "markersize": MARKER_SIZES[place % len(MARKER_SIZES)],
            "markerfacecolor": "none",
            "markeredgewidth": 1.3,
            "zorder": 3 + place,
        }
        for place, name in enumerate(names)
    }


def draw_evaluation(
    evaluation: Evaluation,
    static_latency_s: Sequence[float],
    static_accuracy: Sequence[float],
    caption: str,
    left_out: Sequence[str] = (),
) -> Figure:
    """Policies among the static settings, and over budgets accuracy in time and violations: three panels.

    Static settings drawn as policies of their own are left out of the lines: they are the dots of the first panel.

    Args:
        static_latency_s: [S], means over the requests.
        static_accuracy: [S], mean fractions of the best score.
        left_out: names of policies that are not drawn.
    """
    shown = [
        policy
        for policy in evaluation.policies
        if not policy.name.startswith("static_") and policy.name not in left_out
    ]
    styles = line_styles([policy.name for policy in shown])
    with styled():
        figure = new_figure(12.5, 4.3, caption)
        front, in_time, violations = figure.subplots(1, 3)
        _draw_statics(front, np.asarray(static_latency_s), np.asarray(static_accuracy))
        for policy in shown:
            _draw_policy(front, evaluation, policy, styles[policy.name])
            _over_budgets(in_time, evaluation, policy, "accuracy_in_time", styles[policy.name])
            _over_budgets(violations, evaluation, policy, "violation_rate", styles[policy.name])
        front.set(
            xlabel="mean latency (ms)", ylabel="accuracy (fraction of best score)", title="Against static settings"
        )
        in_time.set(xlabel="budget (ms)", ylabel="accuracy, late requests count 0", title="Accuracy in time")
        violations.set(xlabel="budget (ms)", ylabel="fraction of requests over budget", title="Violations")
        violations.axhline(0.05, color=style.QUIET, linewidth=0.8, linestyle=":")
        for axes in (in_time, violations):
            _shade_unmeetable(axes, evaluation)
        handles, labels = front.get_legend_handles_labels()
        shades, words = violations.get_legend_handles_labels()
        handles, labels = [*handles, *shades], [*labels, *words]
        figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), fontsize=8.5)
    return figure


def _draw_statics(axes: Axes, latency_s: np.ndarray, accuracy: np.ndarray) -> None:
    if not len(latency_s):
        return
    axes.plot(1000 * latency_s, accuracy, "o", color=style.LIGHT_GREY, markersize=4, label="static settings")
    best = np.flatnonzero(on_front(latency_s, accuracy))
    best = best[np.argsort(latency_s[best], kind="stable")]
    axes.step(1000 * latency_s[best], accuracy[best], where="post", color=style.LIGHT_GREY, linewidth=1.2)


def _draw_policy(axes: Axes, evaluation: Evaluation, policy: PolicyEvaluation, style: Mapping[str, Any]) -> None:
    places = [place for place in feasible_budgets(evaluation.budgets) if policy.figures[place].accuracy is not None]
    x = [1000 * policy.figures[place].latency_mean_s for place in places]
    y = [policy.figures[place].accuracy for place in places]
    axes.plot(x, y, label=policy.name.replace("_", " "), **style)  # type: ignore[arg-type]


def _over_budgets(
    axes: Axes, evaluation: Evaluation, policy: PolicyEvaluation, name: str, style: Mapping[str, Any]
) -> None:
    values = [getattr(figures, name) for figures in policy.figures]
    y = [np.nan if value is None else value for value in values]
    axes.plot([1000 * budget.seconds for budget in evaluation.budgets], y, **style)


def _shade_unmeetable(axes: Axes, evaluation: Evaluation) -> None:
    """Shade the budgets that no setting can meet, half way to the next budget."""
    unmet = [1000 * budget.seconds for budget in evaluation.budgets if budget.meetable is False]
    met = [1000 * budget.seconds for budget in evaluation.budgets if budget.meetable is True]
    if unmet:
        left, right = axes.get_xlim()
        end = (max(unmet) + min(met)) / 2 if met else right
        axes.axvspan(
            left, end, color=style.LIGHT_GREY, alpha=0.35, linewidth=0, label="no setting keeps 95 % within it"
        )
        axes.set_xlim(left, right)
