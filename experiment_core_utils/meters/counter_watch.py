"""In: energy counters and a clock; out: what they show about every second, read beside the running code.

A counter that is read at both ends of a window alone hides that it was reset in between, where it has passed its old
value since.
"""

from collections.abc import Sequence

from experiment_core_utils.meters.counter_rise import CounterReading
from experiment_core_utils.meters.interface import EnergyCounter
from experiment_core_utils.primitives.clock import Clock
from experiment_core_utils.primitives.errors import MeterUnavailable

LOOK_EVERY_S = 1.0
# A counter that wraps is looked at this many times in the shortest time in which it can.
LOOKS_PER_WRAP = 4


def look_every_s(counters: Sequence[EnergyCounter]) -> float:
    """How long to wait between two looks at these counters."""
    times_to_wrap = [each.wraps_at_j / each.limit_w for each in counters if each.wraps_at_j and each.limit_w]
    return min([LOOK_EVERY_S, *(each / LOOKS_PER_WRAP for each in times_to_wrap)])


def read_counter(counter: EnergyCounter, clock: Clock) -> CounterReading:
    """One look at one counter."""
    begun_s = clock.now_s()
    try:
        joules = counter.read_j()
    except MeterUnavailable as error:
        return CounterReading(begun_s, clock.now_s(), None, f"the counter could not be read: {error}")
    return CounterReading(begun_s, clock.now_s(), joules)


class CounterWatch:
    """Looks at counters from now until it is stopped."""

    def __init__(self, counters: Sequence[EnergyCounter], clock: Clock) -> None:
        self._counters = tuple(counters)
        self._clock = clock
        self._readings: tuple[list[CounterReading], ...] = tuple([] for _ in self._counters)
        self._repeating = clock.every(look_every_s(self._counters), self._look)

    def stop(self) -> None:
        """Look no longer; raises what a reading raised, where that is not MeterUnavailable."""
        self._repeating.stop()

    def between(self, place: int, begin_s: float, end_s: float) -> list[CounterReading]:
        """Looks at one counter, by its place, that begun and ended between two moments, in order."""
        return [each for each in self._readings[place] if begin_s <= each.begun_s and each.ended_s <= end_s]

    def _look(self) -> None:
        for counter, readings in zip(self._counters, self._readings, strict=True):
            readings.append(read_counter(counter, self._clock))
