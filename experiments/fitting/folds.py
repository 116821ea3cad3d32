"""Partitions of samples in which all samples of a group (a setting, a picture, a network) stay together."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

Item = TypeVar("Item")


def grouped_folds(groups: np.ndarray, num_folds: int, seed: int = 0) -> np.ndarray:
    """[S], the fold of each sample: groups are dealt out in shuffled order, each with all its samples."""
    names, places = np.unique(groups, return_inverse=True)
    return (np.random.default_rng(seed).permutation(len(names)) % num_folds)[places]


def left_out_masks(groups: np.ndarray, num_folds: int) -> Iterator[np.ndarray]:
    """For each fold of `grouped_folds` the mask [S] of the samples that it leaves out."""
    folds = grouped_folds(groups, num_folds)
    return (folds == fold for fold in range(num_folds))


def parted(items: Iterable[Item], is_left_out: Callable[[Item], bool]) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """The items to fit to, and those left out."""
    items = tuple(items)
    return tuple(each for each in items if not is_left_out(each)), tuple(each for each in items if is_left_out(each))


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
