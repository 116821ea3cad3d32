"""Partitions of samples in which all samples of a group (a setting, a picture, a network) stay together."""

from collections.abc import Iterator, Sequence

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
