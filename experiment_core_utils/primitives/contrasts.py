"""Differences between settings that were measured on the same samples, with intervals and verdicts that hold together.

A contrast is the mean over samples of one setting's value less another's. Pictures are independent, samples of one
picture are not: the error of a contrast comes from its sums over G pictures, G / (G - 1) * sum of (sum - mean *
count)^2 / n^2 (W. Cochran, "Sampling Techniques", 3rd ed. 1977, 9A). A contrast over its error is t, and the critical
value of a family of contrasts is a quantile of the largest |t| when the signs of whole pictures are flipped at random,
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
from typing import ClassVar, Literal, Self

import numpy as np
from scipy import stats

from experiment_core_utils.primitives.replication import COUNTED, Replication
from experiment_core_utils.primitives.statistics import CONFIDENCE, SEED

# How sure it is that one setting is better than another: `yes` with CONFIDENCE over the whole family, `likely` with
# LIKELY over the whole family, `no` where the opposite is a yes.
Word = Literal["yes", "likely", "can't tell", "no"]
LIKELY = 0.8
# Accuracy that a cheaper setting may be worse by and still be as good, as a fraction of the metric's best score.
ACCURACY_MARGIN = 0.02
# Fewer pairs that all agree could do so by chance (0.5 ** 6 < 0.025 < 0.5 ** 5).
FEWEST_PICTURES = 6
FLIPS = 2000
# Flips of so many pictures are all made.
MOST_ENUMERATED = 11
# The family of all pairs of more settings is judged by Student's t with Bonferroni's correction.
MOST_FLIPPED_SETTINGS = 200
# Answers added to each difference of scores, this many better and as many worse by the whole best score.
ADDED_ANSWERS = 2
_ROUNDING = 1e-16


@dataclass(frozen=True)
class _Contrasts:
    """S settings on the samples that all of them have; make one by `of`."""

    means: np.ndarray  #: [S], of each setting's values less the picture's mean over settings
    residuals: np.ndarray  #: [S, G], sums over pictures less the number of samples times the mean
    num_samples: int  #: that all S settings have
    num_pictures: int  #: G
    reference: int | None  #: the setting of all contrasts of the family; None for all pairs
    #: [F] the largest |t| of the family in each flip, ascending; None above MOST_FLIPPED_SETTINGS, and where variances
    #: are estimates of single contrasts
    largest: np.ndarray | None
    added_squares: float  #: added to each contrast's sum of squares
    replication: Replication  #: what was the same for all samples of one setting
    no_verdict: str | None  #: the reason why nothing is said of any pair

    better_is_lower: ClassVar[bool]

    @classmethod
    def _of(
        cls,
        values: np.ndarray,
        pictures: Sequence[object] | np.ndarray,
        reference: int | None,
        *,
        added_squares: float = 0.0,
        replication: Replication = COUNTED,
    ) -> Self:
        values = np.asarray(values, dtype=np.float64)
        known = np.isfinite(values).all(axis=0)
        numbers = np.unique(np.asarray(pictures)[known], return_inverse=True)[1]
        shared = values[:, known]
        counts = np.bincount(numbers).astype(np.float64)
        sums = np.zeros((len(values), len(counts)))
        if len(counts):
            # What all settings share cancels; without it sums of squares keep their digits.
            own = shared - shared.mean(axis=0)
            np.add.at(sums.T, numbers, own.T)
            added_squares *= _size_of_change(own, sums, counts) ** 2
        means = sums.sum(axis=1) / max(len(numbers), 1)
        residuals = sums - means[:, None] * counts
        no_verdict, largest = None, None
        if len(counts) < FEWEST_PICTURES:
            no_verdict = f"a verdict needs {FEWEST_PICTURES} pictures that all settings have, and {len(counts)} are"
        elif replication.undecided is not None:
            no_verdict = f"this {replication.undecided}"
        elif not replication.is_each_alone and (1 < len(values) <= MOST_FLIPPED_SETTINGS or reference is not None):
            largest = _largest_of_flips(sums, residuals, counts, reference, added_squares, replication)
        return cls(
            means=means,
            residuals=residuals,
            num_samples=len(numbers),
            num_pictures=len(counts),
            reference=reference,
            largest=largest,
            added_squares=added_squares,
            replication=replication,
            no_verdict=no_verdict,
        )

    def _differences(self, at: int) -> np.ndarray:
        """[S], the mean of this setting's value less each."""
        return np.asarray(self.means[at] - self.means)

    def errors(self, at: int) -> np.ndarray:
        """[S], the standard errors of this setting's contrasts; infinite for fewer than two pictures."""
        if self.num_pictures < 2:
            return np.full(len(self.means), np.inf)
        squares = ((self.residuals[at] - self.residuals) ** 2).sum(axis=1) + self.added_squares
        variances = squares * _scale(self.num_pictures, self.num_samples) + self.replication.variances(at)
        return np.asarray(np.sqrt(np.maximum(variances, _ROUNDING * self._differences(at) ** 2)))

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
        """What |t| has to be above, for all contrasts of the family to be right with this confidence."""
        if self.largest is None:
            return float(stats.t.isf((1 - confidence) / (2 * max(self.num_comparisons, 1)), self.degrees))
        return float(self.largest[-1 - math.floor((1 - confidence) * len(self.largest) + 1e-9)])

    def p_values(self, at: int) -> np.ndarray:
        """[S], the p-value that this setting is not better than each, adjusted for the family; 1 without a verdict.

        nan for a pair outside the family. It is one-sided for each pair; the family contains both directions of each,
        so that CONFIDENCE is that of no wrong `yes` in the whole family.
        """
        if self.no_verdict is not None:
            return np.ones(len(self.means))
        errors = self.errors(at)
        ahead = self._differences(at) * (-1 if self.better_is_lower else 1)
        ratios = np.divide(ahead, errors, out=np.zeros(len(ahead)), where=errors > 0)
        if self.largest is None:
            chances = 2 * self.num_comparisons * stats.t.sf(ratios, self.degrees)
        else:
            chances = 1 - np.searchsorted(self.largest, ratios * (1 - 1e-9)) / len(self.largest)
        found = np.where(ahead > 0, np.minimum(chances, 1.0), 1.0)
        if self.reference not in (None, at):
            # Of another setting only the contrast with the reference is in the family.
            found[np.arange(len(found)) != self.reference] = np.nan
        return np.asarray(found)

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

    def _bounds(self, one: int, other: int, confidence: float) -> tuple[float, float] | None:
        self._check_in_family(one, other)
        if self.no_verdict is not None:
            return None
        middle, half = self._differences(one)[other], self.critical(confidence) * self.errors(one)[other]
        return float(middle - half), float(middle + half)


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
        return cls._of(log_times, pictures, reference, replication=replication)

    @property
    def log_ratio(self) -> np.ndarray:
        """[S, S], mean over samples of log t_a - log t_b."""
        return np.asarray(self.means[:, None] - self.means)

    def ratio(self, one: int, other: int) -> float:
        """How many times as long `one` takes as `other`: 0.8 is a fifth less."""
        return math.exp(self.means[one] - self.means[other])

    def interval(self, one: int, other: int, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
        """Interval of `ratio`, above 0, simultaneous over the family; None without a verdict."""
        bounds = self._bounds(one, other, confidence)
        return None if bounds is None else (math.exp(bounds[0]), math.exp(bounds[1]))


@dataclass(frozen=True)
class ScoreContrasts(_Contrasts):
    """Scores of S settings, compared by the mean over samples of their difference; higher is better.

    Few answers that differ may all agree, and none may differ in a small sample though some would in a large one.
    Therefore ADDED_ANSWERS of each sign are in every sum of squares, each as many answers of a picture as change
    together over all settings. Where no answer of n pictures differs, the interval of two settings is about 4 / n to
    either side, as the score interval of matched pairs (T. Tango, Statistics in Medicine 17 (1998) 891). A sign-flip
    test holds with any statistic, so that this costs verdicts on differences nothing.
    """

    best: float = 1.0  #: the metric's highest score

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
        made = cls._of(scores, pictures, reference, added_squares=2 * ADDED_ANSWERS * (change * best) ** 2)
        return made if best == 1.0 else cls(**{**vars(made), "best": best})

    def difference(self, one: int, other: int) -> float:
        """The accuracy of `one` less that of `other`, in the metric's scores."""
        return float(self.means[one] - self.means[other])

    def interval(self, one: int, other: int, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
        """Interval of `difference`, simultaneous over the family; None without a verdict."""
        bounds = self._bounds(one, other, confidence)
        return None if bounds is None else (max(bounds[0], -self.best), min(bounds[1], self.best))

    def not_worse(self, than: int, margin: float = ACCURACY_MARGIN, confidence: float = CONFIDENCE) -> np.ndarray:
        """[S], whether each setting is not worse than this one by `margin` or more, with confidence over the family.

        Args:
            margin: as a fraction of the metric's best score.
        """
        self._check_in_family(than)
        if self.no_verdict is not None:
            return np.arange(len(self.means)) == than
        lows = -self._differences(than) - self.critical(confidence) * self.errors(than)
        return np.asarray((lows > -margin * self.best) | (np.arange(len(lows)) == than))

    def word_not_worse(self, one: int, than: int) -> Word:
        """How sure it is that a setting is less than ACCURACY_MARGIN worse than another."""
        sure, likely = (self.interval(one, than, level) for level in (CONFIDENCE, LIKELY))
        if sure is None or likely is None:
            return "can't tell"
        limit = -ACCURACY_MARGIN * self.best
        if sure[0] > limit:
            return "yes"
        return "no" if sure[1] < limit else "likely" if likely[0] > limit else "can't tell"


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
    """How many of a picture's samples change together, over all pairs of settings: 1 where each changes by itself.

    It is the squares of the sums over pictures [S, G] over those of the samples [S, n]; all of a picture's samples
    where nothing differs.
    """
    squares = float((own**2).sum())
    if squares < 1e-12:
        return float(counts.mean())
    return max(float((sums**2).sum()) / squares, 1.0)


def _scale(num_pictures: int, num_samples: int) -> float:
    return num_pictures / (num_pictures - 1) / num_samples**2


def _largest_of_flips(
    sums: np.ndarray,
    residuals: np.ndarray,
    counts: np.ndarray,
    reference: int | None,
    added_squares: float,
    replication: Replication,
) -> np.ndarray:
    """[F] ascending, the largest |t| of a family in each flip, of whichever kind of flips has more at that quantile."""
    generator, size = np.random.default_rng(SEED), len(counts)
    if size <= MOST_ENUMERATED and not replication.components:
        # Of a flip and its opposite, which have the same |t|, one.
        signs = 1.0 - 2.0 * ((np.arange(2 ** (size - 1))[:, None] >> np.arange(size)) & 1)
    else:
        signs = generator.choice([-1.0, 1.0], size=(FLIPS, size))
        signs[0] = 1.0  # as measured (B. Phipson and G. Smyth, "Permutation p-values should never be zero", 2010)
    drawn = replication.draw(generator, len(signs), len(sums))
    # By what factor each component's variance might be estimated off in each flip.
    factors = [_estimated(generator, each.degrees, len(signs)) for each in replication.components]

    def added(one: int, others: np.ndarray) -> np.ndarray:
        each = zip(replication.components, factors, strict=True)
        return sum((own.variances(one)[others] * factor[:, None] for own, factor in each), np.zeros((len(signs), 1)))

    kinds = [_flipped(each, counts, signs, reference, added_squares, drawn, added) for each in (sums, residuals)]
    places = np.minimum(np.arange(1, len(signs) + 1), len(signs) - 0.5) / len(signs)
    alone = stats.t.ppf((1 + places) / 2, size - 1)
    return np.asarray(np.maximum(np.maximum(np.sort(kinds[0]), np.sort(kinds[1])), alone))


def _estimated(generator: np.random.Generator, degrees: float, size: int) -> np.ndarray:
    """Estimates of a variance of 1 with so many degrees of freedom."""
    return np.ones(size) if math.isinf(degrees) else generator.chisquare(degrees, size) / degrees


def _flipped(
    sums: np.ndarray,
    counts: np.ndarray,
    signs: np.ndarray,
    reference: int | None,
    added_squares: float,
    drawn: np.ndarray,
    added: Callable[[int, np.ndarray], np.ndarray],
) -> np.ndarray:
    """[F], the largest |t| over the family when pictures' sums [S, G] take these signs [F, G].

    Settings also get [F, S] `drawn`, and contrasts of one with others the variances [F, others] of `added`. Flips leave
    the sum of squares of a difference as it is, so that t follows from the flipped sums alone.
    """
    num_samples, scale = counts.sum(), _scale(len(counts), int(counts.sum()))
    means, weighted = signs @ sums.T / num_samples, signs @ (sums * counts).T
    largest = np.zeros(len(signs))
    for one in range(len(sums)) if reference is None else (reference,):
        others = np.arange(one + 1, len(sums)) if reference is None else np.delete(np.arange(len(sums)), one)
        if not len(others):
            continue
        squares = ((sums[one] - sums[others]) ** 2).sum(axis=1) + added_squares
        gaps = means[:, [one]] - means[:, others]
        spread = squares - gaps * (2 * (weighted[:, [one]] - weighted[:, others]) - gaps * (counts @ counts))
        spread *= scale
        if drawn.any():
            gaps += drawn[:, [one]] - drawn[:, others]
            spread += added(one, others)
        gaps *= gaps
        np.maximum(spread, _ROUNDING * gaps + np.finfo(float).tiny, out=spread)
        np.maximum(largest, (gaps / spread).max(axis=1), out=largest)
    return np.asarray(np.sqrt(largest))
