"""Points of a grid: those that can be made, and those that are left out with the reason."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from experiment_core_utils.primitives.errors import ConfigurationError, ImpossibleCombination

T = TypeVar("T")
U = TypeVar("U")


def made_of(points: Iterable[T], make: Callable[[T], U]) -> list[tuple[U | None, str | None]]:
    """What `make` gives for each point of a grid, and None; for an impossible one None, and why it is left out.

    Raises:
        ConfigurationError: none of them is possible, with the reason of the first.
    """
    made: list[tuple[U | None, str | None]] = []
    for point in points:
        try:
            made.append((make(point), None))
        except ImpossibleCombination as error:
            made.append((None, str(error)))
    reasons = [reason for _, reason in made]
    if None not in reasons:
        raise ConfigurationError(next(filter(None, reasons), "no combination is possible"))
    return made


def possible(points: Iterable[T], make: Callable[[T], U]) -> tuple[tuple[U, ...], tuple[str, ...]]:
    """What `make` gives for the possible points of a grid, and why the others are left out; raises as `made_of`."""
    made = made_of(points, make)
    return tuple(each for each, _ in made if each is not None), tuple(
        reason for _, reason in made if reason is not None
    )


def distinct(values: Sequence[T]) -> tuple[T, ...]:
    """The values without repetitions, in the order of their first occurrence."""
    return tuple(dict.fromkeys(values))
