"""The controls of a run in rounds: ratios of times that would be 1 if nothing but the knobs changed a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# What a control may be off 1 and say nothing: as two runs that are the same (`--margin` of compare).
CONTROL_MARGIN = 0.02
Interval = tuple[float, float]
ControlKind = Literal["untouched", "carry_over", "first", "placebo"]


@dataclass(frozen=True)
class Control:
    """One control: a ratio of times that is 1 if the run is fair."""

    kind: ControlKind  #: `untouched`, `carry_over`, `first` or `placebo`
    what: str  #: what the ratio is of, as a sentence names it
    ratio: float  #: geometric mean over rounds, or of samples
    ratio_ci95: Interval | None  #: holds for this control alone; None if there are too few pictures
    num_rounds: int  #: rounds, or runs of samples, that it is based on

    @property
    def excess(self) -> float:
        """How far its interval is from 1; 0 where 1 is in it."""
        if self.ratio_ci95 is None:
            return 0.0
        low, high = self.ratio_ci95
        return max(low - 1, 1 - high, 0.0)

    @property
    def is_off(self) -> bool:
        """Whether it is surely off 1 by more than CONTROL_MARGIN."""
        return self.excess > CONTROL_MARGIN

    def __str__(self) -> str:
        ends = "" if self.ratio_ci95 is None else " [{:.3f}, {:.3f}]".format(*self.ratio_ci95)
        return f"{self.what} {self.ratio:.3f}{ends}{' (off)' * self.is_off}"


def control_lines(controls: Sequence[Control]) -> list[str]:
    """All controls in one line; none without any."""
    return [f"controls, 1 where knobs alone change times: {'; '.join(map(str, controls))}"] if controls else []
