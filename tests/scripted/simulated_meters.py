"""Simulated devices with a counter and a power reading, by a script of powers and failures, with their own clock.

Time passes only where the script lets it, so that hours of measuring take no time. The true energy of any window is
known exactly, by `SimulatedDevice.true_j`.
"""

import bisect
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from experiment_core_utils.primitives.clock import Clock, Repeating, intervals_of
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.records.energy import Basis, Component, EnergyOrigin


class ScriptedClock:
    """A `Clock` that stands still until `sleep`; repeated calls are made while it moves, at the times that are theirs.

    What a repeated call takes of time passes for it alone, as in another thread.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._repeating: list[_ScriptedRepeating] = []
        self._is_calling = False

    def now_s(self) -> float:
        """See `Clock.now_s`."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        until_s = self._now_s + seconds
        while not self._is_calling and (due := [each for each in self._repeating if each.due_s <= until_s]):
            first = min(due, key=lambda each: each.due_s)
            self._now_s = first.due_s
            self._is_calling = True
            first.make()
            self._is_calling = False
            first.ended_s = self._now_s
            first.due_s = self._now_s + next(first.intervals)
        self._now_s = until_s

    def every(self, interval_s: float | Iterator[float], call: Callable[[], None]) -> Repeating:
        """See `Clock.every`."""
        intervals = intervals_of(interval_s)
        repeating = _ScriptedRepeating(self._now_s + next(intervals), intervals, call, self)
        self._repeating.append(repeating)
        return repeating

    def forget(self, repeating: "_ScriptedRepeating") -> None:
        """Make its calls no longer; the last one is waited for where it took longer than the clock has moved."""
        if repeating in self._repeating:
            self._repeating.remove(repeating)
            self._now_s = max(self._now_s, repeating.ended_s)


@dataclass(eq=False)
class _ScriptedRepeating:
    due_s: float
    intervals: Iterator[float]
    call: Callable[[], None]
    clock: ScriptedClock
    ended_s: float = -math.inf
    error: BaseException | None = None
    has_failed: bool = False

    def make(self) -> None:
        """One call; what it raises is kept for the stop, as that of a thread is."""
        try:
            self.call()
        except BaseException as error:
            self.error, self.has_failed = error, True
            self.clock.forget(self)

    def stop(self) -> None:
        self.clock.forget(self)
        error, self.error = self.error, None
        if error is not None:
            raise error


class CatchingUpClock(ScriptedClock):
    """The host's clock, whose repeated calls are made whenever it is read, at the times that are theirs.

    No thread makes them, so that a busy machine keeps none from its turn.
    """

    def __init__(self) -> None:
        super().__init__(time.perf_counter())

    def now_s(self) -> float:
        """See `Clock.now_s`; within a repeated call it is the call's own time."""
        if not self._is_calling:
            super().sleep(time.perf_counter() - self._now_s)
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`; a repeated call takes no time of the host's."""
        if self._is_calling:
            super().sleep(seconds)
            return
        time.sleep(seconds)
        self.now_s()

    def every(self, interval_s: float | Iterator[float], call: Callable[[], None]) -> Repeating:
        """See `Clock.every`."""
        self.now_s()
        return super().every(interval_s, call)

    def forget(self, repeating: "_ScriptedRepeating") -> None:
        """The calls that are due are made before."""
        self.now_s()
        super().forget(repeating)


class PowerCurve:
    """Power interpolated linearly between points; constant before the first and after the last.

    Args:
        points: (seconds, watts) with ascending times; two at the same time are a jump.
    """

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self._times = [time for time, _ in points]
        self._watts = [watts for _, watts in points]
        self._joules = [0.0]
        for (t0, w0), (t1, w1) in itertools.pairwise(points):
            self._joules.append(self._joules[-1] + (t1 - t0) * (w0 + w1) / 2)

    def watts(self, at_s: float) -> float:
        """Power at a moment; at a jump the one behind it."""
        place = bisect.bisect_right(self._times, at_s)
        if place == 0:
            return self._watts[0]
        if place == len(self._times):
            return self._watts[-1]
        t0, t1 = self._times[place - 1], self._times[place]
        w0, w1 = self._watts[place - 1], self._watts[place]
        return w0 + (w1 - w0) * (at_s - t0) / (t1 - t0)

    def joules(self, at_s: float) -> float:
        """Integral from the first point to a moment; negative before it."""
        place = bisect.bisect_right(self._times, at_s)
        if place == 0:
            return (at_s - self._times[0]) * self._watts[0]
        t0, w0 = self._times[place - 1], self._watts[place - 1]
        return self._joules[place - 1] + (at_s - t0) * (w0 + self.watts(at_s)) / 2


def constant(watts: float) -> PowerCurve:
    """The same power always."""
    return PowerCurve([(0.0, watts)])


@dataclass
class SimulatedDevice:
    """One device: what it draws by its curve, more while something runs on it, and what it reports of that.

    Attributes:
        clock: a scripted one, or the host's, on which the script is played in real time.
        idle: power while nothing runs.
        tick_s, phase_s: the counter shows the energy up to the last of the moments phase + k * tick.
        read_cost_s, power_read_cost_s: time that a reading takes; its value is that of the middle of it.
        starts_at_j: what the counter shows at time 0.
        wraps_at_j: where it begins again at 0.
        resets_at_s: moments at which it is set to 0.
        limit_w: what it says that it does not exceed.
        missing: readings that it does not have: `energy`, `power`.
        vanishes_at_s: from when on no reading succeeds.
        averaged_over_s: the power reading is a mean over this time; 0 for the power at the moment.
        num_readings: how often it was requested anything.
    """

    clock: Clock
    idle: PowerCurve
    name: str = "GPU-simulated"
    component: Component = "gpu"
    tick_s: float = 0.1
    phase_s: float = 0.0
    read_cost_s: float = 0.0
    power_read_cost_s: float = 0.0
    starts_at_j: float = 0.0
    wraps_at_j: float | None = None
    resets_at_s: tuple[float, ...] = ()
    limit_w: float | None = None
    missing: frozenset[str] = frozenset()
    vanishes_at_s: float = math.inf
    averaged_over_s: float = 0.0
    num_readings: int = 0
    _begins: list[float] = field(default_factory=list)
    _ends: list[float] = field(default_factory=list)
    _powers: list[float] = field(default_factory=list)
    _extra_j: list[float] = field(default_factory=lambda: [0.0])

    def run(self, seconds: float, watts: float) -> None:
        """Something runs on it for a time and draws this power in place of the idle one; time passes."""
        begin = self.clock.now_s()
        self._begins.append(begin)
        self._ends.append(begin + seconds)
        self._powers.append(watts)
        idle_j = self.idle.joules(begin + seconds) - self.idle.joules(begin)
        self._extra_j.append(self._extra_j[-1] + watts * seconds - idle_j)
        self.clock.sleep(seconds)

    def true_watts(self, at_s: float) -> float:
        """Power at a moment."""
        place = bisect.bisect_right(self._begins, at_s) - 1
        return self._powers[place] if place >= 0 and at_s < self._ends[place] else self.idle.watts(at_s)

    def true_j(self, begin_s: float, end_s: float) -> float:
        """The energy between two moments."""
        return self._total_j(end_s) - self._total_j(begin_s)

    def _total_j(self, at_s: float) -> float:
        done = bisect.bisect_right(self._ends, at_s)
        joules = self.idle.joules(at_s) + self._extra_j[done]
        if done < len(self._begins) and self._begins[done] < at_s:
            begin = self._begins[done]
            joules += self._powers[done] * (at_s - begin) - (self.idle.joules(at_s) - self.idle.joules(begin))
        return joules

    def counter_j(self) -> float:
        """What the counter shows, in whole millijoules."""
        at_s = self._reading("energy", self.read_cost_s)
        shown_s = math.floor((at_s - self.phase_s) / self.tick_s + 1e-9) * self.tick_s + self.phase_s
        resets = [moment for moment in self.resets_at_s if moment <= shown_s]
        joules = self.true_j(resets[-1], shown_s) if resets else self.starts_at_j + self.true_j(0.0, shown_s)
        if self.wraps_at_j is not None:
            joules %= self.wraps_at_j
        return math.floor(joules * 1000 + 1e-6) / 1000

    def power_w(self) -> float:
        """What the power reading says."""
        at_s = self._reading("power", self.power_read_cost_s)
        if self.averaged_over_s:
            return self.true_j(at_s - self.averaged_over_s, at_s) / self.averaged_over_s
        return self.true_watts(at_s)

    def _reading(self, what: str, cost_s: float) -> float:
        """Lets the time of a reading pass; returns the moment of its value."""
        self.num_readings += 1
        if what in self.missing:
            raise MeterUnavailable(f"{self.name}: Not Supported")
        started_s = self.clock.now_s()
        self.clock.sleep(cost_s)
        at_s = started_s + cost_s / 2
        if at_s >= self.vanishes_at_s:
            raise MeterUnavailable(f"{self.name}: GPU is lost")
        return at_s


class SimulatedCounter:
    """A simulated device's `EnergyCounter`."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.origin = EnergyOrigin(device.name, device.component, "simulated", "measured", "counter")
        self.wraps_at_j = device.wraps_at_j
        self.limit_w = device.limit_w

    def read_j(self) -> float:
        """See `EnergyCounter.read_j`."""
        return self._device.counter_j()


class SimulatedPower:
    """A simulated device's `PowerProbe`."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        basis: Basis = "averaged_power" if device.averaged_over_s else "instant_power"
        self.origin = EnergyOrigin(device.name, device.component, "simulated", "measured", basis)

    def read_w(self) -> float:
        """See `PowerProbe.read_w`."""
        return self._device.power_w()
