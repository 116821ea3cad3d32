"""Sampling strategies: which settings of the grid of knobs are measured, in order, without duplicates.

A strategy chooses points of the grid that the given values of the knobs span. "Sorted" means by each knob's own order,
the cheapest value first.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from experiment_core_utils.knobs.registry import knob_named
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.grids import distinct

T = TypeVar("T")
Places = tuple[int, ...]
Strategy = Literal["full", "balanced", "stratified", "boundary", "lhs"]
BALANCED_VALUES = 4
LHS_CONFIGS = 27
# Exchanges tried for each point: by then the regular design that they start from cannot be recognised.
_LHS_EXCHANGES = 30


def plan_settings(
    strategy: Strategy, values: Mapping[str, Sequence[Any]], num_configs: int | None = None, seed: int = 42
) -> tuple[Setting, ...]:
    """The settings of a run, each once, in the order of the knobs, the last changing fastest.

    A value that is given twice counts once; a knob without values is one that the model lacks.

    - `full`: every combination, values in the order given.
    - `balanced`: first at most four values of each knob, evenly spread by position with both ends kept (sorted by the
      knob's order of cost, vision targets in the order given), then every combination.
    - `stratified`: smallest, middle and largest value of each knob (of an even number the lower middle), then every
      combination.
    - `boundary`: the edges of the grid, corners included: every setting at which at most one knob lies strictly between
      its smallest and its largest value. A knob with one or two values is always at an end. With two knobs that vary
      this is the outline of their plane; with three of n values each 8 + 12 (n - 2) settings.
    - `lhs`: a Latin hypercube of `num_configs` settings, drawn by `seed`. Each value of a knob occurs equally often, or
      as nearly as the number allows (counts differ by at most one); with fewer settings than values, those that occur
      are evenly spread. None takes 27, or the whole grid where it is smaller.

    Args:
        values: of each knob, by name.

    Raises:
        ConfigurationError: a `num_configs` larger than the grid.
    """
    spanned = {name: _spanning(strategy, name, distinct(given)) for name, given in values.items() if given}
    places = _places(strategy, [len(each) for each in spanned.values()], num_configs, seed)
    return tuple(
        Setting({name: of_knob[at] for (name, of_knob), at in zip(spanned.items(), place, strict=True)})
        for place in places
    )


def _spanning(strategy: str, name: str, given: Sequence[Any]) -> Sequence[Any]:
    """Values of a knob that span the grid of which the strategy takes its points."""
    if strategy == "full":
        return given
    in_order = sorted(given, key=knob_named(name).order)
    if strategy == "balanced":
        return thin(in_order if knob_named(name).is_sorted_in_plans else given)
    return ends_and_middle(in_order) if strategy == "stratified" else in_order


def _places(strategy: str, sizes: Sequence[int], num_configs: int | None, seed: int) -> list[Places]:
    if strategy == "boundary":
        return edges_of_grid(sizes)
    if strategy == "lhs":
        return latin_hypercube(sizes, _lhs_size(num_configs, math.prod(sizes)), seed)
    return list(itertools.product(*map(range, sizes)))


def thin(values: Sequence[T]) -> tuple[T, ...]:
    """At most `BALANCED_VALUES` of the values, evenly spread by position, first and last among them."""
    if len(values) <= BALANCED_VALUES:
        return tuple(values)
    places = [round(step * (len(values) - 1) / (BALANCED_VALUES - 1)) for step in range(BALANCED_VALUES)]
    return tuple(values[place] for place in places)


def ends_and_middle(values: Sequence[T]) -> tuple[T, ...]:
    """First, middle (of an even number the lower one) and last of the values, each once."""
    return distinct((values[0], values[(len(values) - 1) // 2], values[-1]))


def edges_of_grid(sizes: Sequence[int]) -> list[Places]:
    """Places of a grid at which at most one coordinate is neither first nor last, in order."""
    return [
        place
        for place in itertools.product(*map(range, sizes))
        if sum(0 < at < size - 1 for at, size in zip(place, sizes, strict=True)) <= 1
    ]


def latin_hypercube(sizes: Sequence[int], count: int, seed: int) -> list[Places]:
    """`count` different places of a grid, in order, that cover each coordinate's values as evenly as possible.

    Starts from a regular design that is even and free of duplicates for every `count`, and shuffles it by exchanges
    between two places that keep both properties (McKay, Beckman and Conover 1979 for the idea of the hypercube).

    Args:
        sizes: values of each coordinate.
        count: from 1 to the product of `sizes`.
    """
    rng = random.Random(seed)
    columns = [
        _relabelled(column, size, rng) for column, size in zip(_regular_columns(sizes, count), sizes, strict=True)
    ]
    points = list(zip(*columns, strict=True))
    taken = set(points)
    for _ in range(_LHS_EXCHANGES * count if count > 1 else 0):
        first, second = rng.sample(range(count), 2)
        axis = rng.randrange(len(sizes))
        one, other = list(points[first]), list(points[second])
        one[axis], other[axis] = other[axis], one[axis]
        exchanged = [tuple(one), tuple(other)]
        if not taken.intersection(exchanged):
            taken -= {points[first], points[second]}
            taken.update(exchanged)
            points[first], points[second] = exchanged
    return sorted(points)


def _regular_columns(sizes: Sequence[int], count: int) -> list[list[int]]:
    """One column a coordinate: the first `count` steps of a walk that meets every place of the grid exactly once.

    Each coordinate counts round and round, and slips by one whenever the walk would come back to where it was. After
    any number of steps the counts of a coordinate's values differ by at most one.
    """
    columns: list[list[int]] = []
    walked = 1
    for size in sizes:
        round_length = math.lcm(walked, size)
        period = walked * size
        columns.append([(step % period + step % period // round_length) % size for step in range(count)])
        walked = period
    return columns


def _relabelled(column: Sequence[int], size: int, rng: random.Random) -> list[int]:
    """Counts under other names: the values that occur once more than the rest are evenly spread, the others drawn."""
    counts = Counter(column)
    least = min(counts.get(label, 0) for label in range(size))
    frequent = [label for label in range(size) if counts.get(label, 0) > least]
    rare = [label for label in range(size) if counts.get(label, 0) == least]
    offset = rng.random()
    spread = [int((place + offset) * size / len(frequent)) for place in range(len(frequent))]
    others = [value for value in range(size) if value not in set(spread)]
    rng.shuffle(spread)
    rng.shuffle(others)
    names = dict(zip([*frequent, *rare], [*spread, *others], strict=True))
    return [names[label] for label in column]


def _lhs_size(num_configs: int | None, grid: int) -> int:
    if num_configs is None:
        return min(LHS_CONFIGS, grid)
    if not 1 <= num_configs <= grid:
        raise ConfigurationError(
            f"--num_configs {num_configs} is not possible: the values given make {grid} settings; give 1 to {grid}"
        )
    return num_configs
