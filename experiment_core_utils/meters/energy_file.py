"""In: windows that a machine's own instruments measured; out: `energy_{experiment_id}.json`, and back.

It stands beside `emissions_{experiment_id}.csv` and has a window for each of its rows. Joules, watts and seconds.
"""

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from experiment_core_utils.primitives.energy_records import EnergyWindow
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import check_file_name_part, write_json_atomically
from experiment_core_utils.primitives.result_files import read_versioned_object

ENERGY_VERSION = 1
_WINDOWS = TypeAdapter(tuple[EnergyWindow, ...])


def energy_path(experiment_id: str, output_dir: Path) -> Path:
    """Its name; raises ConfigurationError for an id that is no part of a file name."""
    check_file_name_part(experiment_id, "the experiment id")
    return output_dir / f"energy_{experiment_id}.json"


def read_energy_windows(path: Path) -> tuple[EnergyWindow, ...]:
    """The windows of an energy file, in order of time.

    Raises:
        ResultsError: torn, of another schema, or something else.
    """
    content = read_versioned_object(path, "energy file", ENERGY_VERSION)
    try:
        return _WINDOWS.validate_python(content.get("windows"))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "windows"
        raise ResultsError(f"{path}: {where} is not what it should be; remove it or measure again") from error


def append_energy_window(window: EnergyWindow, experiment_id: str, path: Path) -> None:
    """Add a window, or begin the file; a reader sees the file before or after, never a part.

    Raises:
        ResultsError: there is a file of that name that holds something else.
        ResultsNotSaved: the disk does not take it.
    """
    windows = (*(read_energy_windows(path) if path.exists() else ()), window)
    content = {
        "schema_version": ENERGY_VERSION,
        "experiment_id": experiment_id,
        "windows": _WINDOWS.dump_python(windows, mode="json"),
    }
    write_json_atomically(content, path)
