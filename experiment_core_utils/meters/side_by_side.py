"""In: several meters; out: one meter whose windows all of them measure, so that sources can be compared."""

from collections.abc import Sequence
from contextlib import ExitStack

from experiment_core_utils.meters.interface import EnergyMeter
from experiment_core_utils.meters.source_agreement import with_disagreements
from experiment_core_utils.primitives.energy_records import EnergyReading


class SideBySide:
    """An `EnergyMeter` of meters: opened in their order, closed in the reverse one.

    The last one's window is the innermost, and `seconds` is its length; a meter that waits when it is opened or closed
    therefore comes first.
    """

    def __init__(self, meters: Sequence[EnergyMeter]) -> None:
        self._meters = tuple(meters)

    def open(self) -> None:
        """See `EnergyMeter.open`."""
        for meter in self._meters:
            meter.open()

    def close(self) -> EnergyReading:
        """See `EnergyMeter.close`; devices in the order of the meters, remarked where two do not agree on one."""
        readings = [meter.close() for meter in reversed(self._meters)]
        energies = [energy for reading in reversed(readings) for energy in reading.devices]
        seconds = readings[0].seconds
        apart_s = max(reading.seconds for reading in readings) - seconds
        return EnergyReading(seconds, with_disagreements(energies, apart_s / seconds if seconds > 0 else 0.0))

    def release(self) -> None:
        """See `EnergyMeter.release`."""
        # All of them, even where one raises.
        with ExitStack() as stack:
            for meter in self._meters:
                stack.callback(meter.release)
