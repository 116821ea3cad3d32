"""The two files of energy windows: `emissions_{experiment_id}.csv` and `energy_{experiment_id}.json`.

The columns are codecarbon's own (energies in kWh, emissions in kg, duration in s), followed by `cpu_energy_source`,
`emissions_basis` and `gpus_in_use`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from experiment_core_utils.primitives.csv_tables import Cell, csv_of_rows, read_table_file
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import (
    check_file_name_part,
    write_json_atomically,
    write_text_atomically,
)
from experiment_core_utils.records.energy import EnergyWindow
from experiment_core_utils.records.result_files import read_versioned_object

_NUMBERS = ("duration", "emissions", "cpu_energy", "gpu_energy", "ram_energy", "energy_consumed", "gpu_count")
_TEXTS = ("tracking_mode", "cpu_model", "gpu_model", "country_iso_code")
REQUIRED_COLUMNS = (*_NUMBERS, *_TEXTS)


def emissions_path(experiment_id: str, output_dir: Path) -> Path:
    """The published name; raises ConfigurationError for an id that is not a part of a file name."""
    check_file_name_part(experiment_id, "the experiment id")
    return output_dir / f"emissions_{experiment_id}.csv"


def read_windows(path: Path) -> list[dict[str, Cell]]:
    """The rows of an emissions file, also of one that codecarbon wrote itself.

    Raises:
        ResultsError: torn, no row, a column missing, or a figure that is not a number.
    """
    rows = read_table_file(path)
    if not rows:
        raise ResultsError(f"{path} contains no measured window; remove it or measure again")
    for number, row in enumerate(rows, start=1):
        missing = [name for name in REQUIRED_COLUMNS if name not in row]
        if missing:
            raise ResultsError(f"{path} is not an emissions file of codecarbon: it lacks the column {missing[0]}")
        wrong = [name for name in _NUMBERS if isinstance(row[name], str | bool | None)]
        if wrong:
            raise ResultsError(f"{path}, window {number}: {wrong[0]} is {row[wrong[0]]!r}, not a number; it is torn")
    return rows


def append_window(window: Mapping[str, Cell], path: Path) -> None:
    """Add a row, or begin the file; a reader sees the file before or after, never a part.

    Raises:
        ResultsError: there is a file of that name that contains something else.
        ResultsNotSaved: the disk does not take it.
    """
    rows: Sequence[Mapping[str, Cell]] = [*(read_windows(path) if path.exists() else ()), window]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    write_text_atomically(csv_of_rows(({**dict.fromkeys(columns), **row} for row in rows), columns), path)


ENERGY_VERSION = 1
_WINDOWS = TypeAdapter(tuple[EnergyWindow, ...])


def energy_path(experiment_id: str, output_dir: Path) -> Path:
    """Path of the energy file of an experiment; raises ConfigurationError for an id that is not a part of a file
    name.
    """
    check_file_name_part(experiment_id, "the experiment id")
    return output_dir / f"energy_{experiment_id}.json"


def read_energy_windows(path: Path) -> tuple[EnergyWindow, ...]:
    """The windows of an energy file, in order of time.

    Raises:
        ResultsError: torn, of another schema, or something else.
    """
    content = read_versioned_object(path, "an energy file", ENERGY_VERSION)
    try:
        return _WINDOWS.validate_python(content.get("windows"))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "windows"
        raise ResultsError(f"{path}: {where} is not what it should be; remove it or measure again") from error


def append_energy_window(window: EnergyWindow, experiment_id: str, path: Path) -> None:
    """Add a window, or begin the file; a reader sees the file before or after, never a part.

    Raises:
        ResultsError: there is a file of that name that contains something else.
        ResultsNotSaved: the disk does not take it.
    """
    windows = (*(read_energy_windows(path) if path.exists() else ()), window)
    content = {
        "schema_version": ENERGY_VERSION,
        "experiment_id": experiment_id,
        "windows": _WINDOWS.dump_python(windows, mode="json"),
    }
    write_json_atomically(content, path)
