"""In: something that runs a model, and a knob; out: its counted operations before and after the knob was turned."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from experiment_core_utils.models.flop_counter import count_flops


@dataclass(frozen=True)
class FlopsDelta:
    """Operations of the same run, one multiply-add as 2, with the knob as it was and turned."""

    before: int
    applied: int

    @property
    def moved(self) -> bool:
        """Whether the knob changes what is computed; a model that computes all experts does the same at every top-k."""
        return self.before != self.applied


def flops_delta(run: Callable[[], object], turned: AbstractContextManager[object]) -> FlopsDelta:
    """Count the operations of `run`, then again inside `turned`. Never while timing.

    Packed weights have no formula: their products count as nothing, so that nothing moves with them.
    """
    before = count_flops(run)
    with turned:
        return FlopsDelta(before, count_flops(run))
