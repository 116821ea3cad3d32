"""Rounds: which setting runs when, so that what changes with time is common to the settings that are compared.

A round is a sample (or a small group of samples) at every setting. The order of the settings in it is a row of a
Williams design: over a cycle of rounds each setting stands equally often in each place, and equally often behind each
other one (E. Williams, "Experimental designs balanced for the estimation of residual effects of treatments", Australian
Journal of Scientific Research A 2 (1949) 149).
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from experiment_core_utils.meters.stability import shuffled
from experiment_core_utils.records.settings import RoundsTrace

# Seconds by the setting's key and the sample's id.
RoundTimes = Mapping[tuple[str, int], float]


def williams_rows(size: int) -> tuple[tuple[int, ...], ...]:
    """The orders of a balanced cycle: `size` of them for an even number of settings, twice as many for an odd one."""
    first = [0]
    for step in range(1, size):
        first.append((first[-1] + (step if step % 2 else -step)) % size)
    rows = [tuple((place + row) % size for place in first) for row in range(size)]
    return tuple(rows) if size % 2 == 0 else (*rows, *(row[::-1] for row in rows))


class RoundOrder:
    """The order of the settings in each round, drawn by a seed; the same in a run that was resumed.

    Args:
        keys: of all settings of the plan.
    """

    def __init__(self, keys: Sequence[str], seed: int) -> None:
        self.seed = seed
        self._keys = tuple(keys)
        self._rows = williams_rows(len(keys)) if keys else ((),)

    def of_round(self, number: int, due: Collection[str]) -> tuple[str, ...]:
        """The settings that are due in a round, in its order; each cycle of rounds has names and rows drawn anew."""
        cycle, place = divmod(number, len(self._rows))
        names = shuffled(self._keys, (self.seed + cycle) % 2**32)
        row = shuffled(self._rows, (self.seed + cycle + 1) % 2**32)[place]
        return tuple(name for at in row if (name := names[at]) in due)


@dataclass
class RoundsSeen:
    """What the rounds of one process showed of the machine; no verdict depends on it."""

    num_rounds: int = 0
    switches_s: list[float] = field(default_factory=list)  #: what it took to put a setting in force
    #: of each further round of a sample, its common factor: the geometric mean over settings of its times over those of
    #: the sample's first round
    factors: list[float] = field(default_factory=list)
    first: RoundTimes = field(default_factory=dict)  #: of the first round
    closing_factor: float | None = None  #: of the round that repeats it at the end

    def add(self, times_s: Sequence[RoundTimes]) -> None:
        """Note the rounds of a group of samples."""
        self.num_rounds += len(times_s)
        self.factors += [factor for later in times_s[1:] if (factor := common_factor(times_s[0], later)) is not None]
        if not self.first and times_s:
            self.first = dict(times_s[0])

    def trace(self, experiment_id: str, rank: int, num_settings: int, seed: int, group_size: int) -> RoundsTrace:
        """The record of it."""
        return RoundsTrace(
            experiment_id=experiment_id,
            rank=rank,
            num_settings=num_settings,
            num_rounds=self.num_rounds,
            seed=seed,
            group_size=group_size,
            switch_s=statistics.median(self.switches_s) if self.switches_s else None,
            factors=(min(self.factors), max(self.factors)) if self.factors else None,
            closing_factor=self.closing_factor,
        )


def common_factor(before_s: RoundTimes, after_s: RoundTimes) -> float | None:
    """How many times as long a round took as another one of the same samples: the geometric mean over what both have;
    None where they share nothing.
    """
    ratios = [math.log(after_s[place] / seconds) for place, seconds in before_s.items() if place in after_s]
    return math.exp(statistics.fmean(ratios)) if ratios else None
