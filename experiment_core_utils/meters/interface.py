"""The interfaces of energy meters: counters and power probes of one device, and meters that make windows of them.

Probes raise MeterUnavailable where a reading fails. Meters raise it when they are made, and never later: what fails
while a window is open is in the reading, as the reason of the figure that is missing. Anything else that a probe raises
is a fault of the program: it is raised when the window is closed or released, whichever thread it came up in.
"""

from typing import Protocol

from experiment_core_utils.records.energy import EnergyOrigin, EnergyReading


class EnergyCounter(Protocol):
    """A device's own running total of its energy."""

    @property
    def origin(self) -> EnergyOrigin:
        """Device, source and kind of the counter."""

    @property
    def wraps_at_j(self) -> float | None:
        """Where it begins again at 0; None where it does not within a lifetime."""

    @property
    def limit_w(self) -> float | None:
        """Power that the device does not exceed; None where that is not known."""

    def read_j(self) -> float:
        """The total now; only differences have a meaning. Raises MeterUnavailable."""


class PowerProbe(Protocol):
    """A device's power reading; whether at the moment or averaged, `origin.basis` says."""

    @property
    def origin(self) -> EnergyOrigin:
        """Device, source and kind of the probe."""

    def read_w(self) -> float:
        """Raises MeterUnavailable."""


class EnergyMeter(Protocol):
    """Windows one after the other, each from `open` to `close`; nothing is read in between by the caller.

    The caller synchronises its devices before both.
    """

    def open(self) -> None:
        """Begin a window; raises ConfigurationError where one is open."""

    def close(self) -> EnergyReading:
        """End the window; raises ConfigurationError where none is open."""

    def release(self) -> None:
        """Give back threads and handles; an open window is lost."""


class EnergyEstimate(EnergyMeter, Protocol):
    """A meter that computes energy from load and nominal power; after `release` it can be opened again."""

    @property
    def origins(self) -> tuple[EnergyOrigin, ...]:
        """Origins of the figures of a window, in their order; `kind` is `estimated`."""
