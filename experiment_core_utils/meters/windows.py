"""Energy windows that repeat an act until its energy is exact enough.

The window of a counter lies between two of its ticks, and the act continues beyond both of them: no idle time is in it.
How many acts lie between the ticks is read off the times at which acts ended. Where an act takes so long that this
would be less exact than whole acts between two readings, the window is whole acts. Power readings taken beside the same
window are the second source.
"""

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from experiment_core_utils.meters.counters import (
    POLL_EVERY_S,
    CounterReading,
    CounterWatch,
    Edge,
    rise_along,
    wait_for_edges,
)
from experiment_core_utils.meters.energy_statistics import (
    LEAST_WINDOW_S,
    aligned_bound_j,
    with_disagreements,
)
from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.meters.interface import EnergyCounter, EnergyMeter
from experiment_core_utils.meters.power import ESTIMATE_TOO_COARSE, energy_of_trace
from experiment_core_utils.primitives.clock import Clock
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.records.energy import (
    GPU_COUNTER,
    ActEnergy,
    Alignment,
    DeviceEnergy,
    EnergyReading,
    EnergyWindow,
    IdlePower,
    PowerTrace,
)

RELATIVE_ERROR = 0.02
LONGEST_WINDOW_S = 60.0
# Acts are done for this long, at least one, before a window, to see how long they take; less long where the act had a
# window before.
WARM_UP_S = 0.3
WARM_AGAIN_S = 0.05
# Power readings of an H200 show the load for another tenth of a second; a window at rest begins after that.
SETTLE_S = 0.5


@dataclass(frozen=True)
class WindowGoal:
    """How long a window is to be."""

    #: error bound of the counters' resolution, as a fraction of the window's energy
    relative_error: float = RELATIVE_ERROR
    #: least_s, longest_s: whatever the error
    least_s: float = LEAST_WINDOW_S
    longest_s: float = LONGEST_WINDOW_S

    def length_s(self, uncertain_s: float) -> float:
        """Seconds at which an error of `uncertain_s` at the window's power is small enough, within the limits."""
        return min(max(uncertain_s / self.relative_error, self.least_s), self.longest_s)

    def remark(self, uncertain_s: float) -> str | None:
        """A sentence saying that the longest window does not meet the error; None where it does."""
        fraction = uncertain_s / self.longest_s
        if fraction <= self.relative_error:
            return None
        return f"the longest window of {self.longest_s:g} s leaves an error of up to {fraction:.1%}"


class _Aim(NamedTuple):
    """A goal, and by how many seconds at the window's power a window is uncertain."""

    goal: WindowGoal
    uncertain_s: float


class RepeatedAct:
    """An act done again and again; `done_at_s` are the moment before the first and the end of each."""

    def __init__(self, act: Callable[[], object], clock: Clock) -> None:
        self._act = act
        self._clock = clock
        self.done_at_s = [clock.now_s()]

    def once(self) -> None:
        """Repeat the act once more."""
        self._act()
        self.done_at_s.append(self._clock.now_s())

    def repeat_until(self, until_s: float) -> None:
        """Repeat the act until the clock has reached `until_s`."""
        while self.done_at_s[-1] < until_s:
            self.once()

    def repeat_for(self, seconds: float) -> None:
        """Begin anew, and repeat the act for so long, at least once where that is more than 0."""
        self.done_at_s = [self._clock.now_s()]
        self.repeat_until(self.done_at_s[0] + seconds)

    @property
    def shortest_s(self) -> float:
        """Shortest time of an act so far: the first ones may be slow."""
        return min(after - before for before, after in itertools.pairwise(self.done_at_s))

    def count_at(self, at_s: float) -> float:
        """How many were done at a moment, one that was under way in part."""
        place = bisect.bisect_right(self.done_at_s, at_s)
        if place == len(self.done_at_s):
            return place - 1.0
        started_s, ended_s = self.done_at_s[place - 1], self.done_at_s[place]
        return place - 1 + (at_s - started_s) / (ended_s - started_s)


def energy_of_act(
    act: Callable[[], object], using: Instruments, goal: WindowGoal | None = None, warm_up_s: float = WARM_UP_S
) -> list[ActEnergy]:
    """Energy of one act in one window by each counter and each power probe, in their order.

    Args:
        act: returns when the devices have done all of it (synchronised); every repetition does the same work. It has
            been warmed up.
        using: calibrated. The error of an estimate is not known: its window has the goal's least length.
        warm_up_s: more than 0; acts before the window are done for this long, at least one.

    What fails on the way is the reason of the figure that it cost; what the act raises is not caught.

    Raises:
        MeterUnavailable: there is nothing to measure with.
    """
    using.require_any_or_estimate()
    goal = goal or WindowGoal()
    acts = RepeatedAct(act, using.clock)
    acts.repeat_for(warm_up_s)
    ticks_s = using.longest_ticks_s
    poll_s = poll_error_s(using)
    is_aligned = bool(using.counters) and all(
        each.origin.device in ticks_s and acts.shortest_s + 2 * poll_s < ticks_s[each.origin.device]
        for each in using.counters
    )
    return _between_ticks(acts, using, goal, poll_s) if is_aligned else energy_of_whole_acts(act, using, goal)


def poll_error_s(using: Instruments) -> float:
    """How exactly the moment of a tick is known when all counters are polled in turn."""
    costs = [using.ticks[each.origin.device].read_cost_s or 0.0 for each in using.counters]
    return (sum(costs) + max(costs, default=0.0) + POLL_EVERY_S) / 2


def _between_ticks(acts: RepeatedAct, using: Instruments, goal: WindowGoal, poll_s: float) -> list[ActEnergy]:
    sampler = using.power_sampler()
    uncertain_s = 2 * poll_s + acts.shortest_s
    # Power is read once within the act before the window and once after it.
    margin_s = 2 * using.sample_every_s if using.probes else 0.0
    sampler.start()
    try:
        acts.repeat_until(using.clock.now_s() + margin_s)
        opened = wait_for_edges(using.counters, using.clock, acts.once)
        watch = CounterWatch(using.counters, using.clock)
        try:
            started_s = max([each.latest_s for each in opened])
            acts.repeat_until(started_s + goal.length_s(uncertain_s))
            closed = wait_for_edges(using.counters, using.clock, acts.once)
            acts.repeat_until(using.clock.now_s() + margin_s)
        finally:
            watch.stop()
    finally:
        traces = sampler.stop()
    aim = _Aim(goal, uncertain_s)
    figures = [
        _act_between(counter, (begin, end), watch.between(place, begin.latest_s, end.earliest_s), acts, aim)
        for place, (counter, begin, end) in enumerate(zip(using.counters, opened, closed, strict=True))
    ]
    windows = {
        counter.origin.device: (begin.at_s, end.at_s)
        for counter, begin, end in zip(using.counters, opened, closed, strict=True)
        if begin.reason is None and end.reason is None
    }
    whole = (started_s, acts.done_at_s[-1])
    figures += [_act_of_trace(each, *windows.get(each.origin.device, whole), acts) for each in traces]
    return list(with_disagreements(figures))


def _act_between(
    counter: EnergyCounter,
    edges: tuple[Edge, Edge],
    looks: Sequence[CounterReading],
    acts: RepeatedAct,
    aim: _Aim,
) -> ActEnergy:
    begin, end = edges
    seconds = end.at_s - begin.at_s
    delta = rise_along([begin.readings[1], *looks, *end.readings], counter.wraps_at_j, counter.limit_w)
    if delta.joules is None:
        return _absent(DeviceEnergy(counter.origin, None, None, delta.reason), "ticks")
    count = acts.count_at(end.at_s) - acts.count_at(begin.at_s)
    bound_j = aligned_bound_j(begin.jitter_s, end.jitter_s, seconds / count, delta.joules / seconds)
    energy = DeviceEnergy(counter.origin, delta.joules, bound_j, None, delta.remark)
    return _per_act(energy, count, seconds, "ticks", aim)


def _act_of_trace(trace: PowerTrace, begin_s: float, end_s: float, acts: RepeatedAct) -> ActEnergy:
    """The integral over the very window of the device's counter."""
    energy = energy_of_trace(trace, begin_s, end_s)
    if energy.joules is None:
        return _absent(energy, "ticks")
    return _per_act(energy, acts.count_at(end_s) - acts.count_at(begin_s), end_s - begin_s, "ticks")


def energy_of_whole_acts(act: Callable[[], object], using: Instruments, goal: WindowGoal) -> list[ActEnergy]:
    """Energy of one act in one window of whole acts, at least one, by each source, as `energy_of_act`."""
    ticks_s = using.longest_ticks_s
    costs = [tick.read_cost_s or 0.0 for tick in using.ticks.values()]
    uncertain_s = max(ticks_s.values(), default=2 * using.sample_every_s) + 2 * sum(costs)
    aim = None if using.is_estimated else _Aim(goal, uncertain_s)
    acts, length_s = RepeatedAct(act, using.clock), goal.least_s if aim is None else goal.length_s(uncertain_s)
    window = InstrumentWindow(using)
    reading = window.reading_around(lambda: acts.repeat_for(length_s))
    if reading is None:
        return [_absent(DeviceEnergy(origin, None, None, window.reason), "acts") for origin in using.origins]
    count = len(acts.done_at_s) - 1
    return [
        _per_act(energy, count, reading.seconds, "acts", aim) if energy.joules is not None else _absent(energy, "acts")
        for energy in reading.devices
    ]


def idle_power(using: Instruments, seconds: float) -> list[IdlePower]:
    """Mean power of each counter's and each probe's device in a window in which nothing is done, in their order.

    Context and model are to be resident: a GPU draws more with them than without. What ran before is given half a
    second to fade from the readings.
    """
    using.require_any_or_estimate()
    using.clock.sleep(SETTLE_S)
    window = InstrumentWindow(using)
    reading = window.reading_around(lambda: using.clock.sleep(seconds))
    if reading is None:
        return [IdlePower(origin, None, None, 0.0, window.reason) for origin in using.origins]
    return [
        IdlePower(
            energy.origin,
            None if energy.joules is None else energy.joules / reading.seconds,
            None if energy.bound_j is None else energy.bound_j / reading.seconds,
            reading.seconds,
            energy.reason,
        )
        for energy in reading.devices
    ]


def _per_act(
    energy: DeviceEnergy, count: float, seconds: float, alignment: Alignment, aim: _Aim | None = None
) -> ActEnergy:
    """A window's energy, which is there, over the acts in it.

    Args:
        aim: what the length of the window was chosen by; None where that was another source's or no error is known.
    """
    assert energy.joules is not None
    remarks = (energy.remark, None if aim is None else aim.goal.remark(aim.uncertain_s))
    return ActEnergy(
        origin=energy.origin,
        joules=energy.joules / count,
        bound_j=None if energy.bound_j is None else energy.bound_j / count,
        act_s=seconds / count,
        count=count,
        window_s=seconds,
        alignment=alignment,
        reason=None,
        remark="; ".join(each for each in remarks if each is not None) or None,
        window_error=None if aim is None else aim.uncertain_s / seconds,
    )


def _absent(energy: DeviceEnergy, alignment: Alignment) -> ActEnergy:
    """An energy without a figure, for the reason that the window had."""
    return ActEnergy(energy.origin, None, None, None, None, None, alignment, energy.reason, energy.remark)


class InstrumentWindow:
    """A window that is opened and closed once; idle power is measured here, before it.

    Where nothing can be measured with, the window says so instead of raising.

    Args:
        using: calibrated.
        idle_s: length of the windows without work; 0 measures no idle power.

    Attributes:
        reason: why there is nothing to measure with; None where there is.
    """

    def __init__(self, using: Instruments, idle_s: float = 0.0) -> None:
        self._using = using
        self._idle_s = idle_s
        self._meter: EnergyMeter | None = None
        self.reason: str | None = None
        try:
            self._meter = using.meter()
        except MeterUnavailable as error:
            self.reason = str(error)
        self._idle_before = self._idle()

    def open(self) -> None:
        """Begin the window; waits for a tick of the counters before."""
        if self._meter is not None:
            self._meter.open()

    def close(self, is_idle_requested: bool = True) -> EnergyWindow:
        """End the window; waits for a tick of the counters after it, then measures idle power where it was before.

        Args:
            is_idle_requested: False where the devices are not at rest.
        """
        if self._meter is None:
            return EnergyWindow(None, (), (), dict(self._using.missing), self.reason)
        reading = self._meter.close()
        self._meter.release()
        after = self._idle() if is_idle_requested else ()
        return EnergyWindow(reading, self._idle_before, after, dict(self._using.missing), None)

    def reading_around(self, run: Callable[[], object]) -> EnergyReading | None:
        """What the window says that is open while `run` runs; None, and nothing runs, for the `reason`."""
        if self._meter is None:
            return None
        try:
            self._meter.open()
            run()
            return self._meter.close()
        finally:
            self._meter.release()

    def release(self) -> None:
        """Give the window up."""
        if self._meter is not None:
            self._meter.release()

    def _idle(self) -> tuple[IdlePower, ...]:
        return tuple(idle_power(self._using, self._idle_s)) if self._meter is not None and self._idle_s > 0 else ()


def why_no_power(using: Instruments) -> str | None:
    """Why nothing can be allocated with these instruments; None where they read power."""
    if using.probes:
        return None
    if using.is_estimated and using.estimate is not None:
        return ESTIMATE_TOO_COARSE
    known = [why for name, why in using.missing.items() if not name.startswith(GPU_COUNTER)]
    return f"no power reading of the device that computes ({'; '.join(known) or 'none was given'})"
