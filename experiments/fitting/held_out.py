"""Samples that are left out of a fit, and how far its predictions of them are off.

Folds keep all samples of a group (a setting, a picture, a network) together; errors are relative to what was measured.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


def left_out_masks(groups: np.ndarray, num_folds: int) -> Iterator[np.ndarray]:
    """For each fold the mask [S] of the samples that it leaves out: groups in shuffled order, all samples of each.

    Raises ValueError for fewer groups than folds.
    """
    # Its import takes a second, and most commands need none of it.
    from sklearn.model_selection import GroupKFold

    for _, places in GroupKFold(num_folds, shuffle=True, random_state=1).split(groups, groups=groups):
        yield np.isin(np.arange(len(groups)), places)


def drawn_groups(groups: Sequence[str], strata: Sequence[str], share: float, seed: int) -> np.ndarray:
    """[S] mask of about `share` of the groups of each stratum; a group of several strata is in it for all or none."""
    generator = np.random.default_rng(seed)
    first: set[str] = set()
    rest: set[str] = set()
    for stratum in dict.fromkeys(strata):
        own = {group for group, of in zip(groups, strata, strict=True) if of == stratum}
        free = sorted(own - first - rest)
        wanted = max(round(share * len(own)) - len(own & first), 0)
        drawn = {free[place] for place in generator.permutation(len(free))[:wanted]}
        first |= drawn
        rest |= set(free) - drawn
    return np.array([group in first for group in groups])


HIT = 0.1


@dataclass(frozen=True)
class PredictionScore:
    """Errors of n predictions, as fractions, not percent."""

    n: int
    mape: float  #: mean of |predicted / measured - 1|
    hit_rate: float  #: fraction of predictions within 10 %
    bias: float  #: mean of predicted / measured - 1


def mean_of(values: np.ndarray) -> float | None:
    """The mean; None of nothing."""
    return float(values.mean()) if len(values) else None


def deviations(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Predicted / measured - 1 of the samples that have both, and a measured value above 0."""
    has = np.isfinite(predicted) & np.isfinite(measured) & (measured > 0)
    return np.asarray(predicted[has] / measured[has] - 1)


def relative_error(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Mean size of the deviations; infinite where there are none."""
    found = deviations(predicted, measured)
    return float(np.abs(found).mean()) if len(found) else math.inf


def score(predicted: np.ndarray, measured: np.ndarray) -> PredictionScore | None:
    """None of nothing."""
    found = deviations(predicted, measured)
    if not len(found):
        return None
    errors = np.abs(found)
    return PredictionScore(len(found), float(errors.mean()), float((errors <= HIT).mean()), float(found.mean()))
