"""In: energy counters; out: when they advance: how long their ticks are, and the next advance of each."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from experiment_core_utils.meters.interface import EnergyCounter
from experiment_core_utils.primitives.clock import Clock
from experiment_core_utils.primitives.energy_records import TickCalibration
from experiment_core_utils.primitives.errors import MeterUnavailable

POLL_EVERY_S = 0.0005
# The longest tick that was met is 100 ms.
PATIENCE_S = 2.0


@dataclass(frozen=True)
class Edge:
    """One advance of a counter; `reason` says why there is none.

    Attributes:
        earliest_s, latest_s: it happened between the beginning of the last reading that did not show it and the end of
            the first that did.
        before_j, joules: what the counter shows up to then, and from then on.
    """

    earliest_s: float
    latest_s: float
    before_j: float
    joules: float
    reason: str | None = None

    @property
    def at_s(self) -> float:
        """Its moment, known to `jitter_s`."""
        return (self.earliest_s + self.latest_s) / 2

    @property
    def jitter_s(self) -> float:
        """Most by which `at_s` may be off."""
        return (self.latest_s - self.earliest_s) / 2


class EdgeWatch:
    """Polls counters beside the running code until each has advanced once.

    Attributes:
        edges: of the counters that are done, by their place.
    """

    def __init__(self, counters: Sequence[EnergyCounter], clock: Clock, patience_s: float = PATIENCE_S) -> None:
        self._counters = tuple(counters)
        self._clock = clock
        self._last: dict[int, tuple[float, float] | None] = dict.fromkeys(range(len(self._counters)))
        self.edges: dict[int, Edge] = {}
        self._given_up_s = clock.now_s() + patience_s
        self._polling = clock.every(POLL_EVERY_S, self._poll)

    @property
    def is_done(self) -> bool:
        """Whether every counter has advanced, failed, or been given up, by now, or polling has come to grief."""
        if self._polling.has_failed:
            return True
        if len(self.edges) < len(self._counters):
            return False
        now_s = self._clock.now_s()
        return all(edge.latest_s <= now_s for edge in self.edges.values())

    def stop(self) -> None:
        """Poll no longer; raises what a reading raised, where that is not MeterUnavailable."""
        self._polling.stop()

    def _poll(self) -> None:
        for place, last in list(self._last.items()):
            edge = self._look(place, last)
            if edge is not None:
                self.edges[place] = edge
                del self._last[place]

    def _look(self, place: int, last: tuple[float, float] | None) -> Edge | None:
        begun_s = self._clock.now_s()
        try:
            joules = self._counters[place].read_j()
        except MeterUnavailable as error:
            return Edge(begun_s, begun_s, 0.0, 0.0, f"the counter could not be read: {error}")
        ended_s = self._clock.now_s()
        if last is not None and joules != last[1]:
            return Edge(last[0], ended_s, last[1], joules)
        if begun_s > self._given_up_s:
            return Edge(begun_s, begun_s, joules, joules, f"the counter did not advance from {joules:.3f} J")
        self._last[place] = (begun_s, joules)
        return None


def wait_for_edges(counters: Sequence[EnergyCounter], clock: Clock) -> tuple[Edge, ...]:
    """The next advance of each counter, while nothing else is done here."""
    watch = EdgeWatch(counters, clock)
    while not watch.is_done:
        clock.sleep(POLL_EVERY_S)
    watch.stop()
    return tuple(watch.edges[place] for place in range(len(watch.edges)))


def calibrate_tick(counter: EnergyCounter, clock: Clock, num_ticks: int = 20) -> TickCalibration:
    """Poll a counter through some of its ticks.

    A counter that is slower to read than to advance shows a tick with every reading; what is found is then the time of
    a reading, which is what windows are uncertain by.
    """
    moments, costs, last_j = list[float](), list[float](), None
    given_up_s = clock.now_s() + PATIENCE_S
    reason = None
    while len(moments) <= num_ticks and reason is None:
        begun_s = clock.now_s()
        try:
            joules = counter.read_j()
        except MeterUnavailable as error:
            reason = f"the counter could not be read: {error}"
            continue
        ended_s = clock.now_s()
        costs.append(ended_s - begun_s)
        if last_j is not None and joules != last_j:
            moments.append((begun_s + ended_s) / 2)
            given_up_s = ended_s + PATIENCE_S
        elif ended_s > given_up_s:
            reason = f"the counter did not advance for {PATIENCE_S:g} s"
        last_j = joules
        clock.sleep(POLL_EVERY_S)
    ticks = [after - before for before, after in itertools.pairwise(moments)]
    cost_s = statistics.median(costs) if costs else None
    if not ticks or reason is not None:
        return TickCalibration(None, None, cost_s, len(ticks), reason)
    return TickCalibration(statistics.fmean(ticks), max(ticks), cost_s, len(ticks), None)
