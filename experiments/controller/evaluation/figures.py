"""The figure of an evaluation: policies among the static settings on the same requests."""

from collections.abc import Mapping, Sequence

import numpy as np

from experiment_core_utils.primitives.statistics import on_front
from experiments.analyses.charts import style
from experiments.analyses.charts.chart import Axis, Band, Chart, Dash, Dots, Line, Mark, Panel, Rule, Symbol, padded
from experiments.controller.evaluation.record import BEST_STATIC, ORACLE, Evaluation, PolicyEvaluation, feasible_budgets

NAME = "controller_evaluation"
COLOURS = (style.BLUE, style.VERMILION, style.GREEN, style.PURPLE, style.SKY, style.ORANGE)
OWN_COLOURS: Mapping[str, str] = {BEST_STATIC: style.QUIET, ORACLE: style.BLACK}
# From the line drawn first, at the bottom, to those above it: each is thinner and has a smaller hollow symbol, and all
# but the first have gaps, so that of lines in the same place all can be seen.
DASHES: tuple[Dash, ...] = ("solid", "longdash", "dash", "dashdot", "dot", "dot")
WIDTHS = (4.6, 3.6, 2.6, 1.7, 1.4, 1.0)
SYMBOLS: tuple[Symbol, ...] = ("ring", "open square", "open diamond", "open triangle", "ring", "open square")
SIZES = (13.8, 11.2, 8.8, 6.2, 5.0, 3.8)


def evaluation_chart(
    evaluation: Evaluation,
    static_latency_s: Sequence[float] | np.ndarray,
    static_accuracy: Sequence[float] | np.ndarray,
    left_out: Sequence[str] = (),
    reference: int | None = None,
) -> Chart:
    """Policies among the static settings, and over budgets accuracy in time and violations: three panels.

    Static settings drawn as policies of their own are left out of the lines: they are the dots of the first panel.

    Args:
        static_latency_s: [S], means over the requests.
        static_accuracy: [S], mean fractions of the best score.
        left_out: names of policies that are not drawn.
        reference: place of the model as it is among the static settings; None where it is not there.
    """
    shown = [
        policy
        for policy in evaluation.policies
        if not policy.name.startswith("static_") and policy.name not in left_out
    ]
    front = _statics(np.asarray(static_latency_s), np.asarray(static_accuracy), reference)
    in_time: list[Mark] = []
    violations: list[Mark] = [Rule(0.05, False, style.QUIET)]
    places = feasible_budgets(evaluation.budgets)
    budgets_ms = [1000 * budget.seconds for budget in evaluation.budgets]
    free = iter(COLOURS * len(shown))
    for number, policy in enumerate(shown):
        name, colour = policy.name.replace("_", " "), OWN_COLOURS.get(policy.name) or next(free)
        own = [policy.figures[place] for place in places if policy.figures[place].accuracy is not None]
        points = [1000 * each.latency_mean_s for each in own], [each.accuracy or 0.0 for each in own]
        for marks, (x, y) in (
            (front, points),
            (in_time, (budgets_ms, _over_budgets(policy, "accuracy_in_time"))),
            (violations, (budgets_ms, _over_budgets(policy, "violation_rate"))),
        ):
            place = number % len(WIDTHS)
            marks.append(Line(x, y, colour, name, (), WIDTHS[place], DASHES[place], False, SYMBOLS[place],
                              SIZES[place]))  # fmt: skip
    budgets = Axis("budget (ms)", padded(budgets_ms))
    return Chart(
        NAME,
        [
            Panel(
                "Against static settings", Axis("mean latency (ms)"), Axis("accuracy (fraction of best score)"), front
            ),
            _budgets_panel("Accuracy in time", budgets, "accuracy, late requests count 0", in_time, evaluation),
            _budgets_panel("Violations", budgets, "fraction of requests over budget", violations, evaluation),
        ],
        3,
        (4.2, 3.9),
    )


def _statics(latency_s: np.ndarray, accuracy: np.ndarray, reference: int | None) -> list[Mark]:
    if not len(latency_s):
        return []
    best = np.flatnonzero(on_front(latency_s, accuracy))
    best = best[np.argsort(latency_s[best], kind="stable")]
    at = [] if reference is None else [reference]
    mark = Dots(1000 * latency_s[at], accuracy[at], style.INK, "reference", symbol="open diamond", size=12)
    return [
        Line(1000 * latency_s[best], accuracy[best], style.LIGHT_GREY, width=1.2, is_step=True),
        Dots(1000 * latency_s, accuracy, style.LIGHT_GREY, "static settings", size=5),
        *[mark] * len(at),
    ]


def _over_budgets(policy: PolicyEvaluation, name: str) -> list[float]:
    values = [getattr(figures, name) for figures in policy.figures]
    return [np.nan if value is None else value for value in values]


def _budgets_panel(title: str, budgets: Axis, label: str, marks: Sequence[Mark], evaluation: Evaluation) -> Panel:
    """A panel over budgets; those that no setting can meet are shaded, half way to the next budget."""
    unmet = [1000 * budget.seconds for budget in evaluation.budgets if budget.meetable is False]
    met = [1000 * budget.seconds for budget in evaluation.budgets if budget.meetable is True]
    values = [value for mark in marks for value in (mark.y if isinstance(mark, Line) else [])]
    heights = padded(values) if np.isfinite(values).any() else (0.0, 1.0)
    shade: list[Mark] = []
    if unmet and budgets.limits is not None:
        ends = budgets.limits[0], (max(unmet) + min(met)) / 2 if met else budgets.limits[1]
        low, high = ([height] * 2 for height in heights)
        shade.append(Band(ends, low, high, style.LIGHT_GREY, "no setting keeps 95 % within it", 0.35))
    return Panel(title, budgets, Axis(label, heights), [*shade, *marks])
