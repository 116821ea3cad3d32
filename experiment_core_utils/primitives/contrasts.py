"""Differences between settings that were measured on the same samples, with intervals and verdicts that hold together.

A contrast is the mean over samples of one setting's value less another's. Pictures are independent, samples of one
picture are not: the error of a contrast comes from its sums over G pictures, G / (G - 1) * sum of (sum - mean *
count)^2 / n^2 (W. Cochran, "Sampling Techniques", 3rd ed. 1977, 9A). What a contrast leads by is, of times, its t, of
scores the normal quantile of a test that holds where few answers change (`ScoreContrasts`). The critical value of a
family of times is a quantile of the largest |t| when the signs of whole pictures are flipped at random,
alike for all settings, so that what contrasts have in common is used (P. Westfall and S. Young, "Resampling-based
multiple testing", 1993; J. Romano and M. Wolf, Econometrica 73 (2005) 1237, single step, so that a verdict is always
what its interval says). Two kinds of flips are made and the larger critical value counts: of the differences as they
are, which make tests exact where differences are symmetric, and of differences less their mean, without which
intervals of settings that truly differ hold one by one but not together. It is never below Student's t of one contrast.

Samples do not show what was the same for all samples of a setting and not for another's, such as a machine that was
slower while that setting was measured. Rounds make it common to all settings (T. Kalibera and R. Jones, "Rigorous
benchmarking in reasonable time", ISMM 2013, for the repetition at the level that varies); else `Replication` adds its
variance, or says that there is no verdict. Where each contrast has an estimate of that variance of its own, of few
degrees of freedom, the critical value is Student's t of the fewest degrees with Bonferroni's correction, which errs on
the safe side for a sum of variances (R. Mickey and M. Brown, Annals of Mathematical Statistics 37 (1966) 524).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
from scipy import stats
from scipy.optimize import brentq
from scipy.special import ndtri_exp

from experiment_core_utils.primitives.largest_leads import (
    ROUNDING,
    largest_of_flips,
    largest_of_multipliers,
    scale_of,
)
from experiment_core_utils.primitives.replication import COUNTED, Replication
from experiment_core_utils.primitives.statistics import CONFIDENCE, log_chance_above

# How sure it is that one setting is better than another: `yes` with CONFIDENCE over the whole family, `likely` with
# LIKELY over the whole family, `no` where the opposite is a yes.
Word = Literal["yes", "likely", "can't tell", "no"]
LIKELY = 0.8
# Accuracy that a cheaper setting may be worse by and still be as good, as a fraction of the metric's best score.
ACCURACY_MARGIN = 0.02
# Fewer pairs that all agree could do so by chance (0.5 ** 6 < 0.025 < 0.5 ** 5).
FEWEST_PICTURES = 6
# The family of all pairs of more settings is judged by Student's t with Bonferroni's correction.
MOST_FLIPPED_SETTINGS = 200
# Answers added to each difference of scores, this many better and as many worse by the whole best score.
ADDED_ANSWERS = 2
# Scores whose lead by the spread of what was seen is less than this part of the least one have no small p-value.
_LEAST_LEAD = 0.5


@dataclass(frozen=True)
class _Contrasts:
    """S settings on the samples that all of them have; make one by `of`."""

    means: np.ndarray  #: [S], of each setting's values less the picture's mean over settings
    residuals: np.ndarray  #: [S, G], sums over pictures less the number of samples times the mean
    counts: np.ndarray  #: [G], samples of each picture
    num_samples: int  #: that all S settings have
    num_pictures: int  #: G
    reference: int | None  #: the setting of all contrasts of the family; None for all pairs
    #: [F] the largest |t| of the family in each flip, ascending; None above MOST_FLIPPED_SETTINGS, and where variances
    #: are estimates of single contrasts
    largest: np.ndarray | None
    added_squares: float  #: added to each contrast's sum of squares
    replication: Replication  #: what was the same for all samples of one setting
    size_of_change: float  #: samples of a picture that change together; 1 where nothing is added
    no_verdict: str | None  #: the reason why nothing is said of any pair

    better_is_lower: ClassVar[bool]

    @classmethod
    def _of(
        cls,
        values: np.ndarray,
        pictures: Sequence[object] | np.ndarray,
        reference: int | None,
        largest_of: Callable[[np.ndarray, np.ndarray, np.ndarray, float], np.ndarray],
        *,
        added_squares: float = 0.0,
        replication: Replication = COUNTED,
    ) -> Self:
        """The contrasts.

        Args:
            largest_of: [F] ascending, the largest lead of a family of equal settings in each of F draws, from sums,
                residuals, counts and what is added to each contrast's sum of squares.
        """
        values = np.asarray(values, dtype=np.float64)
        known = np.isfinite(values).all(axis=0)
        numbers = np.unique(np.asarray(pictures)[known], return_inverse=True)[1]
        shared = values[:, known]
        counts = np.bincount(numbers).astype(np.float64)
        sums, size = np.zeros((len(values), len(counts))), 1.0
        if len(counts):
            # What all settings share cancels; without it sums of squares keep their digits.
            own = shared - shared.mean(axis=0)
            np.add.at(sums.T, numbers, own.T)
            size = _size_of_change(own, sums, counts) if added_squares else 1.0
            added_squares *= size**2
        means = sums.sum(axis=1) / max(len(numbers), 1)
        residuals = sums - means[:, None] * counts
        no_verdict, largest = None, None
        if len(counts) < FEWEST_PICTURES:
            no_verdict = f"a verdict needs {FEWEST_PICTURES} pictures that all settings have, and {len(counts)} are"
        elif replication.undecided is not None:
            no_verdict = f"this {replication.undecided}"
        elif not replication.is_each_alone and (1 < len(values) <= MOST_FLIPPED_SETTINGS or reference is not None):
            largest = largest_of(sums, residuals, counts, added_squares)
        return cls(
            means=means,
            residuals=residuals,
            counts=counts,
            num_samples=len(numbers),
            num_pictures=len(counts),
            reference=reference,
            largest=largest,
            added_squares=added_squares,
            replication=replication,
            size_of_change=size,
            no_verdict=no_verdict,
        )

    def errors(self, at: int) -> np.ndarray:
        """[S], the standard errors of this setting's contrasts; infinite for fewer than two pictures."""
        return self._errors(*np.broadcast_arrays(at, np.arange(len(self.means))))

    def _errors(self, ones: np.ndarray, others: np.ndarray) -> np.ndarray:
        if self.num_pictures < 2:
            return np.full(len(ones), np.inf)
        squares = ((self.residuals[ones] - self.residuals[others]) ** 2).sum(axis=1) + self.added_squares
        variances = squares * scale_of(self.num_pictures, self.num_samples) + self.replication.variances(ones, others)
        return np.asarray(np.sqrt(np.maximum(variances, ROUNDING * (self.means[ones] - self.means[others]) ** 2)))

    @property
    def num_comparisons(self) -> int:
        """The number of contrasts in the family."""
        size = len(self.means)
        return size * (size - 1) // 2 if self.reference is None else size - 1

    @property
    def degrees(self) -> float:
        """The fewest degrees of freedom of what a contrast's error is of."""
        return min(self.num_pictures - 1, self.replication.degrees)

    def critical(self, confidence: float = CONFIDENCE) -> float:
        """What a lead has to be above, for all contrasts of the family to be right with this confidence."""
        if self.largest is None:
            return float(self._alone.isf((1 - confidence) / (2 * max(self.num_comparisons, 1))))
        return float(self.largest[-1 - math.floor((1 - confidence) * len(self.largest) + 1e-9)])

    def p_values(self, at: int) -> np.ndarray:
        """[S], the p-value that this setting is not better than each, adjusted for the family; 1 without a verdict.

        nan for a pair outside the family. It is one-sided for each pair; the family contains both directions of each,
        so that CONFIDENCE is that of no wrong `yes` in the whole family.
        """
        return self.pair_p_values(at, np.arange(len(self.means)))

    def pair_p_values(self, ones: int | np.ndarray, others: int | np.ndarray, margin: float = 0.0) -> np.ndarray:
        """[P], the adjusted p-values that each of `ones` is worse than that of `others` by `margin` or more.

        Args:
            ones: [P] settings, or one of all pairs; so `others`.
            margin: in units of what is compared; negative where it has to be better by so much.
        """
        ones, others = np.broadcast_arrays(*np.atleast_1d(ones, others))
        if self.no_verdict is not None:
            return np.ones(len(ones))
        ahead = (self.means[ones] - self.means[others]) * (-1 if self.better_is_lower else 1) + margin
        leads = self._leads(ones, others, ahead, margin)
        if self.largest is None:
            chances = 2 * self.num_comparisons * self._alone.sf(leads)
        else:
            chances = 1 - np.searchsorted(self.largest, leads * (1 - 1e-9)) / len(self.largest)
        found = np.where(ahead > 0, np.minimum(chances, 1.0), 1.0)
        if self.reference is not None:
            # Of another setting only the contrast with the reference is in the family.
            found[(ones != self.reference) & (others != self.reference)] = np.nan
        return np.asarray(found)

    @property
    def _alone(self) -> Any:
        """The distribution of the lead of one contrast of equal settings."""
        raise NotImplementedError

    def _leads(self, ones: np.ndarray, others: np.ndarray, ahead: np.ndarray, margin: float) -> np.ndarray:
        """[P], how far each contrast is ahead of `-margin`, in units of the noise."""
        raise NotImplementedError

    def p_value(self, one: int, other: int) -> float:
        """The adjusted p-value that `one` is not better than `other`; ValueError for a pair outside the family."""
        self._check_in_family(one, other)
        return float(self.p_values(one)[other])

    def _check_in_family(self, *settings: int) -> None:
        if self.reference is not None and self.reference not in settings:
            raise ValueError(f"settings {settings} were not compared: contrasts are with {self.reference} only")

    def better(self, at: int, confidence: float = CONFIDENCE) -> np.ndarray:
        """[S], whether this setting is better than each with this confidence over the whole family."""
        return np.asarray(self.p_values(at) <= 1 - confidence + 1e-12)

    def word(self, one: int, other: int) -> Word:
        """How sure it is that `one` is better than `other`."""
        return word_of(self.p_value(one, other), self.p_value(other, one))

    def told_apart(self) -> np.ndarray:
        """[S, S], whether one of the two is a `yes` over the other."""
        is_better = np.stack([self.better(at) for at in range(len(self.means))])
        return np.asarray(is_better | is_better.T)


@dataclass(frozen=True)
class PairedContrasts(_Contrasts):
    """Times of S settings, compared by the mean over samples of the difference of their logarithms; lower is better.

    exp(mean) is the geometric mean over samples of one setting's time over the other's.
    """

    better_is_lower: ClassVar[bool] = True

    @classmethod
    def of(
        cls,
        log_times: np.ndarray,
        pictures: Sequence[object] | np.ndarray,
        *,
        reference: int | None = None,
        replication: Replication = COUNTED,
    ) -> Self:
        """The contrasts of S settings, of all pairs, or of the pairs with `reference` only.

        Args:
            log_times: [S, N], of each sample the mean over its runs of the logarithm of the time, in any unit; nan
                where a setting has none.
            pictures: [N], the picture of each sample.
            replication: of the settings; rounds add nothing to what samples show.
        """

        def largest_of(sums: np.ndarray, residuals: np.ndarray, counts: np.ndarray, _: float) -> np.ndarray:
            return largest_of_flips(sums, residuals, counts, reference, replication)

        return cls._of(log_times, pictures, reference, largest_of, replication=replication)

    @property
    def log_ratio(self) -> np.ndarray:
        """[S, S], mean over samples of log t_a - log t_b."""
        return np.asarray(self.means[:, None] - self.means)

    def ratio(self, one: int, other: int) -> float:
        """How many times as long `one` takes as `other`: 0.8 is a fifth less."""
        return math.exp(self.means[one] - self.means[other])

    def interval(self, one: int, other: int, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
        """Interval of `ratio`, above 0, simultaneous over the family; None without a verdict."""
        self._check_in_family(one, other)
        if self.no_verdict is not None:
            return None
        middle, half = self.means[one] - self.means[other], self.critical(confidence) * self.errors(one)[other]
        return math.exp(middle - half), math.exp(middle + half)

    @property
    def _alone(self) -> Any:
        return stats.t(max(self.degrees, 1))

    def _leads(self, ones: np.ndarray, others: np.ndarray, ahead: np.ndarray, margin: float) -> np.ndarray:
        errors = self._errors(ones, others)
        return np.divide(ahead, errors, out=np.zeros(len(ahead)), where=errors > 0)


@dataclass(frozen=True)
class ScoreContrasts(_Contrasts):
    """Scores of S settings, compared by the mean over samples of their difference; higher is better.

    Few answers that differ may all agree, and answers that rarely change and then all in one direction may not have
    changed yet, so that no variance of what was seen is enough. A contrast is therefore tested by N. Gaffke's bound of
    a bounded mean, as every accuracy (`statistics.bounded_mean_interval`): the weighted mean of the pictures'
    differences, and of one more that is the worst possible, under weights that are uniform over all that add up to 1.
    Where answers are right or wrong that is the exact sign test (McNemar's) of a difference of 0, and where all changes
    have one direction, on that side, Clopper's and Pearson's bound. The one more has as many answers as change together
    in a picture, in the setting where most do. Its chance and that without it are averaged: what was seen counts half
    (mid-p: M. Fagerland, S. Lydersen and P. Laake, BMC Medical Research Methodology 13 (2013) 91). Where none of n
    answers changes the interval of two settings reaches to 3 / n.

    For a family each contrast is tested at the level that a normal variable has beyond the CONFIDENCE quantile of the
    largest of as many, which are correlated as the contrasts are: multipliers of whole pictures (V. Chernozhukov,
    D. Chetverikov and K. Kato, Annals of Statistics 41 (2013) 2786). ADDED_ANSWERS of each sign in every contrast's
    variance, which no other shares, keep few changes from looking alike.
    """

    best: float = 1.0  #: the metric's highest score
    change: float = 1.0  #: how much a score changes by an answer that changes, as a fraction of `best`

    better_is_lower: ClassVar[bool] = False

    @classmethod
    def of(
        cls,
        scores: np.ndarray,
        pictures: Sequence[object] | np.ndarray,
        *,
        best: float = 1.0,
        reference: int | None = None,
        change: float = 1.0,
    ) -> Self:
        """The contrasts of S settings, of all pairs, or of the pairs with `reference` only.

        Args:
            scores: [S, N], from 0 to `best`; nan where a setting has none.
            pictures: [N], the picture of each sample.
            change: how much a score changes by an answer that changes, as a fraction of `best`; less than 1 where
                scores are means over several settings.
        """

        def largest_of(_: np.ndarray, residuals: np.ndarray, counts: np.ndarray, added_squares: float) -> np.ndarray:
            return largest_of_multipliers(residuals, reference, added_squares)

        added = 2 * ADDED_ANSWERS * (change * best) ** 2
        made = cls._of(scores, pictures, reference, largest_of, added_squares=added)
        return cls(**{**vars(made), "best": best, "change": change})

    def difference(self, one: int, other: int) -> float:
        """The accuracy of `one` less that of `other`, in the metric's scores."""
        return float(self.means[one] - self.means[other])

    def interval(self, one: int, other: int, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
        """Interval of `difference`, simultaneous over the family; None without a verdict."""
        self._check_in_family(one, other)
        if self.no_verdict is not None:
            return None
        least = self.critical(confidence)
        return self._bound(one, other, least), -self._bound(other, one, least)

    def _bound(self, one: int, other: int, lead: float) -> float:
        """The lower end: the difference of which the lead is so large."""

        def excess(difference: float) -> float:
            return self._lead(one, other, -difference) - lead

        middle = self.difference(one, other)
        if middle <= -self.best or excess(middle) >= 0:
            return middle
        return float(brentq(excess, -self.best * (1 - 1e-12), middle, xtol=1e-6 * self.best))

    def _lead(self, one: int, other: int, margin: float) -> float:
        """The normal quantile of the p-value that a setting is worse than another by `margin` or more."""
        differences = self.residuals[other] - self.residuals[one]
        differences += (self.means[other] - self.means[one]) * self.counts
        # Equal changes are one number.
        differences, limit = np.round(differences / self.best, 9), margin / self.best
        with_worst, as_seen = (
            log_chance_above(differences, self.counts, limit, self.change * more, more)
            for more in (self.size_of_change, 0.0)
        )
        return -float(ndtri_exp(min(np.logaddexp(with_worst, as_seen) - math.log(2), -1e-12)))

    def not_worse(self, than: int, margin: float = ACCURACY_MARGIN, confidence: float = CONFIDENCE) -> np.ndarray:
        """[S], whether each setting is not worse than this one by `margin` or more, with confidence over the family.

        Args:
            margin: as a fraction of the metric's best score.
        """
        self._check_in_family(than)
        everything = np.arange(len(self.means))
        chances = self.pair_p_values(everything, than, margin * self.best)
        return np.asarray((chances <= 1 - confidence + 1e-12) | (everything == than))

    def word_not_worse(self, one: int, than: int, margin: float = ACCURACY_MARGIN) -> Word:
        """How sure it is that a setting is less than `margin` worse than another."""
        self._check_in_family(one, than)
        limit = margin * self.best
        chances = [
            float(self.pair_p_values(*pair, each)[0]) for pair, each in (((one, than), limit), ((than, one), -limit))
        ]
        return word_of(*chances)

    @property
    def _alone(self) -> Any:
        return stats.norm

    def _leads(self, ones: np.ndarray, others: np.ndarray, ahead: np.ndarray, margin: float) -> np.ndarray:
        leads = np.zeros(len(ones))
        # A lead is hardly above that of the error of what was seen.
        spread = np.sqrt(np.maximum(self._errors(ones, others) ** 2 - self._added_variance, 0))
        hopeful = ahead > _LEAST_LEAD * self.critical(LIKELY) * spread
        for place in np.flatnonzero(hopeful & (ones != others)):
            leads[place] = self._lead(int(ones[place]), int(others[place]), margin)
        return leads

    @property
    def _added_variance(self) -> float:
        return self.added_squares * scale_of(self.num_pictures, self.num_samples)


def word_of(p_value: float, opposite: float) -> Word:
    """The word of a claim with this adjusted p-value, of which the opposite claim has `opposite`."""
    if p_value <= 1 - CONFIDENCE + 1e-12:
        return "yes"
    if opposite <= 1 - CONFIDENCE + 1e-12:
        return "no"
    return "likely" if p_value <= 1 - LIKELY + 1e-12 else "can't tell"


def groups_of_ties(order: Sequence[int] | np.ndarray, told_apart: np.ndarray) -> list[tuple[int, ...]]:
    """The longest runs of settings, in this order, of which the first and the last cannot be told apart.

    A setting may be in several groups, since its neighbours on both sides may be like it and unlike each other. One
    that is told apart from both of its neighbours is a group alone.

    Args:
        order: the settings, cheapest first.
        told_apart: [S, S].
    """
    groups: list[tuple[int, ...]] = []
    end = 0
    for start in range(len(order)):
        like = np.flatnonzero(~told_apart[order[start], np.asarray(order[start:])])
        last = start + int(like.max(initial=0)) + 1
        if last > end:
            groups.append(tuple(int(each) for each in order[start:last]))
            end = last
    return groups


def _size_of_change(own: np.ndarray, sums: np.ndarray, counts: np.ndarray) -> float:
    """How many of a picture's samples change together, in the setting where most do: 1 where each changes by itself.

    It is the squares of a setting's sums over pictures [S, G] over those of its samples [S, n]; all of a picture's
    samples where nothing differs.
    """
    alone = (own**2).sum(axis=1)
    if float(alone.sum()) < 1e-12:
        return float(counts.mean())
    together = np.divide((sums**2).sum(axis=1), alone, out=np.ones(len(own)), where=alone > 1e-12)
    return min(max(float(together.max()), 1.0), float(counts.max()))
