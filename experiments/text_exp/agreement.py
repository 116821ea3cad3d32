"""In: the answers of two runs over the same prompts; out: how many differ, and from which token on. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from experiment_core_utils.primitives.distributions import bounded_mean_interval


@dataclass(frozen=True)
class Agreement:
    """Two runs over the same prompts.

    Attributes:
        num_prompts: in each run.
        places: of each prompt whose answers differ, the place of the first token that does, from 0; ascending.
    """

    num_prompts: int
    places: tuple[int, ...]

    @property
    def flip_rate(self) -> float | None:
        """Share of the prompts whose answers differ; None for no prompt."""
        return len(self.places) / self.num_prompts if self.num_prompts else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the flip rate over prompts such as these; None for no prompt."""
        agreeing = self.num_prompts - len(self.places)
        return bounded_mean_interval([1.0] * len(self.places) + [0.0] * agreeing)


def compare(answers: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> Agreement:
    """Token ids of each prompt in one run against those in the other; raises ValueError for unequal numbers."""
    places = [first_difference(one, other) for one, other in zip(answers, others, strict=True)]
    return Agreement(len(answers), tuple(sorted(place for place in places if place is not None)))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Place of the first token that differs, or that only one of them has; None where they are equal."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))
