"""RAPL's counters from folders like the kernel's."""

from pathlib import Path

import pytest

from experiment_core_utils.meters.counters import CounterMeter, RaplCounter, rapl_counters
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.records.energy import EnergyOrigin
from tests.scripted.simulated_meters import ScriptedClock

RANGE_UJ = 262_143_328_850


def add_zone(powercap: Path, zone: str, name: str, energy_uj: int) -> Path:
    folder = powercap / zone
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    return folder


@pytest.fixture
def powercap(tmp_path: Path) -> Path:
    add_zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    add_zone(tmp_path, "intel-rapl:0:0", "core", 1_000_000)
    add_zone(tmp_path, "intel-rapl:0:1", "dram", 2_000_000)
    add_zone(tmp_path, "intel-rapl:1", "package-1", 7_000_000)
    add_zone(tmp_path, "intel-rapl:2", "psys", 99_000_000)
    add_zone(tmp_path, "intel-rapl-mmio:0", "package-0", 5_000_000)
    (tmp_path / "intel-rapl").mkdir()
    return tmp_path


def test_packages_and_their_memory_are_read_once_each(powercap: Path) -> None:
    counters = rapl_counters(powercap)
    assert [(each.origin.device, each.origin.component, each.read_j()) for each in counters] == [
        ("package-0", "cpu", 5.0),
        ("package-0 dram", "dram", 2.0),
        ("package-1", "cpu", 7.0),
    ]
    assert counters[0].origin == EnergyOrigin("package-0", "cpu", "rapl", "measured", "counter")
    assert counters[0].wraps_at_j == pytest.approx(262_143.32885)


def test_two_names_of_one_counter_count_once(tmp_path: Path) -> None:
    # AMD's dies show the counter of their package; Intel's have their own.
    add_zone(tmp_path, "intel-rapl:0", "package-0-die-0", 64_000_000)
    add_zone(tmp_path, "intel-rapl:1", "package-0-die-1", 64_000_000)
    add_zone(tmp_path, "intel-rapl:1:0", "dram", 64_000_000)
    add_zone(tmp_path, "intel-rapl:2", "package-1-die-0", 64_000_001)
    found = [each.origin.device for each in rapl_counters(tmp_path)]
    assert found == ["package-0-die-0", "package-0-die-1 dram", "package-1-die-0"]


def test_a_counter_that_moves_between_readings_has_its_other_name_between_them(tmp_path: Path) -> None:
    class Moving(RaplCounter):
        """Of a package at 70 W that is read each 100 µs, near the end of its range."""

        now_j = RANGE_UJ / 1e6 - 0.01

        def read_j(self) -> float:
            Moving.now_j += 0.007
            return Moving.now_j % self.wraps_at_j

    zones = [add_zone(tmp_path, f"intel-rapl:{number}", f"package-0-die-{number}", 1) for number in (0, 1)]
    one, other = (Moving(zone, zone.name, "cpu") for zone in zones)
    assert all(one.is_counter_of(other) for _ in range(4))
    assert not one.is_counter_of(RaplCounter(zones[1], "own", "cpu"))


def test_a_wrap_is_undone(powercap: Path) -> None:
    energy = powercap / "intel-rapl:0" / "energy_uj"
    energy.write_text(str(RANGE_UJ - 50_000_000))
    clock = ScriptedClock()
    meter = CounterMeter(rapl_counters(powercap)[:1], clock, {"package-0": 0.001})
    meter.open()
    energy.write_text("30000000")
    clock.sleep(1.0)
    (found,) = meter.close().devices
    # 50 J to the end of the range and 30 behind it.
    assert found.joules == pytest.approx(80.0)
    assert found.remark is not None and "wrapped" in found.remark
    # No power reading: the limit of 1000 W for a millisecond.
    assert found.bound_j == pytest.approx(1.0)


def test_without_the_interface_or_a_package_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(MeterUnavailable, match="offers no RAPL"):
        rapl_counters(tmp_path / "powercap")
    with pytest.raises(MeterUnavailable, match="contains no RAPL package"):
        rapl_counters(tmp_path)


def test_a_counter_that_holds_no_number_is_unavailable(powercap: Path) -> None:
    (powercap / "intel-rapl:0" / "energy_uj").write_text("")
    with pytest.raises(MeterUnavailable, match="does not contain a number"):
        rapl_counters(powercap)


class Forbidden(type(Path())):  # type: ignore[misc]
    """A path that only root may read, whoever runs the tests."""

    def read_text(self, *args: object, **kwargs: object) -> str:
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(self))
        return super().read_text(*args, **kwargs)  # type: ignore[no-any-return]


def test_a_counter_that_only_root_may_read_says_what_to_do(powercap: Path) -> None:
    with pytest.raises(MeterUnavailable, match=r"may not be read; as root, `chmod a\+r"):
        rapl_counters(Forbidden(powercap))
