"""Energy of a window from hardware counters (NVML, RAPL), with its error bound.

A counter shows its last tick. Without alignment a window is off by up to a tick of power. With it the meter waits for
a tick before the window begins and for one after it has ended, up to a tick each, and interpolates the energy in
between linearly: where power falls from P to 0 at the end, at most P * tick / 4 is lost. While the window is open the
counters are looked at about every second, so that one that is reset or goes away in between has no figure.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from experiment_core_utils.meters.energy_statistics import quantisation_bound_j
from experiment_core_utils.meters.interface import EnergyCounter, PowerProbe
from experiment_core_utils.primitives.clock import Clock
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable
from experiment_core_utils.records.energy import Component, DeviceEnergy, EnergyOrigin, EnergyReading, TickCalibration

# Limits hold on average over a while, and a counter shows up to a tick more or less at either end of a time.
LIMIT_SLACK = 1.1
TICKS_S = 0.2


class CounterReading(NamedTuple):
    """What a counter showed; `reason` says why nothing."""

    #: started_s, ended_s: when it was read; the value is that of some moment in between
    started_s: float
    ended_s: float
    joules: float | None
    reason: str | None = None


class CounterDelta(NamedTuple):
    """What a counter rose by; None with the reason, or with a remark on what was done to it."""

    joules: float | None
    reason: str | None
    remark: str | None


def counter_delta(
    before_j: float, after_j: float, seconds: float, wraps_at_j: float | None, limit_w: float | None
) -> CounterDelta:
    """What a counter rose by in `seconds`; one that went backwards has wrapped or was reset.

    It has wrapped where it is known to and the rise is within what the device can draw at its limit. A counter that
    wraps has no figure where that limit is not known, or where it can have wrapped once more than it shows. A counter
    that was reset and has since passed its old value looks like one that rose: where it is read each second, less than
    a second's energy is lost.
    """
    went = f"the counter went backwards, from {before_j:.3f} to {after_j:.3f} J"
    if wraps_at_j is None:
        if after_j >= before_j:
            return CounterDelta(after_j - before_j, None, None)
        return CounterDelta(None, f"{went}: it was reset", None)
    if limit_w is None:
        reason = f"the counter wraps at {wraps_at_j:.0f} J and without a power limit a wrap looks like a reset"
        return CounterDelta(None, reason, None)
    most_j = limit_w * LIMIT_SLACK * (max(seconds, 0.0) + TICKS_S)
    has_wrapped = after_j < before_j
    rise_j = after_j - before_j + (wraps_at_j if has_wrapped else 0.0)
    if rise_j + wraps_at_j <= most_j:
        reason = f"the counter wraps at {wraps_at_j:.0f} J, which may have happened unseen in {seconds:.3g} s"
        return CounterDelta(None, reason, None)
    if not has_wrapped:
        return CounterDelta(rise_j, None, None)
    if rise_j > most_j:
        return CounterDelta(None, f"{went}: it was reset, a wrap at {wraps_at_j:.0f} J would be too much energy", None)
    return CounterDelta(rise_j, None, f"{went}: it wrapped at {wraps_at_j:.0f} J, which was undone")


def rise_along(readings: Sequence[CounterReading], wraps_at_j: float | None, limit_w: float | None) -> CounterDelta:
    """What a counter rose by from the first of these readings to the last; none where any of them failed, or where it
    was reset between any two."""
    total_j, remark = 0.0, None
    failed = next((each for each in readings if each.joules is None), None)
    if failed is not None:
        return CounterDelta(None, failed.reason, None)
    for before, after in itertools.pairwise(readings):
        assert before.joules is not None and after.joules is not None
        delta = counter_delta(before.joules, after.joules, after.ended_s - before.started_s, wraps_at_j, limit_w)
        if delta.joules is None:
            return delta
        total_j += delta.joules
        remark = delta.remark or remark
    return CounterDelta(total_j, None, remark)


LOOK_EVERY_S = 1.0
# A counter that wraps is looked at this many times in the shortest time in which it can.
LOOKS_PER_WRAP = 4


def read_counter(counter: EnergyCounter, clock: Clock) -> CounterReading:
    """One look at one counter."""
    started_s = clock.now_s()
    try:
        joules = counter.read_j()
    except MeterUnavailable as error:
        return CounterReading(started_s, clock.now_s(), None, f"the counter could not be read: {error}")
    return CounterReading(started_s, clock.now_s(), joules)


class CounterWatch:
    """Looks at counters from now until it is stopped."""

    def __init__(self, counters: Sequence[EnergyCounter], clock: Clock) -> None:
        self._counters = tuple(counters)
        self._clock = clock
        self._readings: tuple[list[CounterReading], ...] = tuple([] for _ in self._counters)
        times_to_wrap = (each.wraps_at_j / each.limit_w for each in counters if each.wraps_at_j and each.limit_w)
        interval_s = min([LOOK_EVERY_S, *(seconds / LOOKS_PER_WRAP for seconds in times_to_wrap)])
        self._repeating = clock.every(interval_s, self._look)

    def stop(self) -> None:
        """Stop looking at the counters; raises what a reading raised, where that is not MeterUnavailable."""
        self._repeating.stop()

    def between(self, place: int, begin_s: float, end_s: float) -> list[CounterReading]:
        """Readings of one counter, by its place, that started and ended between two moments, in order."""
        return [each for each in self._readings[place] if begin_s <= each.started_s and each.ended_s <= end_s]

    def _look(self) -> None:
        for counter, readings in zip(self._counters, self._readings, strict=True):
            readings.append(read_counter(counter, self._clock))


POLL_EVERY_S = 0.0005
# The longest tick that was met is 100 ms.
PATIENCE_S = 2.0
CALIBRATION_TICKS = 20


@dataclass(frozen=True)
class Edge:
    """One advance of a counter; `reason` says why there is none."""

    #: earliest_s, latest_s: it happened between the beginning of the last reading that did not show it and the end of
    #: the first that did
    earliest_s: float
    latest_s: float
    #: before_j, joules: what the counter shows up to then, and from then on
    before_j: float
    joules: float
    reason: str | None = None

    @property
    def at_s(self) -> float:
        """Moment of the edge, known to `jitter_s`."""
        return (self.earliest_s + self.latest_s) / 2

    @property
    def jitter_s(self) -> float:
        """Most by which `at_s` may be off."""
        return (self.latest_s - self.earliest_s) / 2

    @property
    def readings(self) -> tuple[CounterReading, CounterReading]:
        """The last reading before it and the first after it; without a value where there is no edge."""
        before_j, after_j = (self.before_j, self.joules) if self.reason is None else (None, None)
        return (
            CounterReading(self.earliest_s, self.earliest_s, before_j, self.reason),
            CounterReading(self.earliest_s, self.latest_s, after_j, self.reason),
        )


class EdgeWatch:
    """Polls counters beside the running code until each has advanced once.

    Attributes:
        edges: of the counters that are done, by their place.
    """

    def __init__(self, counters: Sequence[EnergyCounter], clock: Clock) -> None:
        self._counters = tuple(counters)
        self._clock = clock
        self._last: dict[int, tuple[float, float] | None] = dict.fromkeys(range(len(self._counters)))
        self.edges: dict[int, Edge] = {}
        self._given_up_s = clock.now_s() + PATIENCE_S
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
        """Stop polling the counters; raises what a reading raised, where that is not MeterUnavailable."""
        self._polling.stop()

    def _poll(self) -> None:
        for place, last in list(self._last.items()):
            edge = self._look(place, last)
            if edge is not None:
                self.edges[place] = edge
                del self._last[place]

    def _look(self, place: int, last: tuple[float, float] | None) -> Edge | None:
        started_s, ended_s, joules, reason = read_counter(self._counters[place], self._clock)
        if joules is None:
            return Edge(started_s, started_s, 0.0, 0.0, reason)
        if last is not None and joules != last[1]:
            return Edge(last[0], ended_s, last[1], joules)
        if started_s > self._given_up_s:
            return Edge(started_s, started_s, joules, joules, f"the counter did not advance from {joules:.3f} J")
        self._last[place] = (started_s, joules)
        return None


def wait_for_edges(
    counters: Sequence[EnergyCounter], clock: Clock, meanwhile: Callable[[], object] | None = None
) -> tuple[Edge, ...]:
    """The next advance of each counter, while something is done again and again, or nothing."""
    watch = EdgeWatch(counters, clock)
    try:
        while not watch.is_done:
            meanwhile() if meanwhile is not None else clock.sleep(POLL_EVERY_S)
    finally:
        watch.stop()
    return tuple(watch.edges[place] for place in range(len(counters)))


def calibrate_tick(counter: EnergyCounter, clock: Clock, num_ticks: int = CALIBRATION_TICKS) -> TickCalibration:
    """Poll a counter through so many of its ticks.

    A counter that is slower to read than to advance shows a tick with every reading; what is found is then the time of
    a reading, which is what windows are uncertain by.
    """
    moments, costs, last_j = list[float](), list[float](), None
    given_up_s = clock.now_s() + PATIENCE_S
    reason: str | None = None
    while len(moments) <= num_ticks and reason is None:
        started_s, ended_s, joules, reason = read_counter(counter, clock)
        if joules is None:
            break
        costs.append(ended_s - started_s)
        if last_j is not None and joules != last_j:
            moments.append((started_s + ended_s) / 2)
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


class CounterMeter:
    """An `EnergyMeter` of counters.

    Args:
        ticks_s: the longest tick of each device, by name; without it a figure has no bound, and is not aligned.
        probes: power readings of the same devices, taken at both ends for the bound: an error of a tick is the energy
            of one tick at an end. Where a device has none, its limit is taken as its power.
        is_aligned: wait for ticks at both ends, outside the window.

    Raises:
        MeterUnavailable: a counter cannot be read now.
    """

    def __init__(
        self,
        counters: Sequence[EnergyCounter],
        clock: Clock,
        ticks_s: Mapping[str, float],
        probes: Sequence[PowerProbe] = (),
        is_aligned: bool = False,
    ) -> None:
        self._counters = tuple(counters)
        self._clock = clock
        self._ticks_s = dict(ticks_s)
        self._probes = {probe.origin.device: probe for probe in probes}
        self._is_aligned = is_aligned
        self._watch: CounterWatch | None = None
        self._powers_w: dict[str, float] = {}
        for counter in self._counters:
            counter.read_j()

    def open(self) -> None:
        if self._watch is not None:
            raise ConfigurationError("this energy meter has an open window; close it before opening another")
        self._powers_w = {}
        self._note_powers()
        self._edges = self._next_edges()
        self._opened = self._look()
        self._started_s = self._clock.now_s()
        # What was drawn between the tick and the window is not the window's.
        self._before_j = [
            0.0 if edge is None else self._powers_w.get(counter.origin.device, 0.0) * (self._started_s - edge.at_s)
            for counter, edge in zip(self._counters, self._edges, strict=True)
        ]
        self._watch = CounterWatch(self._counters, self._clock)

    def close(self) -> EnergyReading:
        if self._watch is None:
            raise ConfigurationError("this energy meter has no open window; open one before closing")
        ended_s, watch = self._clock.now_s(), self._watch
        self.release()
        closed = self._look()
        self._note_powers()
        edges = self._next_edges()
        looks = [
            [self._opened[place], *watch.between(place, self._started_s, math.inf), closed[place]]
            for place in range(len(self._counters))
        ]
        found = zip(self._counters, looks, self._edges, edges, self._before_j, strict=True)
        return EnergyReading(ended_s - self._started_s, tuple(self._energy(*each, ended_s) for each in found))

    def release(self) -> None:
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.stop()

    def _look(self) -> list[CounterReading]:
        return [read_counter(counter, self._clock) for counter in self._counters]

    def _next_edges(self) -> Sequence[Edge | None]:
        """The next tick of each counter; None where windows are not aligned to them."""
        return wait_for_edges(self._counters, self._clock) if self._is_aligned else [None] * len(self._counters)

    def _note_powers(self) -> None:
        """The larger of the powers at the two ends, where they can be read."""
        for device, probe in self._probes.items():
            try:
                self._powers_w[device] = max(probe.read_w(), self._powers_w.get(device, 0.0))
            except MeterUnavailable:
                # The bound is then the limit's; the energy does not depend on it.
                self._powers_w.pop(device, None)

    def _energy(
        self,
        counter: EnergyCounter,
        looks: Sequence[CounterReading],
        begin: Edge | None,
        end: Edge | None,
        before_j: float,
        ended_s: float,
    ) -> DeviceEnergy:
        """The energy of one counter, from the tick before the window to the one after it where it is aligned.

        Args:
            looks: from the opening to the close.
            before_j: that lies between the tick before the window and the window.
        """
        tick_s, after_j, uncertain_j = self._ticks_s.get(counter.origin.device), 0.0, 0.0
        readings, uncertain_s = [*looks], tick_s
        if begin is not None and end is not None:
            # Without a known length, the last tick is not divided: the window ends at the last look.
            is_divided = tick_s is not None or end.reason is not None
            readings = [begin.readings[1], *looks, *(end.readings if is_divided else ())]
            uncertain_s = self._started_s - begin.earliest_s
        delta = rise_along(readings, counter.wraps_at_j, counter.limit_w)
        if delta.joules is None:
            return DeviceEnergy(counter.origin, None, None, delta.reason, delta.remark)
        if end is not None and tick_s is not None:
            last_tick_j = rise_along(end.readings, counter.wraps_at_j, counter.limit_w).joules or 0.0
            after_end = (end.at_s - ended_s) / tick_s
            after_j, uncertain_j = last_tick_j * after_end, last_tick_j * max(after_end, abs(1 - after_end))
        joules, seconds = delta.joules - before_j - after_j, ended_s - self._started_s
        power_w = self._powers_w.get(counter.origin.device, counter.limit_w)
        bound_j = None
        if tick_s is not None and uncertain_s is not None and power_w is not None:
            # A reading has the value of some moment while it lasts.
            read_s = max(each.ended_s - each.started_s for each in looks)
            mean_w = joules / seconds if seconds > 0 else 0.0
            bound_j = quantisation_bound_j(2 * read_s + uncertain_s, max(power_w, mean_w)) + uncertain_j
        return DeviceEnergy(counter.origin, joules, bound_j, None, delta.remark)


POWERCAP = Path("/sys/class/powercap")
# More than any package draws; what distinguishes a wrap from a reset, and how often to look for wraps.
PACKAGE_LIMIT_W = 1000.0


class RaplCounter:
    """One zone's `EnergyCounter`.

    Args:
        zone: its folder, with `energy_uj` and `max_energy_range_uj`.
        device: what to call it.

    Raises:
        MeterUnavailable: it cannot be read; the kernel lets only root read it by default.
    """

    limit_w = PACKAGE_LIMIT_W

    def __init__(self, zone: Path, device: str, component: Component) -> None:
        self._energy = zone / "energy_uj"
        self.origin = EnergyOrigin(device, component, "rapl", "measured", "counter")
        self.wraps_at_j = _number_in(zone / "max_energy_range_uj") / 1e6
        self.read_j()

    def read_j(self) -> float:
        return _number_in(self._energy) / 1e6

    def is_counter_of(self, other: "RaplCounter") -> bool:
        """Whether both are names of one counter: what the other has lies between two readings of this one.

        Dies of one package may be (AMD's counter is of the whole package, and older kernels show it once a die). Two
        counters come as near as that once in about 10^5 machines: within a millisecond's joules of 10^5.
        """
        before, between, after = self.read_j(), other.read_j(), self.read_j()
        return (between - before) % self.wraps_at_j <= (after - before) % self.wraps_at_j


def rapl_counters(powercap: Path = POWERCAP) -> tuple[RaplCounter, ...]:
    """One counter for each package and each DRAM zone, and for several names of one counter the first.

    Raises:
        MeterUnavailable: there is none to read.
    """
    if not powercap.is_dir():
        raise MeterUnavailable(f"there is no {powercap}: the kernel or the virtual machine offers no RAPL")
    found: list[RaplCounter] = []
    for zone in sorted(powercap.glob("intel-rapl:*")):
        name = (zone / "name").read_text().strip()
        if name.startswith("package"):
            found.append(RaplCounter(zone, name, "cpu"))
        elif name == "dram":
            package = (powercap / zone.name.rsplit(":", 1)[0] / "name").read_text().strip()
            found.append(RaplCounter(zone, f"{package} {name}", "dram"))
    if not found:
        raise MeterUnavailable(f"{powercap} contains no RAPL package")
    counters: list[RaplCounter] = []
    for counter in found:
        others = (each for each in counters if each.origin.component == counter.origin.component)
        if not any(each.is_counter_of(counter) for each in others):
            counters.append(counter)
    return tuple(counters)


def _number_in(file: Path) -> int:
    try:
        return int(file.read_text())
    except PermissionError as error:
        raise MeterUnavailable(
            f"{file} may not be read; as root, `chmod a+r {file.parent}/*energy*` allows it until the next start"
        ) from error
    except (OSError, ValueError) as error:
        raise MeterUnavailable(f"{file} does not contain a number that can be read: {error}") from error
