"""In: what measures energy on this machine; out: lines with the power of each device now and its energy so far."""

from collections.abc import Iterator

from experiment_core_utils.meters.counter_rise import counter_delta
from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.meters.interface import EnergyCounter, PowerProbe
from experiment_core_utils.primitives.clock import Clock
from experiment_core_utils.primitives.errors import MeterUnavailable


def watch_lines(using: Instruments, interval_s: float, seconds: float | None) -> Iterator[str]:
    """A line every `interval_s`, until `seconds` have passed; None goes on until it is stopped."""
    clock = using.clock
    watched = [_Watched(using.of_device(device), clock) for device in using.devices]
    begun_s = clock.now_s()
    while seconds is None or clock.now_s() - begun_s < seconds:
        clock.sleep(interval_s if seconds is None else min(interval_s, seconds - (clock.now_s() - begun_s)))
        parts = [each.text() for each in watched]
        yield " | ".join([f"{clock.now_s() - begun_s:7.1f} s", *parts])


class _Watched:
    """One device: its power reading, and its counter since the beginning."""

    def __init__(self, own: Instruments, clock: Clock) -> None:
        self._device = own.devices[0]
        self._clock = clock
        self._counter: EnergyCounter | None = own.counters[0] if own.counters else None
        self._probe: PowerProbe | None = own.probes[0] if own.probes else None
        self._joules = 0.0
        self._last_j = self._counter.read_j() if self._counter is not None else 0.0
        self._last_s = clock.now_s()

    def text(self) -> str:
        """The device now; what it no longer tells is named with the reason."""
        try:
            energy, mean_w = self._energy()
            return f"{self._device} {self._power(mean_w)}, {energy}"
        except MeterUnavailable as error:
            return f"{self._device} gone: {error}"

    def _energy(self) -> tuple[str, float | None]:
        """Energy so far, and mean power since the last line."""
        if self._counter is None:
            return "no energy counter", None
        now_j, now_s = self._counter.read_j(), self._clock.now_s()
        passed_s = now_s - self._last_s
        delta = counter_delta(self._last_j, now_j, passed_s, self._counter.wraps_at_j, self._counter.limit_w)
        self._last_j, self._last_s = now_j, now_s
        if delta.joules is None:
            self._joules = 0.0
            return f"counted anew from here: {delta.reason}", None
        self._joules += delta.joules
        mean_w = delta.joules / passed_s if passed_s > 0 else None
        return f"{self._joules:.1f} J ({self._counter.origin.source})", mean_w

    def _power(self, mean_w: float | None) -> str:
        if self._probe is not None:
            return f"{self._probe.read_w():.1f} W ({self._probe.origin.basis})"
        return "no power" if mean_w is None else f"{mean_w:.1f} W (mean since the last line)"
