"""Windows to a file and back, and files that are something else."""

from pathlib import Path

import pytest

from experiment_core_utils.meters.energy_files import append_energy_window, energy_path, read_energy_windows
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.records.energy import DeviceEnergy, EnergyOrigin, EnergyReading, EnergyWindow, IdlePower

ORIGIN = EnergyOrigin("GPU-1", "gpu", "nvml_counter", "measured", "counter")
IDLE = IdlePower(ORIGIN, 70.0, 0.5, 5.0, None)
WINDOW = EnergyWindow(
    EnergyReading(2.5, (DeviceEnergy(ORIGIN, 600.0, 1.5, None, "it wrapped"),)),
    (IDLE,),
    (IDLE,),
    {"RAPL": "none"},
    None,
)
NOTHING = EnergyWindow(None, (), (), {"GPU energy": "no GPU"}, "nothing here")


def test_windows_come_back_as_they_were(tmp_path: Path) -> None:
    path = energy_path("0001", tmp_path)
    assert path.name == "energy_0001.json"
    for window in (WINDOW, NOTHING):
        append_energy_window(window, "0001", path)
    assert read_energy_windows(path) == (WINDOW, NOTHING)


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("{", "cannot be read"),
        ("[]", "is not an energy file of schema 1 .its schema is None"),
        ('{"schema_version": 2}', "its schema is 2"),
        ('{"schema_version": 1}', "windows is not what it should be"),
        ('{"schema_version": 1, "windows": [{"reading": 1}]}', "0.reading"),
    ],
)
def test_something_else_is_refused_and_left_as_it_is(text: str, output: str, tmp_path: Path) -> None:
    path = energy_path("0001", tmp_path)
    path.write_text(text)
    with pytest.raises(ResultsError, match=output):
        append_energy_window(WINDOW, "0001", path)
    assert path.read_text() == text


def test_an_id_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        energy_path("../1", tmp_path)
