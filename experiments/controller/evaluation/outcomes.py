"""Accuracy, latency and violations of what policies chose for the same requests at the same budgets.

A request is in time where its latency is at most the budget. `accuracy_in_time` counts the score of a request that is
not in time as 0, so that exceeding the budget never pays and the per-sample oracle is an upper bound. Of a request that
was measured in several runs, the fraction of them that is late counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.primitives.statistics import (
    bounded_mean_interval,
    cluster_totals,
    fraction_above,
    percentiles_over_runs,
)
from experiments.fitting.held_out import mean_of
from experiments.fitting.intervals import ratio_intervals


@dataclass(frozen=True)
class AnsweredRequests:
    """N requests that every policy answered."""

    #: tasks, pictures: [N]
    tasks: tuple[str, ...]
    pictures: tuple[str, ...]
    best: np.ndarray  #: [N], the highest score of the request's metric


@dataclass(frozen=True)
class Outcomes:
    """The scores and times of a policy at B budgets for N requests."""

    name: str
    choices: tuple[tuple[Setting, ...], ...]  #: [B][N]
    scores: np.ndarray  #: [B, N], by each task's metric; nan where it has none
    latency_s: np.ndarray  #: [B, N], the mean of the request's runs
    overhead_s: np.ndarray  #: [B, N], time that choosing took
    runs_s: np.ndarray | None = None  #: [R, B, N], of each run, nan where there are fewer; None for one run

    @property
    def times_s(self) -> np.ndarray:
        """The time [R, B, N] of every run, which is compared with the budget."""
        return self.latency_s[None] if self.runs_s is None else self.runs_s


@dataclass(frozen=True)
class BudgetFigures:
    """The figures of a policy at a budget; times in seconds."""

    #: task -> mean score by its own metric; None where none of its requests has a score
    accuracy_by_task: Mapping[str, float | None]
    accuracy: float | None  #: mean over requests of score / best score
    accuracy_in_time: float | None  #: the same with 0 for a request that went over the budget
    latency_mean_s: float
    latency_p50_s: float
    latency_p95_s: float
    latency_p99_s: float
    violation_rate: float  #: fraction of requests, by their runs, that went over it
    #: the same among requests that some choice would have kept within it; None where there are none, or where it is not
    #: known (only a full grid shows it)
    violation_rate_possible: float | None
    overhead_p50_s: float
    overhead_p99_s: float
    overhead_share: float  #: mean over requests of overhead / latency
    choices: Mapping[str, int]  #: key -> requests that it was chosen for, most frequent first


@dataclass(frozen=True)
class Difference:
    """The difference of a policy and a baseline on the same requests."""

    value: float
    #: over pictures: of shares by `bounded_mean_interval`, of latencies by bootstrap, None where every request differs
    #: by the same
    ci95: tuple[float, float] | None


@dataclass(frozen=True)
class Paired:
    """A policy compared with a baseline at one budget, or in the mean over several."""

    #: accuracy, accuracy_in_time: fractions of the best score; None where no request has a score
    accuracy: Difference | None
    accuracy_in_time: Difference | None
    violation_rate: Difference | None
    latency_s: Difference  #: means


def late(outcomes: Outcomes, budgets_s: Sequence[float]) -> np.ndarray:
    """The fraction [B, N] of each request's runs that exceeded its budget."""
    return fraction_above(outcomes.times_s, np.asarray(budgets_s)[:, None])


def figures_at(
    outcomes: Outcomes, at: int, budgets_s: Sequence[float], requests: AnsweredRequests, possible: np.ndarray | None
) -> BudgetFigures:
    """The figures of a policy at one budget.

    Args:
        at: place of the budget.
        possible: [B, N], whether some choice keeps the request within the budget; None where that is not known.
    """
    fractions, over = outcomes.scores[at] / requests.best, late(outcomes, budgets_s)[at]
    scored, latency_s = np.isfinite(fractions), outcomes.latency_s[at]
    tasks, overhead_s = np.array(requests.tasks), outcomes.overhead_s[at]
    names = [choice.key for choice in outcomes.choices[at]]
    counts = {name: names.count(name) for name in sorted(set(names))}
    could = None if possible is None or not possible[at].any() else possible[at]
    p50, p95, p99 = percentiles_over_runs(outcomes.times_s[:, at], (50, 95, 99))
    return BudgetFigures(
        accuracy_by_task={
            task: mean_of(outcomes.scores[at][scored & (tasks == task)]) for task in dict.fromkeys(requests.tasks)
        },
        accuracy=mean_of(fractions[scored]),
        accuracy_in_time=mean_of((fractions * (1 - over))[scored]),
        latency_mean_s=float(latency_s.mean()),
        latency_p50_s=p50,
        latency_p95_s=p95,
        latency_p99_s=p99,
        violation_rate=float(over.mean()),
        violation_rate_possible=None if could is None else float(over[could].mean()),
        overhead_p50_s=float(np.percentile(overhead_s, 50)),
        overhead_p99_s=float(np.percentile(overhead_s, 99)),
        overhead_share=float((overhead_s / latency_s).mean()),
        choices=dict(sorted(counts.items(), key=lambda item: -item[1])),
    )


def fraction_of_gain(policy: float | None, static: float | None, oracle: float | None) -> float | None:
    """The fraction of the oracle's gain over the best static setting that a policy gains, by `accuracy_in_time`.

    1 for the oracle, 0 for the best static setting, below 0 for a worse policy; None where the oracle gains nothing.
    """
    if policy is None or static is None or oracle is None or not oracle > static:
        return None
    return (policy - static) / (oracle - static)


def paired(
    policy: Outcomes, baseline: Outcomes, budgets_s: Sequence[float], requests: AnsweredRequests, at: Sequence[int]
) -> Paired:
    """The difference of a policy and a baseline over the budgets at the places `at`, one or more that count the same.

    Pictures are drawn with replacement, with a fixed seed; a drawn picture brings all of its requests at all of these
    budgets. Accuracies are over the requests to which both gave an answer that has a score at all of these budgets.
    """
    rows = list(at)
    over = [late(each, budgets_s)[rows] for each in (policy, baseline)]
    fractions = [each.scores[rows] / requests.best for each in (policy, baseline)]
    in_time = [share * (1 - gone) for share, gone in zip(fractions, over, strict=True)]
    seconds = (policy.latency_s[rows] - baseline.latency_s[rows]).mean(axis=0)
    return Paired(
        accuracy=_fraction_difference((fractions[0] - fractions[1]).mean(axis=0), requests.pictures),
        accuracy_in_time=_fraction_difference((in_time[0] - in_time[1]).mean(axis=0), requests.pictures),
        violation_rate=_fraction_difference((over[0] - over[1]).mean(axis=0), requests.pictures),
        latency_s=_difference(seconds, requests.pictures),
    )


def _fraction_difference(values: np.ndarray, pictures: Sequence[str]) -> Difference | None:
    """The mean of differences [N] between fractions; nan does not count, None where all are."""
    known: list[int] = np.flatnonzero(np.isfinite(values)).tolist()
    if not known:
        return None
    own = [float(values[place]) for place in known]
    return Difference(float(np.mean(own)), bounded_mean_interval(own, [pictures[place] for place in known], 1.0, -1.0))


def _difference(values: np.ndarray, pictures: Sequence[str]) -> Difference:
    """The mean of differences [N] that have no bounds."""
    sums, counts = cluster_totals(values, pictures)
    is_known = len(sums) > 1 and float(np.ptp(values)) > 0.0
    return Difference(float(values.mean()), ratio_intervals(sums[None], counts[None])[0] if is_known else None)
