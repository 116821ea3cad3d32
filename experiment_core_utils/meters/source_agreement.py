"""In: energies of one window by several sources; out: the same, with a remark where two tell of one device what their
bounds do not explain. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from experiment_core_utils.primitives.energy_records import ActEnergy, DeviceEnergy

Energy = TypeVar("Energy", DeviceEnergy, ActEnergy)


def with_disagreements(energies: Sequence[Energy], apart_share: float = 0.0) -> tuple[Energy, ...]:
    """A remark at the counter and at the integrated power of a device where they differ by more than their bounds.

    The bounds are of resolution in time; what is beyond them is the sensors' own, or power that changes in step with
    the readings. Where a bound is not known nothing is said.

    Args:
        apart_share: of the energy, that the two windows are apart.
    """
    counters = {each.origin.device: each for each in energies if each.origin.basis == "counter"}
    powers = {each.origin.device: each for each in energies if each.origin.basis != "counter"}
    found = {each: _disagreement(counters[each], powers[each], apart_share) for each in counters.keys() & powers}
    return tuple(_remarked(each, found.get(each.origin.device)) for each in energies)


def _disagreement(counted: Energy, integrated: Energy, apart_share: float) -> str | None:
    if not counted.joules or integrated.joules is None or counted.bound_j is None or integrated.bound_j is None:
        return None
    off_j = integrated.joules - counted.joules
    explained_j = counted.bound_j + integrated.bound_j + apart_share * abs(counted.joules)
    if abs(off_j) <= explained_j:
        return None
    off, explained = off_j / counted.joules, explained_j / abs(counted.joules)
    return f"integrated power is {off:+.1%} off the counter, of which resolution explains {explained:.1%}"


def _remarked(energy: Energy, remark: str | None) -> Energy:
    if remark is None:
        return energy
    return replace(energy, remark=remark if energy.remark is None else f"{energy.remark}; {remark}")
