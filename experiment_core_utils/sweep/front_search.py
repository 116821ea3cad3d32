"""The rules of the front search: which settings are measured next, and which form the front.

A race of settings on the same samples (O. Maron and A. Moore, "Hoeffding races", NIPS 6 (1993)). All start on the first
few. After each round those leave that another one beats, and the others get half as many samples again, until the time
is used up or every pair is settled.

A setting beats another where it is faster, by the mean logarithm of time at the one-sided level FASTER, and more
accurate, at MORE_ACCURATE: Student's t over pictures, of the samples that all settings in the race have. These are
levels of one pair at one look. How often a setting of the true front leaves by chance was measured
(`experiments/benchmarks/pareto_search.py`).
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from experiment_core_utils.primitives.contrasts import PairedContrasts, ScoreContrasts
from experiment_core_utils.primitives.statistics import fraction_of, on_front

StopReason = Literal["settled", "budget", "samples"]
FASTER, MORE_ACCURATE = 0.025, 0.1
LARGEST_SHARE = 1 / 3  # of the full grid's model time, as estimated from what was measured
FIRST_SAMPLES = 50  # most samples of the first round
GROWTH = 1.5  # samples of a setting after a round over those before it


@dataclass(frozen=True)
class Observation:
    """One sample at one setting."""

    #: None where the metric has no value for it. It must not depend on which other samples were scored.
    score: float | None
    seconds: float  #: the latency that the front is about
    cost_s: float  #: model time that it took to measure, all runs together
    picture: Hashable  #: what samples share that are not independent


Round = dict[str, tuple[int, ...]]
Measure = Callable[[Mapping[str, Sequence[int]]], Mapping[str, Mapping[int, Observation]]]


@dataclass(frozen=True)
class Survivor:
    """A setting that stayed to the end."""

    key: str
    num_samples: int
    accuracy: float | None  #: mean score; None where no sample has one
    seconds: float  #: mean latency


@dataclass(frozen=True)
class Removal:
    """A setting that left, and the setting that beat it."""

    key: str
    by: str
    round: int  #: the round after which it left, from 1
    num_samples: int  #: of the comparison
    gain: float  #: accuracy of `by` minus its own
    time_ratio: float  #: time of `by` over its own, geometric mean


@dataclass(frozen=True)
class SearchResult:
    """What the search found, and what it took."""

    #: of those that stayed, the ones that no other one is better than in both means, fastest first
    front: tuple[Survivor, ...]
    undecided: tuple[Survivor, ...]  #: the others that stayed: a front setting looks better, but not surely
    eliminated: tuple[Removal, ...]  #: in order of leaving
    failed: tuple[str, ...]  #: settings that could not be run
    cost_s: float  #: model time used
    full_cost_s: float  #: model time that all settings would take on all samples, estimated from those measured here
    rounds: tuple[Mapping[str, int], ...]  #: what each round requested, as setting -> number of new samples
    #: of each two that stayed one is surely faster and the other more accurate (`settled`), the time is used up
    #: (`budget`), or every one of them has all samples (`samples`)
    stopped: StopReason

    @property
    def share(self) -> float | None:
        """Model time used, of the full grid's; None where no sample ran."""
        return fraction_of(self.cost_s, self.full_cost_s)


class ParetoSearch:
    """The state of a search: `next_round` says what to measure, `record` takes it in, until `next_round` is empty.

    The same observations always lead to the same rounds, so a search that was interrupted resumes when it gets the
    same measurements again.

    Args:
        sample_ids: in the order in which they are to be used, which must be random.
        best: the metric's highest score; the lowest is 0.
    """

    def __init__(self, settings: Sequence[str], sample_ids: Sequence[int], best: float = 1.0) -> None:
        if not settings or not sample_ids:
            raise ValueError("a search needs at least one setting and one sample")
        if len(set(settings)) != len(settings) or len(set(sample_ids)) != len(sample_ids):
            raise ValueError("a setting or a sample is given twice")
        self._keys, self._ids, self._best = tuple(settings), tuple(sample_ids), best
        self._place = {sample_id: place for place, sample_id in enumerate(sample_ids)}
        self._numbers: dict[Hashable, int] = {}
        # The number of each sample's picture, 0 until it was seen; what was not measured counts nowhere.
        self._pictures = np.zeros(len(sample_ids), dtype=np.int64)
        self._scores, self._seconds, self._costs = np.full((3, len(settings), len(sample_ids)), np.nan)
        self._requested = np.zeros(len(settings), dtype=np.int64)
        self._looks = planned_looks(len(sample_ids))
        self._active = list(range(len(settings)))
        self._eliminated: list[Removal] = []
        self._failed: list[str] = []
        self._rounds: list[dict[str, int]] = []
        self._stopped: StopReason | None = None
        self._pending = self._up_to(self._looks[0])

    def next_round(self) -> Round:
        """Samples that each setting is to be measured on next; none where the search is over."""
        return dict(self._pending)

    def record(self, observations: Mapping[str, Mapping[int, Observation]]) -> None:
        """Take in what `next_round` requested; a sample that failed is missing, a setting that failed has none."""
        if observations.keys() != self._pending.keys():
            raise ValueError("record takes exactly the settings that next_round returned")
        for key, seen in observations.items():
            if not seen.keys() <= set(self._pending[key]):
                raise ValueError(f"{key}: these are not the samples of next_round")
            row = self._keys.index(key)
            for sample_id, one in seen.items():
                place = self._place[sample_id]
                self._scores[row, place] = np.nan if one.score is None else one.score
                self._seconds[row, place], self._costs[row, place] = one.seconds, one.cost_s
                self._pictures[place] = self._numbers.setdefault(one.picture, len(self._numbers))
            self._requested[row] += len(self._pending[key])
        self._rounds.append({key: len(ids) for key, ids in self._pending.items()})
        self._remove_failed([key for key, seen in observations.items() if not seen])
        self._plan(is_settled=self._remove_beaten())

    def result(self) -> SearchResult:
        """What is known; before the end of the search raises ValueError."""
        if self._stopped is None:
            raise ValueError("the search is not over; call next_round")
        survivors = [self._survivor(row) for row in self._active]
        on_front = {each.key for each in front_of(survivors)}
        return SearchResult(
            front=tuple(sorted((each for each in survivors if each.key in on_front), key=lambda each: each.seconds)),
            undecided=tuple(each for each in survivors if each.key not in on_front),
            eliminated=tuple(self._eliminated),
            failed=tuple(self._failed),
            cost_s=float(np.nansum(self._costs)),
            full_cost_s=self._full_cost(),
            rounds=tuple(self._rounds),
            stopped=self._stopped,
        )

    def _survivor(self, row: int) -> Survivor:
        scores, seconds = self._scores[row], self._seconds[row]
        accuracy = float(np.nanmean(scores)) if np.isfinite(scores).any() else None
        return Survivor(self._keys[row], int(np.isfinite(seconds).sum()), accuracy, float(np.nanmean(seconds)))

    def _remove_failed(self, failed: Sequence[str]) -> None:
        """Settings that failed are out of the race, and those that one of them beat are back in it."""
        self._failed.extend(failed)
        back = [each.key for each in self._eliminated if each.by in failed]
        self._eliminated = [each for each in self._eliminated if each.by not in failed]
        stay = {self._keys[row] for row in self._active}.union(back).difference(failed)
        self._active = [row for row, key in enumerate(self._keys) if key in stay]

    def _remove_beaten(self) -> bool:
        """Remove settings that another one beats; whether of each two of the others one is faster and the other more
        accurate.
        """
        rows = np.array(self._active)
        if len(rows) < 2:
            return True
        times = PairedContrasts.of(np.log(self._seconds[rows]), self._pictures, reference=0)
        scores = ScoreContrasts.of(self._scores[rows], self._pictures, best=self._best, reference=0)
        faster, better = surely_better(times, FASTER), surely_better(scores, MORE_ACCURATE)
        beats = faster & better
        stay = ~beats.any(axis=0)
        for at in np.flatnonzero(~stay):
            # The most accurate; rather one that stays.
            by = max(np.flatnonzero(beats[:, at]), key=lambda one: (stay[one], scores.means[one]))
            gain, ratio = scores.difference(int(by), int(at)), times.ratio(int(by), int(at))
            names = self._keys[rows[at]], self._keys[rows[by]]
            self._eliminated.append(Removal(*names, len(self._rounds), scores.num_samples, gain, ratio))
        self._active = rows[stay].tolist()
        trades = (faster & better.T)[np.ix_(stay, stay)]
        return bool((trades | trades.T | np.eye(len(trades), dtype=bool)).all())

    def _plan(self, *, is_settled: bool) -> None:
        """The next round: every setting in the race to the same number of samples, as far as the time goes."""
        self._pending = {}
        total, requested = len(self._ids), self._requested[self._active]
        if is_settled:
            self._stopped = "settled"
        elif (requested == total).all():
            self._stopped = "samples"
        else:
            self._pending = self._up_to(self._affordable(next(n for n in self._looks if n > requested.min())))
            self._stopped = None if self._pending else "budget"

    def _up_to(self, target: int) -> Round:
        """What takes every setting in the race to that many samples."""
        due = [row for row in self._active if self._requested[row] < target]
        return {self._keys[row]: self._ids[self._requested[row] : target] for row in due}

    def _affordable(self, target: int) -> int:
        """The most samples up to the target to which the time left takes every setting in the race."""
        left = LARGEST_SHARE * self._full_cost() - float(np.nansum(self._costs))
        means, requested = np.nanmean(self._costs[self._active], axis=1), self._requested[self._active]
        while target > 0 and float(means @ np.maximum(target - requested, 0)) > left:
            target -= 1
        return target

    def _full_cost(self) -> float:
        """Cost of a full run, from each setting's cost in proportion to that of the race on the same samples: a setting
        that left early was measured on few, which may have been cheap ones (a ratio estimate; W. Cochran, "Sampling
        Techniques", 3rd ed. 1977).
        """
        race = self._costs[self._active].sum(axis=0) if self._active else np.full(len(self._ids), np.nan)
        per_sample = 0.0
        for costs in self._costs[np.isfinite(self._costs).any(axis=1)]:
            shared = np.isfinite(costs + race)
            scale = np.nanmean(race) / race[shared].mean() if shared.any() else 1.0
            per_sample += float((costs[shared] if shared.any() else costs[np.isfinite(costs)]).mean() * scale)
        return len(self._ids) * per_sample


def surely_better(contrasts: PairedContrasts | ScoreContrasts, level: float) -> np.ndarray:
    """[S, S], whether a setting is better than another by Student's t of this pair alone, one-sided; none without a
    verdict.
    """
    if contrasts.no_verdict is not None:
        return np.zeros((len(contrasts.means),) * 2, dtype=bool)
    ahead = contrasts.means[:, None] - contrasts.means
    errors = np.stack([contrasts.errors(at) for at in range(len(ahead))])
    limit = t_quantile(level, contrasts.num_pictures - 1)
    return np.asarray((-ahead if contrasts.better_is_lower else ahead) > limit * errors)


def t_quantile(level: float, degrees: int) -> float:
    """What Student's t exceeds with probability `level`."""
    return -float(stdtrit(degrees, level))


def front_of(survivors: Sequence[Survivor]) -> list[Survivor]:
    """Settings that no other one is at least as good as in both means and better in one; none without an accuracy."""
    scored = [each for each in survivors if each.accuracy is not None]
    is_on = on_front(np.array([each.seconds for each in scored]), np.array([each.accuracy for each in scored]))
    return [each for each, has in zip(scored, is_on, strict=True) if has]


def run_search(search: ParetoSearch, measure: Measure) -> SearchResult:
    """Ask and record until the search is over."""
    while requested := search.next_round():
        search.record(measure(requested))
    return search.result()


def random_order(sample_ids: Sequence[int], seed: int) -> tuple[int, ...]:
    """The samples in a random order; the same for the same samples in whatever order they are given."""
    ids = np.array(sorted(sample_ids))
    return tuple(int(each) for each in np.random.RandomState(seed).permutation(ids))


def planned_looks(num_samples: int) -> tuple[int, ...]:
    """Samples that a setting has after each round: up to FIRST_SAMPLES, which take at most half of the time that there
    is, then by GROWTH up to all.
    """
    looks = [min(max(min(FIRST_SAMPLES, int(LARGEST_SHARE * num_samples / 2)), 2), num_samples)]
    while looks[-1] < num_samples:
        looks.append(min(math.ceil(looks[-1] * GROWTH), num_samples))
    return tuple(looks)
