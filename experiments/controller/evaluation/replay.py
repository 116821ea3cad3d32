"""A replay of policies on a full measured grid: what each would have scored and taken. No model is run."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.primitives.statistics import fraction_above, percentiles_over_runs
from experiment_core_utils.primitives.units import check_above, shown
from experiments.controller.evaluation.outcomes import AnsweredRequests, Outcomes
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.policies.feedback import FeedbackPolicy
from experiments.controller.policies.interface import Policy, RequestFeatures, check_budget

# A static setting meets a budget where it exceeds it for no more than this fraction of the requests.
VIOLATIONS_ALLOWED = 0.05
# Every policy chooses at every budget for every sample.
MOST_BUDGETS = 10_000
# Budgets as fractions of the reference's mean time: 0.35, 0.40, … 1.
BUDGET_SHARES = tuple(percent / 100 for percent in range(35, 101, 5))


@dataclass(frozen=True)
class PerSampleOracle:
    """A policy that knows what every request scores and takes at every choice, which no controller can.

    The choice of the highest score, of which its late runs have 0, of equal scores the fastest; where none is in time,
    the fastest of all.
    """

    grid: MeasuredGrid
    name: str = "oracle"

    def choose(self, request: RequestFeatures, budget_s: float) -> Setting:
        """A request that is not in the grid raises ConfigurationError."""
        check_budget(budget_s)
        place = self._places.get((request.task, request.sample_id))
        if place is None:
            raise ConfigurationError(
                f"sample {request.sample_id} of {request.task} is not in the grid; the oracle knows measured ones only"
            )
        total_s, late = self.grid.total_s[:, place], fraction_above(self.grid.times_s[:, :, place], budget_s)
        if not (late < 1).any():
            return self.grid.choices[int(np.argmin(total_s))]
        in_time = np.where(late < 1, self.grid.scores[:, place] * (1 - late), -np.inf)
        return self.grid.choices[int(np.lexsort((total_s, -in_time))[0])]

    @cached_property
    def _places(self) -> Mapping[tuple[str, int], int]:
        return {key: place for place, key in enumerate(self.grid.keys)}


def requests_in(grid: MeasuredGrid) -> AnsweredRequests:
    """The requests of the grid, in the form that `outcomes.py` takes."""
    return AnsweredRequests(grid.tasks, grid.pictures, grid.best)


def replay(policy: Policy, grid: MeasuredGrid, budgets_s: Sequence[float]) -> Outcomes:
    """The outcomes of a policy that chooses for every request at every budget, looked up in the grid.

    The requests of each budget are a stream: a policy with feedback starts anew, and is told of each answer's time.
    The time of choosing is measured here and now; it is not added to the latencies, which another machine may have
    measured.

    Raises:
        ResultsError: the policy chose what the grid has not measured.
    """
    rows = {choice: row for row, choice in enumerate(grid.choices)}
    features = grid.features
    size = len(budgets_s), len(grid)
    picked, overhead_s = np.zeros(size, dtype=np.int64), np.zeros(size)
    for at, budget_s in enumerate(budgets_s):
        if isinstance(policy, FeedbackPolicy):
            policy.restart()
        for place, request in enumerate(features):
            started = time.perf_counter()
            choice = policy.choose(request, budget_s)
            overhead_s[at, place] = time.perf_counter() - started
            if choice not in rows:
                raise ResultsError(
                    f"{policy.name} chose {choice.key}, which the grid has not measured; profile it, or give the "
                    "policy the grid's settings"
                )
            picked[at, place] = rows[choice]
            if isinstance(policy, FeedbackPolicy):
                policy.observe(choice, grid.total_s[rows[choice], place])
    return outcomes_of(policy.name, grid, picked, overhead_s)


def outcomes_of(name: str, grid: MeasuredGrid, picked: np.ndarray, overhead_s: np.ndarray) -> Outcomes:
    """The outcomes of the rows `picked` [B, N] of the grid."""
    places = np.arange(len(grid))
    return Outcomes(
        name=name,
        choices=tuple(tuple(grid.choices[row] for row in rows) for rows in picked),
        scores=grid.scores[picked, places],
        latency_s=grid.total_s[picked, places],
        runs_s=grid.times_s[:, picked, places],
        overhead_s=overhead_s,
    )


def best_static(grid: MeasuredGrid, budgets_s: Sequence[float]) -> Outcomes:
    """The static setting of the highest `accuracy_in_time` on these requests at each budget, of equal ones the fastest.

    It is chosen in hindsight, so that no static setting is better: what per-request control is compared with.
    """
    picked = np.zeros((len(budgets_s), len(grid)), dtype=np.int64)
    for at, budget_s in enumerate(budgets_s):
        in_time = grid.in_time(budget_s).mean(axis=1)
        picked[at] = np.lexsort((grid.total_s.mean(axis=1), -in_time))[0]
    return outcomes_of("best_static", grid, picked, np.zeros(picked.shape))


def possible(grid: MeasuredGrid, budgets_s: Sequence[float]) -> np.ndarray:
    """Whether some choice meets the budget of each request in all of its runs, [B, N]."""
    return np.stack([(grid.late(budget) == 0).any(axis=0) for budget in budgets_s])


def meetable(grid: MeasuredGrid, budgets_s: Sequence[float]) -> list[bool]:
    """Whether some setting meets each budget for at least 95 % of the requests."""
    return [bool((grid.late(budget).mean(axis=1) <= VIOLATIONS_ALLOWED).any()) for budget in budgets_s]


def spread_budgets(grid: MeasuredGrid, number: int) -> tuple[float, ...]:
    """Budgets from the median latency of the fastest setting to the 95th percentile of the slowest one, in seconds.

    Each is the same multiple of the one before, since settings are closer where they are fast.

    Raises:
        ConfigurationError: fewer than 2, or more than `MOST_BUDGETS`.
    """
    if number > MOST_BUDGETS:
        raise ConfigurationError(f"{shown(number)} budgets are too many; give at most {MOST_BUDGETS}")
    if number < 2:
        raise ConfigurationError(f"{number} budgets do not span a range; give at least 2, or name them in ms")
    low = float(np.median(grid.total_s, axis=1).min())
    high = max(percentiles_over_runs(grid.times_s[:, row], (95,))[0] for row in range(len(grid.choices)))
    return tuple(float(budget) for budget in np.geomspace(low, high, number))


def shares_of_reference(grid: MeasuredGrid, shares: Sequence[float]) -> tuple[float, ...]:
    """Budgets in seconds, ascending: fractions of the mean time of the reference, without one of the largest setting.

    Raises:
        ConfigurationError: a fraction that is not above 0 and finite.
        ResultsError: no sample was measured there.
    """
    for share in shares:
        check_above("--budget_shares", share, 0.0)
    own = grid.largest if grid.reference is None else grid.reference
    times = grid.total_s[grid.choices.index(own)] if grid.reference_s is None else grid.reference_s
    measured = times[np.isfinite(times)]
    if not len(measured):
        raise ResultsError(f"no sample has a time at {own.key}; measure it, or give --budgets_ms")
    return tuple(sorted({share * float(measured.mean()) for share in shares}))
