"""In: the kernel's powercap folder; out: energy counters of CPU packages and their memory (RAPL).

Only packages and the DRAM zones inside them are read: core and uncore are parts of a package, psys holds all of them,
and the zones under intel-rapl-mmio are the same packages once more. AMD's counters have the same names.
"""

from pathlib import Path

from experiment_core_utils.primitives.energy_records import Component, EnergyOrigin
from experiment_core_utils.primitives.errors import MeterUnavailable

POWERCAP = Path("/sys/class/powercap")
# More than any package draws; what tells a wrap from a reset, and how often to look for wraps.
PACKAGE_LIMIT_W = 1000.0


class RaplCounter:
    """One zone's `EnergyCounter`.

    Args:
        zone: its folder, with `energy_uj` and `max_energy_range_uj`.
        device: what to call it.

    Raises:
        MeterUnavailable: it cannot be read; the kernel lets only root read it unless told otherwise.
    """

    limit_w = PACKAGE_LIMIT_W

    def __init__(self, zone: Path, device: str, component: Component) -> None:
        self._energy = zone / "energy_uj"
        self.origin = EnergyOrigin(device, component, "rapl", "measured", "counter")
        self.wraps_at_j = _number_in(zone / "max_energy_range_uj") / 1e6
        self.read_j()

    def read_j(self) -> float:
        """See `EnergyCounter.read_j`."""
        return _number_in(self._energy) / 1e6


def rapl_counters(powercap: Path = POWERCAP) -> tuple[RaplCounter, ...]:
    """One counter for each package and each DRAM zone; raises MeterUnavailable where there is none to read."""
    if not powercap.is_dir():
        raise MeterUnavailable(f"there is no {powercap}: the kernel or the virtual machine offers no RAPL")
    counters = []
    for zone in sorted(powercap.glob("intel-rapl:*")):
        name = (zone / "name").read_text().strip()
        if name.startswith("package"):
            counters.append(RaplCounter(zone, name, "cpu"))
        elif name == "dram":
            package = (powercap / zone.name.rsplit(":", 1)[0] / "name").read_text().strip()
            counters.append(RaplCounter(zone, f"{package} {name}", "dram"))
    if not counters:
        raise MeterUnavailable(f"{powercap} holds no RAPL package")
    return tuple(counters)


def _number_in(file: Path) -> int:
    try:
        return int(file.read_text())
    except PermissionError as error:
        raise MeterUnavailable(
            f"{file} may not be read; as root, `chmod a+r {file.parent}/*energy*` allows it until the next start"
        ) from error
    except (OSError, ValueError) as error:
        raise MeterUnavailable(f"{file} does not hold a number that can be read: {error}") from error
