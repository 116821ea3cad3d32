"""The rules of the front search: which settings are measured next, and which form the front.

A racing search of the accuracy-latency front on the same samples. All settings start on the first few; after each
round some leave and the others get more, until the time is used up or every place is known. Two ways to leave:

**Eliminated.** Setting t *dominates* s when, on the samples that both have, t is confidently faster and confidently
not less accurate by more than `margin`: one-sided bounds on the mean of paired differences, the spread taken between
pictures. A setting is eliminated only for one that stays: where the witness of an earlier elimination would go itself,
it goes only if another setting that stays dominates the earlier one too. So every eliminated setting names a witness
that was not eliminated, is faster, and is less accurate by at most `margin`, and margins do not add up.

**Set aside.** A setting that another one most likely dominates outright (faster as above, and not less accurate at the
one-sided level `doubt`) gets no more samples, so that the time goes where the front is decided. Nothing is proven of
it, and the result says so.

How sure. An ordered pair of settings is looked at once a round, and there are at most `most_rounds` of them, a number
fixed before the first. Each look is at level `alpha` / `most_rounds`, so that a given setting eliminates another one
wrongly with probability at most `alpha`, whenever the search stops (O. Dunn, JASA 56 (1961)). That a pair takes two
bounds costs nothing: a wrong leave needs the wrong one of them to fail (an intersection-union test; R. Berger,
Technometrics 24 (1982)). This holds for a pair, not for all of them together: for S settings, `alpha` / (S (S - 1))
holds for the whole search, and eliminates hardly any at the numbers of samples that a search can pay. The levels hold
as far as means over that many pictures follow Student's t.

Sources: racing on the same samples, O. Maron and A. Moore, "Hoeffding races", NIPS 6 (1993); elimination with bounds
that hold at every look, E. Even-Dar, S. Mannor and Y. Mansour, JMLR 7 (2006); fronts of several objectives, P. Auer,
C.-K. Chiang, R. Ortner and M. Drugan, "Pareto front identification from stochastic bandit feedback", AISTATS (2016).
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Literal

import numpy as np
from scipy.special import ndtri, stdtrit

from experiment_core_utils.primitives.statistics import fraction_of, on_front

StopReason = Literal["settled", "budget", "samples"]
# The full grid's time is taken as low as it is with this probability only, so that the search keeps to its budget.
BUDGET_DOUBT = 0.002


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
class SearchRules:
    """What the search may spend, and how sure it has to be."""

    margin: float = 0.01  #: accuracy that a faster setting may be worse by and still dominate, as a fraction of `best`
    alpha: float = 0.05  #: probability that a given setting eliminates another one wrongly, over all rounds
    doubt: float = 0.2  #: one-sided level at which a setting that looks dominated is set aside
    first_samples: int = 50  #: samples of the first round
    growth: float = 1.5  #: samples of a setting after a round over those before it
    share: float = 1 / 3  #: most model time to use, of what the full grid would take
    best: float = 1.0  #: the metric's highest score; the lowest is 0

    def __post_init__(self) -> None:
        if not (0 <= self.margin < 1 and 0 < self.alpha < 1 and 0 < self.doubt < 0.5 and 0 < self.share <= 1):
            raise ValueError("margin, alpha and share must be between 0 and 1, and doubt below a half")
        if self.first_samples < 2 or self.growth <= 1 or self.best <= 0:
            raise ValueError("at least 2 samples at first, each round more than the one before, a best score above 0")


@dataclass(frozen=True)
class MeanBound:
    """Mean of paired differences with its one-sided bounds."""

    n: int
    mean: float
    se: float  #: standard error of the mean
    half: float  #: distance from the mean to either bound

    @property
    def low(self) -> float:
        """The mean is confidently not below this."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The mean is confidently not above this."""
        return self.mean + self.half


@dataclass(frozen=True)
class PairVerdict:
    """A challenger against a setting."""

    dominates: bool  #: the challenger is confidently faster and not less accurate by more than the margin
    likely: bool  #: it is confidently faster and, at the level `doubt`, not less accurate at all
    cleared: bool  #: it is confidently slower, or less accurate by more than the margin: it can no longer dominate


SLOWER = PairVerdict(dominates=False, likely=False, cleared=True)


@dataclass(frozen=True)
class Survivor:
    """A setting that stayed to the end."""

    key: str
    num_samples: int
    accuracy: float | None  #: mean score; None where no sample has one
    seconds: float  #: mean latency
    #: remaining settings without a verdict against it: each may in truth dominate it
    open_against: tuple[str, ...]


@dataclass(frozen=True)
class Removal:
    """A setting that left, and the setting for which it did."""

    key: str
    by: str
    round: int  #: the round after which it left, from 1
    gain: MeanBound  #: accuracy of `by` minus its own, on the samples that both have
    saving_s: MeanBound  #: its time minus that of `by`
    level: float  #: each of the four bounds in `gain` and `saving_s` fails with this probability


@dataclass(frozen=True)
class SearchResult:
    """What the search found, and what it took."""

    #: of those that stayed, the ones that no other one is better than in both means, fastest first
    front: tuple[Survivor, ...]
    #: the others that stayed: a front setting looks better, but not enough to let them go
    undecided: tuple[Survivor, ...]
    set_aside: tuple[Removal, ...]  #: left because another one most likely dominates them; not proven
    eliminated: tuple[Removal, ...]  #: left because another one confidently dominates them
    failed: tuple[str, ...]  #: settings that could not be run
    cost_s: float  #: model time used
    full_cost_s: float  #: model time that all settings would take on all samples, estimated from those measured here
    rounds: tuple[Mapping[str, int], ...]  #: what each round requested, as setting -> number of new samples
    #: no setting that stayed can dominate another (`settled`), the time is used up (`budget`), or every one of them has
    #: all samples (`samples`)
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
    """

    def __init__(self, settings: Sequence[str], sample_ids: Sequence[int], rules: SearchRules) -> None:
        if not settings or not sample_ids:
            raise ValueError("a search needs at least one setting and one sample")
        if len(set(settings)) != len(settings) or len(set(sample_ids)) != len(sample_ids):
            raise ValueError("a setting or a sample is given twice")
        self.rules = rules
        self._ids = tuple(sample_ids)
        self._place = {sample_id: place for place, sample_id in enumerate(sample_ids)}
        self._numbers: dict[Hashable, int] = {}
        # The number of each sample's picture, 0 until it was seen; what was not measured counts nowhere.
        self._clusters = np.zeros(len(sample_ids), dtype=np.int64)
        self._looks = planned_looks(len(sample_ids), rules)
        # One more than planned: the round that the time cuts short.
        self.most_rounds = len(self._looks) + 1
        self.level = rules.alpha / self.most_rounds
        self._order = {key: place for place, key in enumerate(settings)}
        self._scores = {key: np.full(len(sample_ids), np.nan) for key in settings}
        self._seconds = {key: np.full(len(sample_ids), np.nan) for key in settings}
        self._costs = {key: np.full(len(sample_ids), np.nan) for key in settings}
        self._requested = dict.fromkeys(settings, 0)
        self._active = list(settings)
        self._eliminated: dict[str, Removal] = {}
        self._set_aside: dict[str, Removal] = {}
        self._failed: list[str] = []
        self._verdicts: dict[tuple[str, str], PairVerdict] = {}
        self._rounds: list[dict[str, int]] = []
        self._stopped: StopReason | None = None
        self._pending: Round = self._up_to(self._looks[0])

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
            for sample_id, one in seen.items():
                place = self._place[sample_id]
                self._scores[key][place] = np.nan if one.score is None else one.score
                self._seconds[key][place] = one.seconds
                self._costs[key][place] = one.cost_s
                self._clusters[place] = self._numbers.setdefault(one.picture, len(self._numbers))
            self._requested[key] += len(self._pending[key])
        self._rounds.append({key: len(ids) for key, ids in self._pending.items()})
        self._drop([key for key, seen in observations.items() if not seen])
        self._look()
        self._eliminate()
        self._set_likely_aside()
        self._plan()

    def result(self) -> SearchResult:
        """What is known; before the end of the search raises ValueError."""
        if self._stopped is None:
            raise ValueError("the search is not over; call next_round")
        survivors = [self._survivor(key) for key in self._active]
        on_front = {each.key for each in front_of(survivors)}
        return SearchResult(
            front=tuple(sorted((each for each in survivors if each.key in on_front), key=lambda each: each.seconds)),
            undecided=tuple(each for each in survivors if each.key not in on_front),
            set_aside=tuple(self._set_aside.values()),
            eliminated=tuple(self._eliminated.values()),
            failed=tuple(self._failed),
            cost_s=self._used(),
            full_cost_s=self._full_cost(),
            rounds=tuple(self._rounds),
            stopped=self._stopped,
        )

    def _survivor(self, key: str) -> Survivor:
        scores, seconds = self._scores[key], self._seconds[key]
        return Survivor(
            key=key,
            num_samples=int(np.isfinite(seconds).sum()),
            accuracy=float(np.nanmean(scores)) if np.isfinite(scores).any() else None,
            seconds=float(np.nanmean(seconds)),
            open_against=tuple(
                other for other in self._active if other != key and not self._verdicts[other, key].cleared
            ),
        )

    def _drop(self, failed: Sequence[str]) -> None:
        """Settings that failed are out of the race, and those that left for one of them are back in it."""
        self._failed.extend(failed)
        self._active = [key for key in self._active if key not in failed]
        for departures in (self._eliminated, self._set_aside):
            back = [key for key, departure in departures.items() if departure.by in failed]
            self._active.extend(back)
            for key in back:
                del departures[key]
        self._active.sort(key=self._order.__getitem__)

    def _look(self) -> None:
        """Compare every pair of settings that are still in the search."""
        self._verdicts = {pair: self._compare(*pair) for pair in permutations(self._active, 2)}

    def _compare(self, challenger: str, setting: str) -> PairVerdict:
        saving = self._saving(challenger, setting)
        if saving.high < 0:
            return SLOWER
        margin = self.rules.margin * self.rules.best
        gain = self._gain(challenger, setting, self.level)
        return PairVerdict(
            dominates=saving.low > 0 and gain.low >= -margin,
            likely=saving.low > 0 and self._gain(challenger, setting, self.rules.doubt).low >= 0,
            cleared=gain.high < -margin,
        )

    def _gain(self, challenger: str, setting: str, level: float) -> MeanBound:
        """Accuracy of the challenger minus the setting's, on the samples that both have."""
        differences = self._scores[challenger] - self._scores[setting]
        return mean_bound(differences, self._clusters, level, self.rules.best)

    def _saving(self, challenger: str, setting: str) -> MeanBound:
        return mean_bound(self._seconds[setting] - self._seconds[challenger], self._clusters, self.level)

    def _eliminate(self) -> None:
        """Dominated settings leave, each for the undominated one that is most surely as accurate."""
        dominators = self._pairs_where(lambda verdict: verdict.dominates)
        stay = [key for key in self._active if not dominators[key]]
        leaving = {key for key in self._active if any(other in stay for other in dominators[key])}
        for earlier in list(self._eliminated.values()):
            if earlier.by not in leaving:
                continue
            others = [key for key in self._active if key not in leaving and self._compare(key, earlier.key).dominates]
            if others:
                self._eliminated[earlier.key] = self._removal(earlier.key, others, self.level, earlier.round)
            else:
                leaving.discard(earlier.by)
        for key in [key for key in self._active if key in leaving]:
            witnesses = [each for each in dominators[key] if each in stay]
            self._eliminated[key] = self._removal(key, witnesses, self.level, len(self._rounds))
        self._active = [key for key in self._active if key not in leaving]

    def _set_likely_aside(self) -> None:
        """Give no more samples to settings that a remaining one most likely dominates, except to witnesses."""
        likely = self._pairs_where(lambda verdict: verdict.likely)
        witnesses = {removal.by for removal in self._eliminated.values()}
        remaining = [key for key in self._active if not likely[key] or key in witnesses]
        for key in [key for key in self._active if key not in remaining]:
            by = [other for other in likely[key] if other in remaining]
            if by:
                self._set_aside[key] = self._removal(key, by, self.rules.doubt, len(self._rounds))
        self._active = [key for key in self._active if key not in self._set_aside]

    def _pairs_where(self, what: Callable[[PairVerdict], bool]) -> dict[str, list[str]]:
        """For each setting still in the search, the others of which the verdict against it is true."""
        return {
            key: [other for other in self._active if other != key and what(self._verdicts[other, key])]
            for key in self._active
        }

    def _removal(self, key: str, witnesses: Sequence[str], level: float, number: int) -> Removal:
        gains = {witness: self._gain(witness, key, level) for witness in witnesses}
        by = max(gains, key=lambda witness: gains[witness].low)
        return Removal(key, by, number, gains[by], self._saving(by, key), level)

    def _plan(self) -> None:
        """The next round: every setting in the race to the same number of samples, as far as the time goes."""
        self._pending = {}
        total = len(self._ids)
        if all(verdict.cleared for pair, verdict in self._verdicts.items() if set(pair) <= set(self._active)):
            self._stopped = "settled"
        elif all(self._requested[key] == total for key in self._active):
            self._stopped = "samples"
        else:
            reached = max(self._requested[key] for key in self._active)
            self._pending = self._up_to(self._affordable(next((n for n in self._looks if n > reached), total)))
            if not self._pending or len(self._rounds) == self.most_rounds:
                self._pending, self._stopped = {}, "budget"

    def _up_to(self, target: int) -> Round:
        """What takes every setting in the race to that many samples."""
        return {key: self._ids[self._requested[key] : target] for key in self._active if self._requested[key] < target}

    def _affordable(self, target: int) -> int:
        """The most samples up to the target to which the time left takes every setting in the race."""
        left = self.rules.share * self._full_cost() * (1 - self._cost_doubt()) - self._used()
        means = {key: float(np.nanmean(self._costs[key])) for key in self._active}
        while target > 0 and sum(means[key] * max(target - self._requested[key], 0) for key in self._active) > left:
            target -= 1
        return target

    def _used(self) -> float:
        return float(sum(np.nansum(costs) for costs in self._costs.values()))

    def _reference(self) -> np.ndarray:
        """Cost of each sample at all settings in the race together; nan where one of them has none."""
        return np.array([self._costs[key] for key in self._active]).sum(axis=0)

    def _full_cost(self) -> float:
        """Cost of a full run, from each setting's cost in proportion to the reference's on the same samples: a setting
        that left early was
        measured on few, which may have been cheap ones (a ratio estimate; W. Cochran, Sampling techniques, 1977)."""
        ran = [costs for costs in self._costs.values() if np.isfinite(costs).any()]
        per_sample = 0.0
        reference = self._reference() if self._active else np.full(len(self._ids), np.nan)
        for costs in ran:
            shared = np.isfinite(costs) & np.isfinite(reference)
            scale = np.nanmean(reference) / reference[shared].mean() if shared.any() else 1.0
            per_sample += float((costs[shared] if shared.any() else costs[np.isfinite(costs)]).mean() * scale)
        return len(self._ids) * per_sample

    def _cost_doubt(self) -> float:
        """How far the full grid's time may lie below its estimate, as a fraction of it: the bound of the reference's
        mean, times the factor of sampling without replacement."""
        bound = mean_bound(self._reference(), self._clusters, BUDGET_DOUBT)
        return bound.half / bound.mean * math.sqrt(1 - bound.n / len(self._ids)) if bound.n else math.inf


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


def planned_looks(num_samples: int, rules: SearchRules) -> tuple[int, ...]:
    """Samples that a setting has after each round: from the first round's number by the rules' factor up to all.

    The first round takes about half of the time that there is at most, but 2 samples: a spread needs them. So a third
    of the time is not enough to search fewer than 6 samples for each setting.
    """
    looks = [min(max(min(rules.first_samples, int(rules.share * num_samples / 2)), 2), num_samples)]
    while looks[-1] < num_samples:
        looks.append(min(math.ceil(looks[-1] * rules.growth), num_samples))
    return tuple(looks)


def mean_bound(values: np.ndarray, clusters: np.ndarray, level: float, best: float | None = None) -> MeanBound:
    """Mean of paired differences with bounds that each fail with probability `level`; values that are nan do not count.

    Student's t over clusters (the sandwich estimate of the mean's variance), infinite for fewer than 2 clusters.

    Args:
        best: for scores in [0, `best`]: differences that have all been equal so far need not stay so. z^2 / 8 samples
            better and as many worse by `best`, and z^2 / 4 equal ones, are added to those seen, z being the normal
            quantile of `level`; at 95 % that is the half sample for each of the four outcomes of a matched pair of A.
            Agresti and Y. Min, Statistics in Medicine 24 (2005), at other levels its analogue.
    """
    seen = np.isfinite(values)
    values, clusters = values[seen], clusters[seen]
    counts = np.bincount(clusters)
    sums = np.bincount(clusters, weights=values)[counts > 0]
    counts = counts[counts > 0]
    groups, n = float(len(counts)), float(len(values))
    if groups < 2:
        return MeanBound(len(values), float(values.mean()) if n else 0.0, math.inf, math.inf)
    total, outcomes = float(sums.sum()), 0.0
    if best is not None:
        outcomes = normal_quantile(level) ** 2 / 8
    groups, n = groups + 4 * outcomes, n + 4 * outcomes
    mean = total / n
    squares = float(((sums - counts * mean) ** 2).sum())
    if best is not None:
        squares += outcomes * ((best - mean) ** 2 + (best + mean) ** 2 + 2 * mean**2)
    se = math.sqrt(squares * groups / (groups - 1)) / n
    return MeanBound(len(values), mean, se, t_quantile(level, len(counts) - 1) * se)


@cache
def t_quantile(level: float, degrees: int) -> float:
    """What Student's t exceeds with probability `level`."""
    return -float(stdtrit(degrees, level))


@cache
def normal_quantile(level: float) -> float:
    """What a standard normal exceeds with probability `level`."""
    return -float(ndtri(level))
