"""An evaluation as one record, as JSON and as rows of a table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.primitives.units import milliseconds
from experiments.controller.evaluation.outcomes import (
    AnsweredRequests,
    BudgetFigures,
    Difference,
    Outcomes,
    Paired,
    figures_at,
    fraction_of_gain,
    paired,
)

SCHEMA_VERSION = 1
KIND = "controller_evaluation"
BEST_STATIC, ORACLE = "best_static", "oracle"
NO_GAIN = "the oracle gains nothing over the best static setting"
NO_GRID = "only a full grid of these requests can say"


@dataclass(frozen=True)
class Budget:
    """A latency budget."""

    seconds: float
    #: whether some setting keeps at least 95 % of the requests within it; None where that is not known
    meetable: bool | None
    #: fraction of the requests that some choice keeps within it; None where that is not known
    share_possible: float | None
    share_of_reference: float | None = None  #: of the mean time of the model as it is; None where it was not measured


@dataclass(frozen=True)
class PolicyEvaluation:
    """The figures of a policy at every budget."""

    name: str
    figures: tuple[BudgetFigures, ...]  #: of each budget
    gains: tuple[float | None, ...]  #: of each budget, see `fraction_of_gain`
    gain_over_budgets: float | None  #: the same of the mean over the meetable budgets


@dataclass(frozen=True)
class PolicyComparison:
    """A policy compared with a baseline; `budget_s` is None for the mean over the meetable budgets."""

    policy: str
    baseline: str
    budget_s: float | None
    paired: Paired


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of all policies on the same requests at the same budgets."""

    mode: Literal["replay", "live"]
    requests: AnsweredRequests
    budgets: tuple[Budget, ...]
    policies: tuple[PolicyEvaluation, ...]
    comparisons: tuple[PolicyComparison, ...]


def evaluate(
    mode: Literal["replay", "live"],
    outcomes: Sequence[Outcomes],
    requests: AnsweredRequests,
    budgets: Sequence[Budget],
    possible: np.ndarray | None,
    baselines: Sequence[str],
) -> Evaluation:
    """The figures of each policy, and each compared with each baseline.

    Args:
        possible: [B, N], see `figures_at`.
        baselines: names of policies; one that is not there is passed over.
    """
    seconds = [budget.seconds for budget in budgets]
    figures = {
        outcome.name: tuple(figures_at(outcome, at, seconds, requests, possible) for at in range(len(seconds)))
        for outcome in outcomes
    }
    over = feasible_budgets(budgets)
    policies = tuple(
        PolicyEvaluation(each.name, figures[each.name], *_gains(figures, each.name, over)) for each in outcomes
    )
    by_name = {each.name: each for each in outcomes}
    comparisons = [
        PolicyComparison(each.name, name, None if len(at) != 1 or whole else seconds[at[0]],
                   paired(each, by_name[name], seconds, requests, at))
        for name in baselines
        if name in by_name
        for each in outcomes
        if each.name != name
        for at, whole in [*(([place], False) for place in range(len(seconds))), *([(over, True)] if over else [])]
    ]  # fmt: skip
    return Evaluation(mode, requests, tuple(budgets), policies, tuple(comparisons))


def feasible_budgets(budgets: Sequence[Budget]) -> list[int]:
    """Places of the budgets that are not known to be unmeetable."""
    return [place for place, budget in enumerate(budgets) if budget.meetable is not False]


def _gains(
    figures: Mapping[str, Sequence[BudgetFigures]], name: str, over: Sequence[int]
) -> tuple[tuple[float | None, ...], float | None]:
    """The fraction of the oracle's gain at each budget, and that of the means over some."""
    if BEST_STATIC not in figures or ORACLE not in figures:
        return (None,) * len(figures[name]), None
    three = [figures[each] for each in (name, BEST_STATIC, ORACLE)]
    gains = tuple(fraction_of_gain(*(each.accuracy_in_time for each in at)) for at in zip(*three, strict=True))
    return gains, fraction_of_gain(*(mean_over(each, over, "accuracy_in_time") for each in three))


def mean_over(figures: Sequence[BudgetFigures], places: Sequence[int], name: str) -> float | None:
    """The mean of a figure over budgets; None where one of them has none, or there are no budgets."""
    values = [getattr(figures[place], name) for place in places]
    return None if not values or None in values else float(np.mean(values))


def content_of(evaluation: Evaluation) -> dict[str, Any]:
    """The content of `controller_evaluation.json` except what the command knows of its inputs; times in ms."""
    requests = evaluation.requests
    over = feasible_budgets(evaluation.budgets)
    tasks = np.array(requests.tasks)
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "mode": evaluation.mode,
        "num_requests": len(requests.tasks),
        "num_requests_by_task": {task: int((tasks == task).sum()) for task in dict.fromkeys(requests.tasks)},
        "budgets": [
            {
                "budget_ms": milliseconds(budget.seconds),
                "meetable": budget.meetable,
                "share_possible": budget.share_possible,
                "share_of_reference": budget.share_of_reference,
            }
            for budget in evaluation.budgets
        ],
        "policies": {policy.name: _policy_content(policy, evaluation, over) for policy in evaluation.policies},
        "paired": [_comparison_content(comparison) for comparison in evaluation.comparisons],
    }


def _policy_content(policy: PolicyEvaluation, evaluation: Evaluation, over: Sequence[int]) -> dict[str, Any]:
    names = ("accuracy", "accuracy_in_time", "violation_rate", "overhead_share")
    reason = None
    if policy.gain_over_budgets is None:
        has_both = {BEST_STATIC, ORACLE} <= {each.name for each in evaluation.policies}
        reason = NO_GAIN if has_both else NO_GRID
    return {
        "at_budgets": [
            {"budget_ms": milliseconds(budget.seconds), **figures_content(figures), "share_of_oracle_gain": gain}
            for budget, figures, gain in zip(evaluation.budgets, policy.figures, policy.gains, strict=True)
        ],
        "over_meetable_budgets": {
            "num_budgets": len(over),
            **{name: mean_over(policy.figures, over, name) for name in names},
            "share_of_oracle_gain": policy.gain_over_budgets,
            "share_of_oracle_gain_reason": reason,
        },
    }


def figures_content(figures: BudgetFigures) -> dict[str, Any]:
    """Figures as JSON: `…_s` become `…_ms`."""
    return {
        (f"{name.removesuffix('_s')}_ms" if name.endswith("_s") else name): (
            milliseconds(value) if name.endswith("_s") else value
        )
        for name, value in asdict(figures).items()
    }


def _comparison_content(each: PolicyComparison) -> dict[str, Any]:
    found = each.paired
    return {
        "policy": each.policy,
        "baseline": each.baseline,
        "budget_ms": milliseconds(each.budget_s),
        "accuracy": _difference(found.accuracy),
        "accuracy_in_time": _difference(found.accuracy_in_time),
        "violation_rate": _difference(found.violation_rate),
        "latency_ms": _difference(found.latency_s, 1000.0),
    }


def _difference(found: Difference | None, scale: float = 1.0) -> dict[str, Any] | None:
    if found is None:
        return None
    ends = None if found.ci95 is None else [scale * end for end in found.ci95]
    return {"difference": scale * found.value, "ci95": ends}


def rows_of(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Rows of `controller_evaluation.csv`: one for each policy at each budget; objects of the JSON are left out."""
    rows = []
    for policy in evaluation.policies:
        for budget, figures, gain in zip(evaluation.budgets, policy.figures, policy.gains, strict=True):
            content = figures_content(figures)
            most = next(iter(figures.choices))
            flat = {name: value for name, value in content.items() if not isinstance(value, dict)}
            rows.append(
                {
                    "policy": policy.name,
                    "budget_ms": milliseconds(budget.seconds),
                    "meetable": budget.meetable,
                    **flat,
                    "share_of_oracle_gain": gain,
                    "most_frequent_choice": most,
                    "num_different_choices": len(figures.choices),
                }
            )
    return rows


def evaluation_findings(evaluation: Evaluation) -> list[str]:
    """A line for each policy over the budgets that some setting keeps, the most accurate in time first."""
    over = feasible_budgets(evaluation.budgets)
    if not over:
        return ["No setting keeps 95 % of the requests within any of the budgets."]
    shares = [share for at in over if (share := evaluation.budgets[at].share_of_reference) is not None]
    of = f" ({min(shares):.2f} to {max(shares):.2f} of the reference's mean time)" if shares else ""
    lines = [f"Means over the {len(over)} of {counted(len(evaluation.budgets), 'budget')} that some setting keeps{of}:"]
    found = [(policy, mean_over(policy.figures, over, "accuracy_in_time")) for policy in evaluation.policies]
    for each, accuracy in sorted(found, key=lambda pair: -(pair[1] or 0.0)):
        late = mean_over(each.figures, over, "violation_rate")
        gain = each.gain_over_budgets
        lines.append(
            f"{each.name}: accuracy within the budget {_number(accuracy)}, "
            + ("" if late is None else f"{100 * late:.1f} % of the requests late")
            + ("" if gain is None else f", {100 * gain:.0f} % of the oracle's lead over the best static setting")
        )
    return lines


def table_lines(evaluation: Evaluation) -> list[str]:
    """The figures of every policy at the meetable budgets, then separately at those that no setting can meet."""
    lines = ["gain: fraction of the oracle's lead over the best static setting in accuracy within the budget"]
    head = f"{'policy':<32}{'accuracy':>9}{'in time':>9}{'P50 ms':>9}{'P95 ms':>9}{'P99 ms':>9}{'late':>8}{'gain':>8}"
    over = feasible_budgets(evaluation.budgets)
    rest = [place for place in range(len(evaluation.budgets)) if place not in over]
    for places, word in ((over, ""), (rest, ", which no setting can meet")):
        for place in places:
            lines += [f"budget {1000 * evaluation.budgets[place].seconds:.1f} ms{word}", head]
            lines += [_line(policy, place) for policy in evaluation.policies]
    return lines


def _line(policy: PolicyEvaluation, place: int) -> str:
    own, gain = policy.figures[place], policy.gains[place]
    return (
        f"{policy.name:<32}{_number(own.accuracy):>9}{_number(own.accuracy_in_time):>9}"
        f"{1000 * own.latency_p50_s:>9.1f}{1000 * own.latency_p95_s:>9.1f}{1000 * own.latency_p99_s:>9.1f}"
        f"{100 * own.violation_rate:>6.1f} %{_number(gain):>8}"
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
