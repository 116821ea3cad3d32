"""At which levels a quantity of S settings was repeated, and what each level leaves open of their differences.

Samples and pictures are counted by the contrasts themselves. Beside them a level counts whose units differ between the
settings that are compared: what moved one unit is in all values of the settings that were measured in it, so that no
number of samples takes it out. Such a level is a component: the covariance of what settings' mean logarithms have of
it, and how well that is known. A level without a repetition and without a stated variance leaves everything open.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy import stats

from experiment_core_utils.primitives.texts import counted

# `pass`: a window of all samples of a setting; `load`: a copy of the model from when it is loaded until it is dropped;
# `run`: a process on a machine.
# `batch`: requests that ran together, most of which run together again in the batch of the next sample.
Level = Literal["sample", "picture", "round", "pass", "load", "run", "batch"]
# Windows are repeated in passes; with fewer the spread between them is as good as unknown.
FEWEST_PASSES = 3
# What is suggested: Student's t of three degrees of freedom tells differences of a few windows' spreads.
PASSES_THAT_DECIDE = 4


@dataclass(frozen=True, eq=False)
class Component:
    """What one level adds to settings' mean logarithms."""

    level: Level
    replicates: int  #: units of it that each setting was measured in
    covariance: np.ndarray  #: [S, S]
    degrees: float  #: of freedom; infinite for a variance that was stated
    #: whether each difference's variance is an estimate of its own, of so many degrees, and not one for all
    is_each_alone: bool = False

    @classmethod
    def of_runs(cls, variance: float, runs: Sequence[object]) -> "Component":
        """What the settings of one run share, of runs whose variance is stated; `runs` [S] is each setting's."""
        numbers = {run: number for number, run in enumerate(dict.fromkeys(runs))}
        places = np.array([numbers[run] for run in runs])
        return cls("run", 1, variance * (places[:, None] == places), math.inf)

    @classmethod
    def of_passes(cls, logarithms: np.ndarray, level: Level = "pass") -> "Component":
        """What a setting's windows, or loads, have, by [S, P] logarithms of its mean in each of P passes, two or more.

        Differences are taken within a pass, so that what a whole pass shares is in none of them.
        """
        passes = logarithms.shape[1]
        return cls(level, passes, np.atleast_2d(np.cov(logarithms)) / passes, passes - 1, is_each_alone=True)

    @property
    def deviation(self) -> float:
        """The largest standard deviation that a setting has of it."""
        return math.sqrt(float(self.covariance.diagonal().max(initial=0.0)))

    def variances(self, ones: int | np.ndarray, others: np.ndarray | None = None) -> np.ndarray:
        """[P], of the differences of `ones` and `others`, without any of each setting."""
        own = np.diag(self.covariance)
        others = np.arange(len(own)) if others is None else others
        return np.asarray(np.maximum(own[ones] + own[others] - 2 * self.covariance[ones, others], 0.0))

    def averaged(self, weights: np.ndarray) -> "Component":
        """That of [L, S] weighted means of the settings."""
        return replace(self, covariance=weights @ self.covariance @ weights.T)

    def draw(self, generator: np.random.Generator, num_draws: int) -> np.ndarray:
        """[F, S], what settings might have of it.

        Of variances that are estimates of their own it is the mean of all, by Student's t of their degrees.
        """
        size = len(self.covariance)
        drawn = generator.normal(0.0, 1.0, (num_draws, size))
        if not self.is_each_alone:
            values, vectors = np.linalg.eigh(self.covariance)
            return np.asarray(drawn @ (np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T))
        everything = np.arange(size)
        mean = self.variances(everything[:, None], everything).sum() / max(2 * size * (size - 1), 1)
        scales = np.sqrt(self.degrees / generator.chisquare(self.degrees, (num_draws, 1)))
        return np.asarray(math.sqrt(mean) * drawn * scales)


@dataclass(frozen=True)
class Replication:
    """The levels that differences of S settings rest on."""

    levels: tuple[Level, ...] = ("sample", "picture")
    #: how the levels beyond samples are known: `rounds` (nothing to know), `passes`, `loads`, `runs` (rounds of several
    #: runs, whose variance is stated), `unknown` or `open_loop`
    source: str = "rounds"
    components: tuple[Component, ...] = ()
    #: a predicate of the quantity: what was not repeated though it varies between settings, and what would decide
    undecided: str | None = None

    @property
    def is_open_loop(self) -> bool:
        """Whether requests arrived at a rate and waited for each other."""
        return self.source == "open_loop"

    @property
    def degrees(self) -> float:
        """The fewest degrees of freedom of its components; infinite without one."""
        return min((each.degrees for each in self.components), default=math.inf)

    @property
    def is_each_alone(self) -> bool:
        """Whether a component's variance is another estimate for each difference."""
        return any(each.is_each_alone for each in self.components)

    def variances(self, ones: int | np.ndarray, others: np.ndarray | None = None) -> np.ndarray | float:
        """[P], what its components add to those of the differences of `ones` and `others`; 0 without a component."""
        return sum((each.variances(ones, others) for each in self.components), 0.0)

    def variances_alone(self, num_settings: int) -> np.ndarray:
        """[S], what they add to that of each setting's own mean."""
        return sum((np.diag(each.covariance) for each in self.components), np.zeros(num_settings))

    def at(self, kept: Sequence[int] | np.ndarray) -> "Replication":
        """Of these settings alone."""
        if not self.components:
            return self
        size = len(self.components[0].covariance)
        return self.averaged(np.eye(size)[np.asarray(kept)])

    def averaged(self, weights: np.ndarray) -> "Replication":
        """Of [L, S] weighted means of the settings."""
        return replace(self, components=tuple(each.averaged(weights) for each in self.components))

    def factors(self, one: int, tail: float) -> np.ndarray | float:
        """[S], what a ratio of this setting and each is above by chance with probability `tail`, at least 1."""
        if not self.components:
            return 1.0
        return np.asarray(np.exp(float(stats.t.isf(tail, self.degrees)) * np.sqrt(self.variances(one))))

    def draw(self, generator: np.random.Generator, num_draws: int, num_settings: int) -> np.ndarray:
        """[B, S], what settings might have of all components."""
        drawn = (each.draw(generator, num_draws) for each in self.components)
        return sum(drawn, np.zeros((num_draws, num_settings)))

    def fields(self) -> dict[str, float | str | None]:
        """As JSON has it: the largest standard deviation of a setting, null where it is not known, degrees, source."""
        std = None if self.undecided is not None else math.hypot(*(each.deviation for each in self.components))
        degrees = 1 if self.undecided is not None else self.degrees
        return {"std": std, "degrees": degrees if math.isfinite(degrees) else None, "source": self.source}

    def level_fields(self) -> dict[str, Any]:
        """As JSON has it beside `fields`: the levels, each component's figures, and what is left open."""
        return {
            "levels": list(self.levels),
            "components": [
                {
                    "level": each.level,
                    "replicates": each.replicates,
                    "std": each.deviation,
                    "degrees": each.degrees if math.isfinite(each.degrees) else None,
                }
                for each in self.components
            ],
            "undecided": self.undecided,
        }


IN_ROUNDS = Replication(("sample", "picture", "round"))
COUNTED = Replication()  # what formulas give of a sample is the same in every run
UNKNOWN = Replication(
    source="unknown", undecided="of settings that were measured one after another shows no change of the machine"
)
OPEN_LOOP = Replication(source="open_loop", undecided="is of requests that came at a rate and waited for each other")


def in_passes(means: Sequence[Sequence[float]]) -> Replication:
    """Of quantities that are parts of windows over all samples, one window of a setting in a pass.

    Args:
        means: of each setting, its mean over samples in each pass, above 0, in the order of passes; those that all
            settings have count.
    """
    passes = min(map(len, means), default=0)
    if passes < FEWEST_PASSES:
        return Replication(
            ("sample", "picture"),
            "passes",
            undecided=f"is of {counted(passes, 'pass') if passes else 'no known pass'} of windows that a setting's "
            f"samples share, and a verdict needs {FEWEST_PASSES}: {PASSES_THAT_DECIDE} or more tell differences of a "
            "few percent",
        )
    logarithms = np.log([own[:passes] for own in means])
    return Replication(("sample", "picture", "pass"), "passes", (Component.of_passes(logarithms),))


def in_loads(means: Sequence[Sequence[float]]) -> Replication:
    """Of times that are of one load of the model in each pass.

    Args:
        means: of each setting, the mean over samples of the logarithm of the run in each pass, all of as many passes.
    """
    loads = min(map(len, means), default=0)
    if loads < FEWEST_PASSES:
        return Replication(
            ("sample", "picture"),
            "loads",
            undecided=f"is of {counted(loads, 'load')} of each copy of the model, and a verdict needs {FEWEST_PASSES}; "
            f"give --num_runs_per_sample {PASSES_THAT_DECIDE}",
        )
    component = Component.of_passes(np.array([own[:loads] for own in means]), "load")
    return Replication(("sample", "picture", "load"), "loads", (component,))


def over_batches(within: Replication, logarithms: np.ndarray, batch_sizes: np.ndarray) -> Replication:
    """The same of batches that overlap: of B requests each has B - 1 that are in the next one.

    Where a batch takes as long as the sum over its requests, its logarithm varies by 1 / sqrt(B) of theirs from sample
    to sample, and the mean over samples as much as theirs: B times what samples show of its variance.

    Args:
        logarithms: [S, n], of each sample's batch at each setting; nan where there is none.
        batch_sizes: [S], B of each setting.
    """
    known = logarithms[:, np.isfinite(logarithms).all(axis=0)]
    number = known.shape[1]
    if batch_sizes.max(initial=1) == 1 or number < 2:
        return within
    roots = np.sqrt(batch_sizes)
    covariance = np.atleast_2d(np.cov(known)) / number * (np.outer(roots, roots) - 1)
    component = Component("batch", number, covariance, number - 1)
    return replace(within, levels=(*within.levels, "batch"), components=(*within.components, component))


def across_runs(within: Replication, variance: float, runs: Sequence[object]) -> Replication:
    """The same of settings that were measured in several runs, whose variance is stated; `runs` [S] is each one's."""
    if len(set(runs)) < 2:
        return within
    component = Component.of_runs(variance, runs)
    source = "runs" if within.source == "rounds" else within.source
    return replace(within, source=source, components=(*within.components, component))
