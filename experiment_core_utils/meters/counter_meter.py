"""In: energy counters of devices; out: a window's energy as their rise, with the bound of what ticks make of it.

A counter shows its last tick. Without alignment a window is off by up to a tick of power. With it the meter waits for
a tick before the window begins and for one after it has ended, up to a tick each, and takes the energy in between by a
straight line: where power falls from P to 0 at the end, at most P * tick / 4 is lost. While the window is open the
counters are looked at about every second, so that one that is reset or goes away in between has no figure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiment_core_utils.meters.counter_rise import counter_delta
from experiment_core_utils.meters.counter_watch import look_every_s, read_counter
from experiment_core_utils.meters.edges import Edge, wait_for_edges
from experiment_core_utils.meters.energy_statistics import quantisation_bound_j
from experiment_core_utils.meters.interface import EnergyCounter, PowerProbe
from experiment_core_utils.primitives.clock import Clock, Repeating
from experiment_core_utils.primitives.energy_records import DeviceEnergy, EnergyReading
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable


@dataclass
class _Rise:
    """One counter since the window was opened.

    Attributes:
        uncertain_j: of what was taken by a straight line.
        early_s: how long before the window the tick was from which an aligned one is counted.
    """

    last_j: float | None = None
    last_s: float = 0.0
    joules: float = 0.0
    read_s: float = 0.0
    uncertain_j: float = 0.0
    early_s: float = 0.0
    reason: str | None = None
    remark: str | None = None


class CounterMeter:
    """An `EnergyMeter` of counters.

    Args:
        ticks_s: the longest tick of each device, by name; without it a figure has no bound, and is not aligned.
        probes: power readings of the same devices, taken at both ends for the bound: an error of a tick is the energy
            of one tick at an end. Where a device has none, its limit stands for its power.
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
        self._rises: tuple[_Rise, ...] | None = None
        self._powers_w: dict[str, float] = {}
        self._looking: Repeating | None = None
        for counter in self._counters:
            counter.read_j()

    def open(self) -> None:
        """See `EnergyMeter.open`."""
        if self._rises is not None:
            raise ConfigurationError("this energy meter has an open window; close it before opening another")
        self._powers_w = {}
        self._note_powers()
        self._rises = tuple(_Rise() for _ in self._counters)
        edges = wait_for_edges(self._counters, self._clock) if self._is_aligned else ()
        self._look()
        self._begun_s = self._clock.now_s()
        for counter, rise, edge in zip(self._counters, self._rises, edges, strict=False):
            _count_from(rise, edge, self._begun_s, self._powers_w.get(counter.origin.device))
        self._looking = self._clock.every(look_every_s(self._counters), self._look)

    def close(self) -> EnergyReading:
        """See `EnergyMeter.close`."""
        if self._rises is None:
            raise ConfigurationError("this energy meter has no open window; open one before closing")
        ended_s = self._clock.now_s()
        self._stop_looking()
        self._look()
        self._note_powers()
        if self._is_aligned:
            self._straighten(ended_s)
        rises, self._rises = self._rises, None
        seconds = ended_s - self._begun_s
        return EnergyReading(
            seconds,
            tuple(self._energy(counter, rise, seconds) for counter, rise in zip(self._counters, rises, strict=True)),
        )

    def release(self) -> None:
        """See `EnergyMeter.release`."""
        self._rises = None
        self._stop_looking()

    def _stop_looking(self) -> None:
        if self._looking is not None:
            looking, self._looking = self._looking, None
            looking.stop()

    def _look(self) -> None:
        """Read every counter and add what it rose by; what went wrong stays in its rise."""
        assert self._rises is not None
        for counter, rise in zip(self._counters, self._rises, strict=True):
            if rise.reason is not None:
                continue
            reading = read_counter(counter, self._clock)
            if reading.joules is None:
                rise.reason = reading.reason
                continue
            rise.read_s = max(rise.read_s, reading.ended_s - reading.begun_s)
            _add(rise, counter, reading.joules, reading.ended_s)

    def _straighten(self, ended_s: float) -> None:
        """Wait for the tick after the end; the share of the last tick's energy that lay before the end is counted."""
        assert self._rises is not None
        edges = wait_for_edges(self._counters, self._clock)
        for counter, rise, edge in zip(self._counters, self._rises, edges, strict=True):
            tick_s = self._ticks_s.get(counter.origin.device)
            rise.reason = rise.reason or edge.reason
            if rise.reason is not None or tick_s is None:
                continue
            _add(rise, counter, edge.before_j, edge.earliest_s)
            if rise.reason is not None:
                continue
            before_j = rise.joules
            _add(rise, counter, edge.joules, edge.at_s)
            last_tick_j = rise.joules - before_j
            after_end = (edge.at_s - ended_s) / tick_s
            rise.joules -= last_tick_j * after_end
            rise.uncertain_j = last_tick_j * max(after_end, abs(1 - after_end))

    def _note_powers(self) -> None:
        """The larger of the powers at the two ends, where they can be read."""
        for device, probe in self._probes.items():
            try:
                self._powers_w[device] = max(probe.read_w(), self._powers_w.get(device, 0.0))
            except MeterUnavailable:
                # The bound is then the limit's; the energy does not depend on it.
                self._powers_w.pop(device, None)

    def _energy(self, counter: EnergyCounter, rise: _Rise, seconds: float) -> DeviceEnergy:
        if rise.reason is not None:
            return DeviceEnergy(counter.origin, None, None, rise.reason, rise.remark)
        tick_s = self._ticks_s.get(counter.origin.device)
        power_w = self._powers_w.get(counter.origin.device, counter.limit_w)
        bound_j = None
        if tick_s is not None and power_w is not None:
            mean_w = rise.joules / seconds if seconds > 0 else 0.0
            # A reading tells of some moment while it lasts.
            uncertain_s = 2 * rise.read_s + (rise.early_s if self._is_aligned else tick_s)
            bound_j = quantisation_bound_j(uncertain_s, max(power_w, mean_w)) + rise.uncertain_j
        return DeviceEnergy(counter.origin, rise.joules, bound_j, None, rise.remark)


def _add(rise: _Rise, counter: EnergyCounter, now_j: float, now_s: float) -> None:
    """What the counter rose by since it was last read; the first reason stands."""
    if rise.last_j is not None:
        delta = counter_delta(rise.last_j, now_j, now_s - rise.last_s, counter.wraps_at_j, counter.limit_w)
        rise.joules += delta.joules or 0.0
        rise.reason, rise.remark = rise.reason or delta.reason, delta.remark or rise.remark
    rise.last_j, rise.last_s = now_j, now_s


def _count_from(rise: _Rise, edge: Edge, begun_s: float, power_w: float | None) -> None:
    """The tick before the window, in place of the reading after it, which may be a tick later for another counter.

    What was drawn between that tick and the window is taken off where the power before it is known.
    """
    rise.reason = rise.reason or edge.reason
    rise.last_j, rise.last_s = edge.joules, edge.at_s
    rise.early_s = begun_s - edge.earliest_s
    if power_w is not None:
        rise.joules -= power_w * (begun_s - edge.at_s)
