"""In: a machine's instruments; out: one window by all of them, with the idle power before and after it."""

from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.meters.interface import EnergyMeter
from experiment_core_utils.meters.windows import idle_power
from experiment_core_utils.primitives.energy_records import EnergyWindow, IdlePower
from experiment_core_utils.primitives.errors import MeterUnavailable


class InstrumentWindow:
    """A window that is opened and closed once; idle power is measured here, before it.

    Where nothing can be measured with, the window says so instead of raising.

    Args:
        using: calibrated.
        idle_s: length of the windows without work; 0 measures no idle power.

    Attributes:
        reason: why there is nothing to measure with; None where there is.
    """

    def __init__(self, using: Instruments, idle_s: float) -> None:
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
        """Begin it; waits for a tick of the counters before."""
        if self._meter is not None:
            self._meter.open()

    def close(self, is_idle_wanted: bool = True) -> EnergyWindow:
        """End it; waits for a tick of the counters behind it, then measures idle power where it was before.

        Args:
            is_idle_wanted: False where the devices are not at rest.
        """
        if self._meter is None:
            return EnergyWindow(None, (), (), dict(self._using.missing), self.reason)
        reading = self._meter.close()
        self._meter.release()
        after = self._idle() if is_idle_wanted else ()
        return EnergyWindow(reading, self._idle_before, after, dict(self._using.missing), None)

    def release(self) -> None:
        """Give the window up."""
        if self._meter is not None:
            self._meter.release()

    def _idle(self) -> tuple[IdlePower, ...]:
        return tuple(idle_power(self._using, self._idle_s)) if self._meter is not None and self._idle_s > 0 else ()
