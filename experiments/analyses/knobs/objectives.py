"""Accuracy and cost of each setting of a task on the same samples, with paired bootstrap draws.

Draws are a bootstrap over pictures: in each draw all settings get the same pictures, so that what is common to them (a
hard picture, a long answer) does not blur their differences. Pictures with times and those without are drawn apart,
each as many as there are, so that every draw has times. A draw says how the figures would differ had other samples of
the task been drawn. Costs also get what the levels beyond samples (windows, settings one after another, runs) may have
added to a setting (`Replication`); in rounds all settings have it alike.

Whether a setting is better than another is not read off draws, which call too many equal percentiles different, but
tested: means by the logarithms of their samples' costs and accuracies by their scores, all pairs of settings together
(`experiment_core_utils/primitives/contrasts.py`), percentiles by an exact test of pairs
(`experiments/fitting/verdicts.py`).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from scipy import stats

from experiment_core_utils.primitives.contrasts import ACCURACY_MARGIN, PairedContrasts, ScoreContrasts
from experiment_core_utils.primitives.replication import COUNTED, Replication, over_batches
from experiment_core_utils.primitives.statistics import (
    CONFIDENCE,
    bounded_mean_intervals,
    percentiles_over_runs,
    positive_interval,
)
from experiment_core_utils.primitives.texts import all_of
from experiments.analyses.knobs.grid import KnobPoint, TaskGrid
from experiments.analyses.limits import draws_for
from experiments.fitting.intervals import draw_counts
from experiments.fitting.verdicts import (
    TAIL,
    cluster_sums,
    fewest_for,
    first_of_each,
    means_and_errors,
    tail_interval,
    tail_p_values,
)

Statistic = Literal["mean", "p95", "p99"]
PERCENT = {"p95": 95.0, "p99": 99.0}


@dataclass(frozen=True)
class Cost:
    """A kind of cost: `quantity` names the array of a grid, `statistic` how it is taken over samples."""

    name: str
    quantity: Literal["total_ms", "energy_j", "flops", "memory_bytes"]
    statistic: Statistic
    unit: str
    label: str


LATENCY_MEAN = Cost("latency_mean", "total_ms", "mean", "ms", "mean end-to-end latency")
LATENCY_P95 = Cost("latency_p95", "total_ms", "p95", "ms", "P95 of end-to-end latency")
LATENCY_P99 = Cost("latency_p99", "total_ms", "p99", "ms", "P99 of end-to-end latency")
ENERGY = Cost("energy", "energy_j", "mean", "J", "mean energy of a request")
FLOPS = Cost("flops", "flops", "mean", "FLOPs", "mean operations of a request")
MEMORY = Cost("memory", "memory_bytes", "mean", "bytes", "weights, KV cache and activations by formula")
COSTS = {of.name: of for of in (LATENCY_MEAN, LATENCY_P95, LATENCY_P99, ENERGY, FLOPS, MEMORY)}
TAIL_LATENCIES = {95: LATENCY_P95, 99: LATENCY_P99}
WHY_NONE = {
    "total_ms": "no setting has a sample with a time: all were answered in batches",
    "energy_j": "no sample has an energy: the run was without --energy, or nothing measured power",
    "flops": "no sample has a number of operations: a table contains none, and not every architecture has formulas",
    "memory_bytes": "no setting has counted memory: a table contains none, and not every architecture has formulas",
}


@dataclass(frozen=True)
class Objectives:
    """S settings on the samples that all of them have, and B draws of them."""

    task: str
    best: float
    of: Cost
    points: tuple[KnobPoint, ...]
    left_out: dict[str, str]  #: settings without a sample that has the score or the cost -> why
    num_score_samples: int  #: samples on which all S settings have a score; `accuracy` is their mean
    num_cost_samples: int  #: the same of the cost
    num_cost_pictures: int
    num_pictures: int
    num_dropped_samples: int  #: samples that have a score at some of the S settings and not at others
    accuracy: np.ndarray  #: [S]
    cost: np.ndarray  #: [S]
    accuracy_draws: np.ndarray  #: [B, S]
    cost_draws: np.ndarray  #: [B, S]
    unseen_accuracy: np.ndarray  #: [B, S], on the samples that the draw left out; nan where it left out none
    replication: Replication  #: the levels that differences of costs rest on
    scores: np.ndarray  #: [S, n], of the samples on which all have one
    clusters: np.ndarray  #: [n], the number of each of these samples' picture
    sample_costs: np.ndarray  #: [S, m], of the samples on which all have one; of a percentile that of the first run
    log_costs: np.ndarray  #: [S, m], of these samples the mean over runs of the logarithm
    cost_clusters: np.ndarray  #: [m], the number of each of these samples' picture
    independent: str = "pictures"  #: as in `TaskGrid`
    score_name: str = "accuracy"  #: as in `TaskGrid`

    @property
    def have_waited(self) -> bool:
        """Whether the costs are of requests that waited for each other, which no draw of samples is true to."""
        return self.replication.is_open_loop

    @property
    def no_verdict(self) -> str | None:
        """The reason why no setting is said to cost less than another: a level that was not repeated, or too few
        pictures; None where there is none.
        """
        if self.replication.undecided is not None:
            return f"{self.of.label} {self.replication.undecided}"
        fewest = fewest_for(PERCENT.get(self.of.statistic))
        if self.num_cost_pictures >= fewest:
            return None
        return f"{self.of.label} needs {fewest} {self.independent} for a verdict and has {self.num_cost_pictures}"

    @property
    def reference(self) -> int | None:
        """The place of the model as it is, the first of several sweeps; None where it was not measured."""
        return next((at for at, point in enumerate(self.points) if point.is_reference), None)

    @cached_property
    def of_grid(self) -> "Objectives":
        """The settings that the requested values of the knobs make, without a reference beside them."""
        kept = np.flatnonzero([point.in_grid for point in self.points])
        if len(kept) == len(self.points):
            return self
        by_setting = ("accuracy", "cost", "scores", "sample_costs", "log_costs")
        by_draw = ("accuracy_draws", "cost_draws", "unseen_accuracy")
        parts = {name: getattr(self, name)[kept] for name in by_setting}
        parts |= {name: getattr(self, name)[:, kept] for name in by_draw}
        points, replication = tuple(self.points[at] for at in kept), self.replication.at(kept)
        return replace(self, points=points, replication=replication, **parts)

    @cached_property
    def cost_order(self) -> np.ndarray:
        """The settings [B, S] in each draw's order of cost; equal ones in their own order."""
        return np.argsort(self.cost_draws, axis=1, kind="stable")

    def cost_contrasts(self, reference: int | None = None) -> PairedContrasts:
        """The ratios of the costs of all pairs of settings, or of those with `reference` only, by their logarithms."""
        return PairedContrasts.of(self.log_costs, self.cost_clusters, reference=reference, replication=self.replication)

    def score_contrasts(self, reference: int | None = None) -> ScoreContrasts:
        """The differences in accuracy of all pairs of settings, or of those with `reference` only."""
        return ScoreContrasts.of(self.scores, self.clusters, best=self.best, reference=reference)

    @cached_property
    def _all_costs(self) -> PairedContrasts:
        return self.cost_contrasts()

    @cached_property
    def _all_scores(self) -> ScoreContrasts:
        return self.score_contrasts()

    def cheaper(self, at: int) -> np.ndarray:
        """Whether this setting costs confidently less than each of [S], all pairs of settings together.

        Of a percentile, all pairs with this setting.
        """
        return self.cost_p_values(at) <= 1 - CONFIDENCE

    def accuracy_p_values(self, at: int) -> np.ndarray:
        """[S], the p-value that this setting is not more accurate than each, adjusted for all pairs of settings."""
        return self._all_scores.p_values(at)

    def not_worse_p_values(self, at: int, others: np.ndarray) -> np.ndarray:
        """[P], the p-value that this setting is worse than each of others [P] by ACCURACY_MARGIN or more, adjusted for
        all pairs of settings.
        """
        return self._all_scores.pair_p_values(at, others, ACCURACY_MARGIN * self.best)

    def cost_p_values(self, at: int) -> np.ndarray:
        """[S], the p-value that this setting does not cost less than each, adjusted as `cheaper`; 1 without a verdict.

        Where the mean of the logarithms is lower and the mean is not, neither setting is said to cost less.
        """
        found = np.ones(len(self.points))
        higher = np.flatnonzero(self.cost[at] < self.cost)
        if self.no_verdict is not None or not len(higher):
            return found
        if self.of.statistic == "mean":
            found[higher] = self._all_costs.p_values(at)[higher]
            return found
        # Either of the two may have been the luckier one, in each comparison with this setting.
        comparisons = 2 * (len(self.points) - 1)
        alone = first_of_each(self.cost_clusters)
        factors = np.broadcast_to(self.replication.factors(at, TAIL / comparisons), len(self.points))[higher]
        others = self.sample_costs[higher][:, alone] / factors[:, None]
        p_values = tail_p_values(self.sample_costs[at][alone], others, PERCENT[self.of.statistic])
        found[higher] = np.minimum(comparisons * p_values, 1.0)
        return found

    def told_apart(self) -> np.ndarray:
        """[S, S], whether one of two settings costs confidently less than the other."""
        is_cheaper = np.stack([self.cheaper(at) for at in range(len(self.points))])
        return np.asarray(is_cheaper | is_cheaper.T)

    def cost_intervals(self) -> list[tuple[float, float] | None]:
        """95 % interval of each setting's cost, above 0: of a mean by Student's t over pictures, of a percentile by
        order statistics of one sample of each picture; None where there are too few pictures, or samples waited.
        """
        if self.have_waited:
            return [None] * len(self.points)
        if self.of.statistic != "mean":
            alone = self.sample_costs[:, first_of_each(self.cost_clusters)]
            found = [tail_interval(row, PERCENT[self.of.statistic]) for row in alone]
            # The cost is of all runs, of which these are some.
            return [
                None if ends is None else (min(ends[0], cost), max(ends[1], cost))
                for ends, cost in zip(found, self.cost.tolist(), strict=True)
            ]
        means, errors, degrees = means_and_errors(self.sample_costs, self.cost_clusters)
        if degrees < 1 or self.replication.undecided is not None:
            return [None] * len(means)
        own = np.sqrt(self.replication.variances_alone(len(means)))
        half = stats.t.isf(TAIL, min(degrees, self.replication.degrees)) * np.hypot(errors, means * own)
        return [positive_interval(*each) for each in zip(means.tolist(), half.tolist(), strict=True)]

    def accuracy_intervals(self) -> list[tuple[float, float]]:
        """95 % interval of each setting's accuracy, by the function that every accuracy's is by."""
        return bounded_mean_intervals(*cluster_sums(self.scores, self.clusters), self.best)


@dataclass(frozen=True)
class NoObjectives:
    """The reason why a task has no accuracy against this cost."""

    task: str
    of: Cost
    reason: str


def objectives(grid: TaskGrid, of: Cost, num_draws: int, seed: int) -> Objectives | NoObjectives:
    """Accuracy and cost of the settings that have both, on the samples that all of them have.

    Mean latencies are compared by `log_times` of the grid, other costs by the logarithm of each sample's cost.
    """
    costs = getattr(grid, of.quantity)
    if costs is None:
        return NoObjectives(grid.task, of, WHY_NONE[of.quantity])
    has_score, has_cost = np.isfinite(grid.scores).any(axis=1), np.isfinite(costs).any(axis=1)
    kept = np.flatnonzero(has_score & has_cost)
    left_out = {
        grid.points[at].key: "no sample has a score" if not has_score[at] else f"no sample has {of.label}"
        for at in range(len(grid.points))
        if at not in kept
    }
    if not has_score.any():
        return NoObjectives(grid.task, of, f"no sample has a score by {grid.metric}")
    if not len(kept):
        return NoObjectives(grid.task, of, WHY_NONE[of.quantity])
    scores, costs = grid.scores[kept], costs[kept]
    scored, paid = np.isfinite(scores).all(axis=0), np.isfinite(costs).all(axis=0)
    if not scored.any() or not paid.any():
        what = "a score" if not scored.any() else of.label
        everywhere = f"at {all_of(len(kept), 'setting')}"
        return NoObjectives(grid.task, of, f"no sample has {what} {everywhere}, so none can be paired")
    counts = draw_counts(grid.pictures, scored + 2 * paid, draws_for(len(kept), num_draws), seed)
    accuracy_draws = counts[:, scored] @ scores[:, scored].T / counts[:, scored].sum(axis=1, keepdims=True)
    has_runs = of.quantity == "total_ms" and of.statistic != "mean" and grid.runs_ms is not None
    runs = grid.runs_ms[:, kept][:, :, paid] if has_runs and grid.runs_ms is not None else costs[None][:, :, paid]
    cost_draws = _over_draws(runs, counts[:, paid], of.statistic)
    with np.errstate(divide="ignore"):
        logarithms = grid.log_times[kept] if of.quantity == "total_ms" else np.log(costs)
    measured = {"total_ms": grid.times, "energy_j": grid.energies}
    replication = measured.get(of.quantity, COUNTED).at(kept)
    if of.quantity in measured:
        replication = over_batches(replication, logarithms, grid.batch_sizes[kept])
    if replication.components:
        # What may be so of one setting's costs, in each draw.
        cost_draws = cost_draws * np.exp(replication.draw(np.random.default_rng(seed), len(cost_draws), len(kept)))
    num_cost_pictures = len({picture for picture, has in zip(grid.pictures, paid, strict=True) if has})
    return Objectives(
        task=grid.task,
        best=grid.best,
        of=of,
        points=tuple(grid.points[at] for at in kept),
        left_out=left_out,
        num_score_samples=int(scored.sum()),
        num_cost_samples=int(paid.sum()),
        num_cost_pictures=num_cost_pictures,
        independent=grid.independent,
        score_name=grid.score_name,
        num_pictures=len({picture for picture, has in zip(grid.pictures, scored, strict=True) if has}),
        num_dropped_samples=int((np.isfinite(scores).any(axis=0) & ~scored).sum()),
        accuracy=scores[:, scored].mean(axis=1),
        cost=_statistic(runs, of.statistic),
        accuracy_draws=accuracy_draws,
        cost_draws=cost_draws,
        unseen_accuracy=_unseen(scores[:, scored], counts[:, scored]),
        replication=replication,
        scores=scores[:, scored],
        clusters=np.unique(np.asarray(grid.pictures, dtype=str)[scored], return_inverse=True)[1],
        sample_costs=runs[0],
        log_costs=logarithms[:, paid],
        cost_clusters=np.unique(np.asarray(grid.pictures, dtype=str)[paid], return_inverse=True)[1],
    )


def _statistic(runs: np.ndarray, statistic: Statistic) -> np.ndarray:
    """The statistic [S] of values [R, S, n], of which the R runs of a sample together weigh as much as one; of a mean R
    is 1."""
    if statistic == "mean":
        return np.asarray(runs[0].mean(axis=-1))
    if np.isfinite(runs).all():
        return np.asarray(np.percentile(runs, PERCENT[statistic], axis=(0, 2)))
    return np.array([percentiles_over_runs(runs[:, at], [PERCENT[statistic]])[0] for at in range(runs.shape[1])])


def _over_draws(runs: np.ndarray, counts: np.ndarray, statistic: Statistic) -> np.ndarray:
    """The statistic [B, S] of values [R, S, n] over draws."""
    if statistic == "mean":
        return np.asarray(counts @ runs[0].T / counts.sum(axis=1, keepdims=True))
    places = np.arange(runs.shape[2])
    return np.stack([_statistic(runs[:, :, np.repeat(places, row)], statistic) for row in counts])


def _unseen(scores: np.ndarray, counts: np.ndarray) -> np.ndarray:
    unseen = (counts == 0).astype(np.float64)
    number = unseen.sum(axis=1, keepdims=True)
    return np.where(number > 0, unseen @ scores.T / np.maximum(number, 1), np.nan)
