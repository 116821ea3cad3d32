"""The price list of a task: what each accepted loss of accuracy saves, by type of question and over all.

A price is two claims about a setting: it takes less time than the model as it is, and it is not worse by the accepted
loss or more. Both are tested by the contrasts that every verdict is by, of all settings with the reference together,
and the words hold for all types and losses of a list together: types and the row of all questions share the level
(Bonferroni), of which times get TIME_PART and accuracies the rest; a smaller loss is tested at the level of a larger
one, since who is not worse by 2 points is not worse by 5 (a fixed sequence from large to small; P. Westfall and
A. Krishen, Journal of Statistical Planning and Inference 99 (2001) 25), so that losses cost nothing. Routing by type
uses settings that are sure in their type: the words of the list hold for all of them at a time, whichever is chosen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy import stats
from scipy.special import bdtr

from experiment_core_utils.config.parts import QuestionConfig
from experiment_core_utils.primitives.contrasts import PairedContrasts, ScoreContrasts, Word, word_of
from experiment_core_utils.primitives.replication import over_batches
from experiment_core_utils.primitives.statistics import CONFIDENCE, bounded_mean_intervals
from experiment_core_utils.records.price_list import (
    OVERALL,
    Interval,
    Price,
    PriceList,
    Routing,
    TypePrices,
    WithinBudget,
)
from experiments.analyses.knobs.grid import TaskGrid
from experiments.fitting.verdicts import cluster_sums, first_of_each, means_and_errors

FEWEST_OF_TYPE, MOST_TYPES, OTHER = 14, 6, "other"
# The part of the level that claims about times get: these are far from doubt where a setting saves anything.
TIME_PART = 0.1
# Of a difference that is there, with so many samples as are named; and more than so many are not.
_POWER_QUANTILE, _MOST_SAMPLES = 0.8416, 1_000_000
NO_REFERENCE = "the reference, which is the model as it is, was not measured on the same samples"
ONE_SETTING = "no setting beside the reference was measured"
NO_TIMES = "no sample has scores and times at all settings"
_WORDS: tuple[Word, ...] = ("yes", "likely", "can't tell", "no")


@dataclass(frozen=True)
class _Group:
    """The questions of one type, at S settings."""

    name: str
    keys: tuple[str, ...]
    reference: int
    num_groups: int
    best: float
    scores: np.ndarray  #: [S, n], of the samples on which all have one
    pictures: np.ndarray  #: [n]
    same: np.ndarray | None  #: [S, n], whether each answer is the reference's; None where it is not known
    times: PairedContrasts
    total_ms: np.ndarray  #: [S, m], of the samples on which all have a time
    time_pictures: np.ndarray  #: [m]
    energies: PairedContrasts | None
    energy_j: np.ndarray | None  #: [S, k]
    energy_pictures: np.ndarray  #: [k]
    batch_sizes: np.ndarray  #: [S]
    requests_per_s: np.ndarray | None  #: [S], None where requests run alone

    def throughput(self, at: int) -> float | None:
        """Requests per second of a setting; None where requests run alone, and where it was not measured."""
        found = None if self.requests_per_s is None else float(self.requests_per_s[at])
        return None if found is None or math.isnan(found) else found

    @cached_property
    def contrasts(self) -> ScoreContrasts:
        """Of accuracies."""
        return ScoreContrasts.of(self.scores, self.pictures, best=self.best, reference=self.reference)

    @property
    def time_factor(self) -> float:
        """What the p-values of times are times."""
        return self.num_groups / TIME_PART

    @property
    def score_factor(self) -> float:
        """What the p-values of accuracies are times."""
        return self.num_groups / (1 - TIME_PART)

    @cached_property
    def mean_ms(self) -> np.ndarray:
        """[S], mean total times."""
        return np.asarray(self.total_ms.mean(axis=1))

    @cached_property
    def faster(self) -> list[Word]:
        """[S], how sure it is that each takes less time than the reference."""
        everything = np.arange(len(self.keys))
        lower = self.times.pair_p_values(everything, self.reference)
        higher = self.times.pair_p_values(self.reference, everything)
        # By the mean of ratios, and not by the mean that is paid.
        lower[self.mean_ms >= self.mean_ms[self.reference]] = 1.0
        words = zip(lower.tolist(), higher.tolist(), strict=True)
        return [word_of(*(min(self.time_factor * each, 1.0) for each in pair)) for pair in words]

    def not_worse(self, at: int, loss: float) -> Word:
        """How sure it is that a setting is not worse by `loss` or more; of no loss that it is better."""
        limit, factor = loss * self.best, self.score_factor
        claim = float(self.contrasts.pair_p_values(at, self.reference, limit)[0])
        opposite = float(self.contrasts.pair_p_values(self.reference, at, -limit)[0])
        return word_of(min(factor * claim, 1.0), min(factor * opposite, 1.0))

    def is_identical(self, at: int) -> bool:
        """Whether all answers are the reference's."""
        return self.same is not None and bool(self.same[at].all())

    def difference_interval(self, at: int) -> Interval | None:
        """Of the accuracy less the reference's, together for all settings and types."""
        return self.contrasts.interval(at, self.reference, 1 - (1 - CONFIDENCE) / self.score_factor)

    def ratio_interval(self, at: int) -> Interval | None:
        """Of the time over the reference's, together for all settings and types."""
        return self.times.interval(at, self.reference, 1 - (1 - CONFIDENCE) / self.time_factor)


def price_list(grid: TaskGrid, question: QuestionConfig | None = None, why: str | None = None) -> PriceList:
    """The prices of a task's settings.

    Args:
        question: the loss and the budgets that are asked for; None for five losses.
        why: why nothing may be said of the task's settings; None where that is open.
    """
    if why is not None:
        return PriceList(grid.task, None, why)
    question = question or QuestionConfig()
    kept = np.flatnonzero(np.isfinite(grid.scores).any(axis=1) & np.isfinite(grid.log_times).any(axis=1))
    keys = tuple(grid.points[at].key for at in kept)
    reference = next((place for place, at in enumerate(kept) if grid.points[at].is_reference), None)
    if not len(kept):
        return PriceList(grid.task, None, NO_TIMES)
    groups = [_group(grid, kept, keys, reference or 0, name, mask) for name, mask in types_of(grid, kept)]
    groups = [replace(each, num_groups=len(groups)) for each in groups]
    if any(not each.scores.shape[1] or not each.total_ms.shape[1] for each in groups):
        return PriceList(grid.task, None, NO_TIMES)
    if reference is None or len(kept) < 2:
        why = NO_REFERENCE if reference is None else ONE_SETTING
    else:
        why = next((no for each in groups if (no := each.times.no_verdict or each.contrasts.no_verdict)), None)
    against = None if reference is None else keys[reference]
    if why is not None:
        # What fits into a budget is known without the reference.
        fitting = tuple(_budgets_alone(group, question) for group in groups) if question.has_budgets else ()
        none = why if question.losses else None
        return PriceList(grid.task, against, none, fitting, None, grid.best, grid.score_name)
    found = tuple(_type_prices(group, question) for group in groups)
    # The smallest loss at which some type has a choice of its own; a loss of 0 is a claim about these answers only.
    routings = (_routing(groups[:-1], found[:-1], loss) for loss in reversed(question.losses) if loss)
    routing = next((each for each in routings if each is not None), None)
    return PriceList(grid.task, against, None, found, routing, grid.best, grid.score_name)


def types_of(grid: TaskGrid, kept: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Names of types and the samples [N] of each, all questions last; that row alone where there is one type.

    Types of fewer than FEWEST_OF_TYPE questions, and those beyond the MOST_TYPES largest, are `other`.
    """
    scored = np.isfinite(grid.scores[kept]).all(axis=0)
    everything = (OVERALL, np.ones(len(grid.sample_ids), dtype=bool))
    names = np.array(grid.question_types or [grid.task] * len(grid.sample_ids))
    sizes = {str(name): int((scored & (names == name)).sum()) for name in dict.fromkeys(names.tolist())}
    shown = sorted((name for name, size in sizes.items() if size >= FEWEST_OF_TYPE), key=lambda name: -sizes[name])
    if len(shown) > MOST_TYPES or len(shown) < len(sizes):
        shown = shown[: MOST_TYPES - 1]
    types = [(name, names == name) for name in sorted(shown)]
    rest = ~np.isin(names, shown)
    if (scored & rest).sum() >= FEWEST_OF_TYPE:
        types.append((OTHER, rest))
    return [*types, everything] if len(types) > 1 else [everything]


def _group(
    grid: TaskGrid, kept: np.ndarray, keys: tuple[str, ...], reference: int, name: str, mask: np.ndarray
) -> _Group:
    pictures = np.asarray(grid.pictures, dtype=str)

    def shared(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        columns = mask & np.isfinite(values[kept]).all(axis=0)
        return values[kept][:, columns], pictures[columns]

    scores, score_pictures = shared(grid.scores)
    total_ms, time_pictures = shared(grid.total_ms)
    energy_j, energy_pictures = shared(grid.energy_j)
    columns = mask & np.isfinite(grid.scores[kept]).all(axis=0)
    answers = None if grid.answers is None else grid.answers[kept][:, columns]
    has_energy = bool(energy_j.shape[1]) and bool((energy_j > 0).all())
    log_times, sizes = grid.log_times[kept][:, mask], grid.batch_sizes[kept]
    times = over_batches(grid.times.at(kept), log_times, sizes)
    return _Group(
        name=name,
        keys=keys,
        reference=reference,
        num_groups=1,
        best=grid.best,
        scores=scores,
        pictures=score_pictures,
        same=None if answers is None else answers == answers[reference],
        times=PairedContrasts.of(log_times, pictures[mask], reference=reference, replication=times),
        total_ms=total_ms,
        time_pictures=time_pictures,
        energies=PairedContrasts.of(
            np.log(energy_j),
            energy_pictures,
            reference=reference,
            replication=over_batches(grid.energies.at(kept), np.log(energy_j), sizes),
        )
        if has_energy
        else None,
        energy_j=energy_j if has_energy else None,
        energy_pictures=energy_pictures,
        batch_sizes=sizes,
        requests_per_s=None if grid.requests_per_s is None else grid.requests_per_s[kept],
    )


def _type_prices(group: _Group, question: QuestionConfig) -> TypePrices:
    # Where no answer changes, this is what can be excluded.
    nothing = group.difference_interval(group.reference)
    assert nothing is not None
    return TypePrices(
        question_type=group.name,
        num_samples=group.scores.shape[1],
        reference_ms=float(group.mean_ms[group.reference]),
        reference_accuracy=float(group.scores[group.reference].mean()),
        least_loss=-nothing[0] / group.best,
        prices=tuple(_price(group, loss) for loss in question.losses),
        budgets=tuple(_budgets(group, question)),
    )


def _budgets_alone(group: _Group, question: QuestionConfig) -> TypePrices:
    budgets = tuple(replace(each, time_ratio=None) for each in _budgets(group, question))
    return TypePrices(group.name, group.scores.shape[1], None, None, None, (), budgets)


def _price(group: _Group, loss: float) -> Price:
    """The cheapest setting that is sure at a loss; of none the nearest of those that are surely faster."""
    others = [at for at in range(len(group.keys)) if at != group.reference and group.faster[at] == "yes"]
    words = {at: "yes" if loss == 0 and group.is_identical(at) else group.not_worse(at, loss) for at in others}
    sure = [at for at in others if words[at] == "yes"]
    if sure:
        return _priced(group, min(sure, key=lambda at: group.mean_ms[at]), loss, "yes")
    if not others:
        return Price(loss, "can't tell", None, False, None, None, None, None, None, None, None)

    # What is nearest: that which lacks least, by its word and then by what its lead is over the noise.
    def lack(at: int) -> tuple[int, float]:
        ahead = group.contrasts.difference(at, group.reference) + loss * group.best
        error = float(group.contrasts.errors(group.reference)[at])
        return _WORDS.index(words[at]), -ahead / error

    nearest = min(others, key=lack)
    return _priced(group, nearest, loss, words[nearest])


def _priced(group: _Group, at: int, loss: float, word: Word) -> Price:
    energy = group.energies if group.energies is not None and group.energies.no_verdict is None else None
    return Price(
        loss=loss,
        word=word,
        setting=group.keys[at],
        is_identical=group.is_identical(at),
        time_ratio=group.times.ratio(at, group.reference),
        time_ratio_ci95=group.ratio_interval(at),
        energy_ratio=None if energy is None else energy.ratio(at, group.reference),
        energy_ratio_ci95=None
        if energy is None
        else energy.interval(at, group.reference, 1 - (1 - CONFIDENCE) / group.num_groups),
        accuracy_difference=group.contrasts.difference(at, group.reference),
        accuracy_difference_ci95=group.difference_interval(at),
        samples_needed=None if word in ("yes", "no") else _samples_needed(group, at, loss),
        requests_per_s=group.throughput(at),
    )


def _samples_needed(group: _Group, at: int, loss: float) -> int | None:
    """Questions at which a difference as it is would be decided in POWER of all cases; None for none or too many."""
    contrasts = group.contrasts
    gap = abs(contrasts.difference(at, group.reference) + loss * group.best)
    critical = contrasts.critical(1 - (1 - CONFIDENCE) / group.score_factor)
    variance = ((contrasts.residuals[at] - contrasts.residuals[group.reference]) ** 2).sum() / contrasts.num_samples
    room = (gap / (critical + _POWER_QUANTILE)) ** 2
    if room <= 0:
        return None
    most = (variance + math.sqrt(variance**2 + 4 * contrasts.added_squares * room)) / (2 * room)
    if most > _MOST_SAMPLES:
        return None
    digits = max(10 ** (len(str(math.ceil(most))) - 2), 1)
    return math.ceil(most / digits) * digits


def _budgets(group: _Group, question: QuestionConfig) -> list[WithinBudget]:
    found = []
    if question.budget_ms is not None:
        tests = _chances_of_means(group.total_ms, group.time_pictures, question.budget_ms, group.batch_sizes)
        found.append(_within(group, question.budget_ms, "ms", "mean", group.mean_ms, tests))
    if question.budget_p95_ms is not None:
        # By the number of late ones among one sample of each picture; of batches as if they were as many as there are
        # without a common request.
        late = (group.total_ms[:, first_of_each(group.time_pictures)] > question.budget_p95_ms).mean(axis=1)
        sizes = [max(int(len(set(group.time_pictures.tolist())) / batch), 1) for batch in group.batch_sizes]
        counts = [round(part * size) for part, size in zip(late.tolist(), sizes, strict=True)]
        tests = [
            (2 * float(bdtr(number, size, 0.05)), 2 * float(1 - bdtr(number - 1, size, 0.05)))
            for number, size in zip(counts, sizes, strict=True)
        ]
        p95 = np.percentile(group.total_ms, 95, axis=1)
        found.append(_within(group, question.budget_p95_ms, "ms", "p95", p95, tests))
    if question.budget_j is not None:
        if group.energy_j is None:
            found.append(WithinBudget(question.budget_j, "J", "mean", "can't tell", None, None, None, None, None))
        else:
            tests = _chances_of_means(group.energy_j, group.energy_pictures, question.budget_j, group.batch_sizes)
            found.append(_within(group, question.budget_j, "J", "mean", group.energy_j.mean(axis=1), tests))
    if question.min_accuracy is not None:
        found.append(_accurate(group, question.min_accuracy))
    return found


def _within(
    group: _Group, budget: float, unit: str, statistic: str, cost: np.ndarray, chances: list[tuple[float, float]]
) -> WithinBudget:
    """The most accurate of the settings that surely keep to a budget; else of those of the best word, within it by
    their figures where any is.
    """
    words = [word_of(*(min(each * group.num_groups * len(cost), 1.0) for each in pair)) for pair in chances]
    accuracy, best = group.scores.mean(axis=1), min(words, key=_WORDS.index)
    left = [at for at, word in enumerate(words) if word == best]
    within = [at for at in left if cost[at] <= budget]
    taken = max(within, key=lambda at: (accuracy[at], -cost[at])) if within else min(left, key=lambda at: cost[at])
    return _budgeted(group, taken, budget, unit, statistic, words[taken], float(cost[taken]))


def _accurate(group: _Group, least: float) -> WithinBudget:
    """The cheapest of the settings that surely have an accuracy; else the most accurate."""
    accuracy, size = group.scores.mean(axis=1), len(group.keys)
    sums = cluster_sums(group.scores, np.unique(group.pictures, return_inverse=True)[1])
    limit = least * group.best

    def ends(confidence: float) -> list[Interval]:
        tail = (1 - confidence) / (2 * group.num_groups * size)
        return bounded_mean_intervals(*sums, group.best, tail=tail)

    sure, likely = ends(CONFIDENCE), ends(0.8)
    words: list[Word] = [
        "yes" if low >= limit else "no" if high < limit else "likely" if low_likely >= limit else "can't tell"
        for (low, high), (low_likely, _) in zip(sure, likely, strict=True)
    ]
    found = [at for at, word in enumerate(words) if word == "yes"]
    taken = min(found, key=lambda at: group.mean_ms[at]) if found else int(np.argmax(accuracy))
    return _budgeted(group, taken, least, "score", "mean", words[taken], float(accuracy[taken]))


def _budgeted(
    group: _Group, at: int, budget: float, unit: str, statistic: str, word: Word, cost: float
) -> WithinBudget:
    places = np.unique(group.pictures, return_inverse=True)[1]
    (ends,) = bounded_mean_intervals(*cluster_sums(group.scores[[at]], places), group.best)
    ratio = group.times.ratio(at, group.reference)
    accuracy = float(group.scores[at].mean())
    rate = group.throughput(at)
    return WithinBudget(budget, unit, statistic, word, group.keys[at], cost, ratio, accuracy, ends, rate)


def _chances_of_means(
    values: np.ndarray, pictures: np.ndarray, limit: float, batch_sizes: np.ndarray
) -> list[tuple[float, float]]:
    """For each of [S, n] rows the p-values that its mean is not below a limit, and that it is (Student's t, both
    directions in the family; for batches see `over_batches`)."""
    means, errors, degrees = means_and_errors(values, np.unique(pictures, return_inverse=True)[1])
    errors = errors * np.sqrt(batch_sizes)
    if degrees < 1:
        return [(1.0, 1.0)] * len(values)
    below = stats.t.cdf((means - limit) / np.maximum(errors, 1e-12 * limit), degrees)
    return [(2 * float(each), 2 * float(1 - each)) for each in below]


def _routing(groups: Sequence[_Group], found: Sequence[TypePrices], loss: float) -> Routing | None:
    """What the sure settings of all types give together; None where all types choose one."""
    chosen = [
        next((price.setting for price in each.prices if price.loss == loss and price.word == "yes"), None)
        for each in found
    ]
    places = [
        group.reference if key is None else group.keys.index(key) for group, key in zip(groups, chosen, strict=True)
    ]
    if len(set(places)) < 2:
        return None
    sizes = np.array([group.scores.shape[1] for group in groups], dtype=float)
    weights = sizes / sizes.sum()
    accuracy = [float(group.scores[at].mean()) for group, at in zip(groups, places, strict=True)]
    own = [float(group.scores[group.reference].mean()) for group in groups]
    # What is paid: the mean time of each type's setting, over the reference's.
    paid = weights * [group.mean_ms[group.reference] for group in groups]
    ratios = [group.mean_ms[at] / group.mean_ms[group.reference] for group, at in zip(groups, places, strict=True)]
    ends = [
        (1.0, 1.0) if at == group.reference else group.ratio_interval(at) or (math.nan, math.nan)
        for group, at in zip(groups, places, strict=True)
    ]
    low, high = (float((paid * [each[side] for each in ends]).sum() / paid.sum()) for side in (0, 1))
    ratio = float((paid * ratios).sum() / paid.sum())
    return Routing(
        loss=loss,
        settings={group.name: group.keys[at] for group, at in zip(groups, places, strict=True)},
        accuracy=float(weights @ accuracy),
        accuracy_difference=float(weights @ (np.array(accuracy) - own)),
        time_ratio=ratio,
        time_ratio_ci95=(min(low, ratio), max(high, ratio)),
    )
