"""In: scores and times of settings on samples, round by round; out: who is measured next, and the front. Pure.

A race for the accuracy-latency front. All settings start on the same few samples; after each round, a setting that
another one beats beyond doubt leaves, and only those whose place is still open are measured on more samples.

When a setting leaves. Setting t **dominates** s when, on the samples that both have, t is confidently faster and
confidently not less accurate by more than `margin`. Both are one-sided bounds on the mean of paired differences, with
the spread taken between pictures. A setting leaves only for one that stays: where the witness of an earlier leave
would leave itself, it does so only if another setting that stays dominates the earlier one too. So every setting that
left names one in the front that is faster, and less accurate by at most `margin`, and margins never add up.

How many looks. Each ordered pair of settings is looked at once a round, and there are as many rounds as the schedule
says before the first one. Each bound is at level `alpha` / (S (S - 1) rounds), Bonferroni's inequality (O. Dunn, JASA
56 (1961)), so that with probability 1 - `alpha` no setting leaves wrongly in the whole search, whenever it stops. That
a pair takes two bounds costs nothing: a wrong leave needs the wrong one of them to fail (an intersection-union test;
R. Berger, Technometrics 24 (1982)). The levels hold as far as means of that many pictures follow Student's t.

Sources: racing on the same samples, O. Maron and A. Moore, "Hoeffding races", NIPS 6 (1993); elimination with bounds
that hold at every look, E. Even-Dar, S. Mannor and Y. Mansour, JMLR 7 (2006); fronts of several objectives, P. Auer,
C.-K. Chiang, R. Ortner and M. Drugan, "Pareto front identification from stochastic bandit feedback", AISTATS (2016).
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from scipy import stats

StopReason = Literal["settled", "budget", "samples"]


@dataclass(frozen=True)
class Observation:
    """One sample at one setting.

    Attributes:
        score: None where the metric has no value for it. It must not depend on which other samples were scored.
        seconds: the latency that the front is about.
        cost_s: model time that it took to measure, all runs together.
    """

    score: float | None
    seconds: float
    cost_s: float


Round = dict[str, tuple[int, ...]]
Measure = Callable[[Mapping[str, Sequence[int]]], Mapping[str, Mapping[int, Observation]]]


@dataclass(frozen=True)
class SearchRules:
    """What the search may spend, and how sure it has to be.

    Attributes:
        margin: accuracy that a faster setting may be worse by and still dominate, as a share of `best`.
        alpha: probability of any wrong leave in the whole search.
        first_samples: samples of the first round.
        growth: samples of a round over those of the round before, all so far counted.
        share: most model time to use, of what the full grid would take.
        best: the metric's highest score; the lowest is 0.
    """

    margin: float = 0.01
    alpha: float = 0.05
    first_samples: int = 50
    growth: float = 1.6
    share: float = 1 / 3
    best: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.margin < 1 and 0 < self.alpha < 1 and 0 < self.share <= 1):
            raise ValueError("margin, alpha and share lie between 0 and 1")
        if self.first_samples < 2 or self.growth <= 1 or self.best <= 0:
            raise ValueError("at least 2 samples at first, each round more than the one before, a best score above 0")


@dataclass(frozen=True)
class MeanBound:
    """Mean of paired differences with its one-sided bounds, each at the level of a single look.

    Attributes:
        se: standard error of the mean.
        half: distance from the mean to either bound.
    """

    n: int
    mean: float
    se: float
    half: float

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
    """A challenger against a setting.

    Attributes:
        gain: accuracy of the challenger minus the setting's.
        saving_s: time of the setting minus the challenger's.
        dominates: the challenger is confidently faster and not less accurate by more than the margin.
        cleared: it is confidently slower, or less accurate by more than the margin: it can no longer dominate.
        worth_more: at the full number of samples one of the two could be known, as far as the present means tell.
    """

    gain: MeanBound
    saving_s: MeanBound
    dominates: bool
    cleared: bool
    worth_more: bool


@dataclass(frozen=True)
class KeptSetting:
    """A setting of the front.

    Attributes:
        open_against: settings of the front that it could not be told from: each may in truth dominate it.
    """

    key: str
    num_samples: int
    accuracy: float | None
    seconds: float
    open_against: tuple[str, ...]


@dataclass(frozen=True)
class Elimination:
    """A setting that left, and the setting of the front that dominates it.

    Attributes:
        round: the round after which it left, from 1.
        gain, saving_s: of `by` against it, when `by` was found; the bounds hold together with all others of the search
            with probability `confidence`.
    """

    key: str
    by: str
    round: int
    gain: MeanBound
    saving_s: MeanBound
    confidence: float


@dataclass(frozen=True)
class SearchResult:
    """What the search found, and what it took.

    Attributes:
        failed: settings that no sample could be run at.
        cost_s: model time used.
        full_cost_s: model time of all settings on all samples, from the mean cost of each setting's samples here.
        rounds: what each round asked for, as setting -> number of new samples.
        stopped: every place is known as far as samples can tell (`settled`), the time is used up (`budget`), or every
            setting of the front has all samples (`samples`).
    """

    front: tuple[KeptSetting, ...]
    eliminated: tuple[Elimination, ...]
    failed: tuple[str, ...]
    cost_s: float
    full_cost_s: float
    rounds: tuple[Mapping[str, int], ...]
    stopped: StopReason

    @property
    def share(self) -> float:
        """Model time used, of the full grid's."""
        return self.cost_s / self.full_cost_s if self.full_cost_s else 0.0


class ParetoSearch:
    """The state of a search: `next_round` says what to measure, `record` takes it in, until `next_round` is empty.

    The same observations always lead to the same rounds, so a search that was broken off goes on by being told again
    what was measured.

    Args:
        sample_ids: in the order in which they are to be used, which must be random.
        clusters: the picture of each sample, in the same order.
    """

    def __init__(
        self,
        settings: Sequence[str],
        sample_ids: Sequence[int],
        clusters: Sequence[Hashable],
        rules: SearchRules,
    ) -> None:
        if not settings or not sample_ids:
            raise ValueError("a search needs at least one setting and one sample")
        if len(sample_ids) != len(clusters):
            raise ValueError(f"{len(sample_ids)} samples and {len(clusters)} pictures")
        if len(set(settings)) != len(settings) or len(set(sample_ids)) != len(sample_ids):
            raise ValueError("a setting or a sample is there twice")
        self.rules = rules
        self._ids = tuple(sample_ids)
        self._place = {sample_id: place for place, sample_id in enumerate(sample_ids)}
        numbers = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters))}
        self._clusters = np.array([numbers[cluster] for cluster in clusters], dtype=np.int64)
        self._looks = planned_looks(len(sample_ids), rules)
        self._level = rules.alpha / max(len(settings) * (len(settings) - 1) * len(self._looks), 1)
        self._scores = {key: np.full(len(sample_ids), np.nan) for key in settings}
        self._seconds = {key: np.full(len(sample_ids), np.nan) for key in settings}
        self._asked = dict.fromkeys(settings, 0)
        self._costs: dict[str, list[float]] = {key: [] for key in settings}
        self._active = list(settings)
        self._eliminated: dict[str, Elimination] = {}
        self._failed: list[str] = []
        self._verdicts: dict[tuple[str, str], PairVerdict] = {}
        self._pending: Round = {}
        self._rounds: list[dict[str, int]] = []
        self._stopped: StopReason | None = None
        first = max(min(self._looks[0], int(rules.share * len(sample_ids))), 1)
        self._ask(dict.fromkeys(settings, first))

    def next_round(self) -> Round:
        """Samples that each setting is to be measured on next; none where the search is over."""
        return dict(self._pending)

    def record(self, observations: Mapping[str, Mapping[int, Observation]]) -> None:
        """Take in what `next_round` asked for; a sample that failed is missing, a setting that failed has none."""
        if observations.keys() != self._pending.keys():
            raise ValueError("record takes the settings that next_round asked for, no others and not fewer")
        for key, seen in observations.items():
            if not seen.keys() <= set(self._pending[key]):
                raise ValueError(f"{key}: samples that next_round did not ask for")
            for sample_id, one in seen.items():
                place = self._place[sample_id]
                self._scores[key][place] = np.nan if one.score is None else one.score
                self._seconds[key][place] = one.seconds
                self._costs[key].append(one.cost_s)
            self._asked[key] += len(self._pending[key])
            if not self._costs[key]:
                self._active.remove(key)
                self._failed.append(key)
        self._rounds.append({key: len(ids) for key, ids in self._pending.items()})
        self._pending = {}
        self._look()
        self._eliminate()
        self._plan()

    def result(self) -> SearchResult:
        """What is known; before the end of the search raises ValueError."""
        if self._stopped is None:
            raise ValueError("the search goes on: ask next_round")
        return SearchResult(
            front=tuple(self._kept(key) for key in self._active),
            eliminated=tuple(self._eliminated.values()),
            failed=tuple(self._failed),
            cost_s=sum(sum(costs) for costs in self._costs.values()),
            full_cost_s=self._full_cost(),
            rounds=tuple(self._rounds),
            stopped=self._stopped,
        )

    def _kept(self, key: str) -> KeptSetting:
        scores, seconds = self._scores[key], self._seconds[key]
        return KeptSetting(
            key=key,
            num_samples=int(np.isfinite(seconds).sum()),
            accuracy=float(np.nanmean(scores)) if np.isfinite(scores).any() else None,
            seconds=float(np.nanmean(seconds)),
            open_against=tuple(
                other for other in self._active if other != key and not self._verdicts[other, key].cleared
            ),
        )

    def _full_cost(self) -> float:
        return sum(len(self._ids) * sum(costs) / len(costs) for costs in self._costs.values() if costs)

    def _look(self) -> None:
        """Judge every pair of active settings of which one has new samples."""
        fresh = self._rounds[-1].keys()
        for first in self._active:
            for second in self._active:
                if first != second and (first in fresh or second in fresh):
                    self._verdicts[first, second] = self._judge(first, second)

    def _judge(self, challenger: str, setting: str) -> PairVerdict:
        """On the samples that both were asked for and neither failed at."""
        n = min(self._asked[challenger], self._asked[setting])
        gains = self._scores[challenger][:n] - self._scores[setting][:n]
        savings = self._seconds[setting][:n] - self._seconds[challenger][:n]
        clusters = self._clusters[:n]
        best = self.rules.best
        gain = mean_bound(gains, clusters, self._level, best)
        saving = mean_bound(savings, clusters, self._level)
        margin = self.rules.margin * best
        total = len(self._ids)
        return PairVerdict(
            gain=gain,
            saving_s=saving,
            dominates=gain.low >= -margin and saving.low > 0,
            cleared=gain.high < -margin or saving.high < 0,
            worth_more=(
                (could_exceed(gain, -margin, total) and could_exceed(saving, 0.0, total))
                or could_fall_below(gain, -margin, total)
                or could_fall_below(saving, 0.0, total)
            ),
        )

    def _eliminate(self) -> None:
        """Dominated settings leave, each for the undominated one that is most surely as accurate."""
        dominators = {
            key: [other for other in self._active if other != key and self._verdicts[other, key].dominates]
            for key in self._active
        }
        stay = [key for key in self._active if not dominators[key]]
        leaving = {key for key in self._active if any(other in stay for other in dominators[key])}
        for gone in list(self._eliminated.values()):
            if gone.by not in leaving:
                continue
            heirs = [key for key in self._active if key not in leaving and self._judge(key, gone.key).dominates]
            if heirs:
                self._eliminated[gone.key] = self._elimination(gone.key, heirs, gone.round)
            else:
                leaving.discard(gone.by)
        for key in sorted(leaving, key=self._active.index):
            self._eliminated[key] = self._elimination(key, [each for each in dominators[key] if each in stay], None)
        self._active = [key for key in self._active if key not in leaving]

    def _elimination(self, key: str, witnesses: Sequence[str], since: int | None) -> Elimination:
        verdicts = {witness: self._judge(witness, key) for witness in witnesses}
        by = max(verdicts, key=lambda witness: verdicts[witness].gain.low)
        verdict = verdicts[by]
        number = len(self._rounds) if since is None else since
        return Elimination(key, by, number, verdict.gain, verdict.saving_s, 1 - self.rules.alpha)

    def _plan(self) -> None:
        """The next round: settings of pairs that are open and worth more samples, as far as the time goes."""
        open_pairs = [
            (other, key)
            for key in self._active
            for other in self._active
            if other != key and not self._verdicts[other, key].cleared and self._verdicts[other, key].worth_more
        ]
        members = [key for key in self._active if any(key in pair for pair in open_pairs)]
        if not members:
            self._stopped = "settled"
            return
        reached = min(self._asked[key] for key in members)
        target = next((look for look in self._looks if look > reached), None)
        if target is None:
            self._stopped = "samples"
            return
        wanted = {key: target - self._asked[key] for key in members if self._asked[key] < target}
        means = {key: sum(self._costs[key]) / len(self._costs[key]) for key in wanted}
        left = self.rules.share * self._full_cost() - sum(sum(costs) for costs in self._costs.values())
        cost = sum(means[key] * more for key, more in wanted.items())
        if cost > left:
            part = max(left, 0.0) / cost
            wanted = {key: int(more * part) for key, more in wanted.items() if int(more * part) > 0}
        if not wanted or len(self._rounds) >= len(self._looks):
            self._stopped = "budget"
            return
        self._ask(wanted)

    def _ask(self, wanted: Mapping[str, int]) -> None:
        for key, more in wanted.items():
            begin = self._asked[key]
            self._pending[key] = self._ids[begin : begin + more]


def run_search(search: ParetoSearch, measure: Measure) -> SearchResult:
    """Ask and record until the search is over."""
    while wanted := search.next_round():
        search.record(measure(wanted))
    return search.result()


def random_order(sample_ids: Sequence[int], seed: int) -> tuple[int, ...]:
    """The samples in a random order; the same for the same samples in whatever order they are given."""
    ids = np.array(sorted(sample_ids))
    return tuple(int(each) for each in np.random.RandomState(seed).permutation(ids))


def planned_looks(num_samples: int, rules: SearchRules) -> tuple[int, ...]:
    """Samples that a setting of each round has, growing by the rules' factor up to all of them."""
    looks = [min(rules.first_samples, num_samples)]
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


def could_exceed(bound: MeanBound, threshold: float, total: int) -> bool:
    """Whether the lower bound could lie above the threshold at `total` samples, the mean being up to 1 SE higher."""
    if math.isinf(bound.half):
        return True
    return bound.mean + bound.se - bound.half * math.sqrt(bound.n / total) > threshold


def could_fall_below(bound: MeanBound, threshold: float, total: int) -> bool:
    """Whether the upper bound could lie below the threshold at `total` samples, the mean being up to 1 SE lower."""
    if math.isinf(bound.half):
        return True
    return bound.mean - bound.se + bound.half * math.sqrt(bound.n / total) < threshold


@cache
def t_quantile(level: float, degrees: int) -> float:
    """What Student's t exceeds with probability `level`."""
    return float(stats.t.isf(level, degrees))


@cache
def normal_quantile(level: float) -> float:
    """What a standard normal exceeds with probability `level`."""
    return float(stats.norm.isf(level))
