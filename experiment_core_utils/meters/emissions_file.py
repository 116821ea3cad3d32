"""In: windows that codecarbon measured; out: `emissions_{experiment_id}.csv`, a row each, and back.

The columns are codecarbon's own (energies in kWh, emissions in kg, duration in s), followed by `cpu_energy_source`,
`emissions_basis` and `gpus_in_use`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiment_core_utils.primitives.csv_cells import Cell, csv_of_rows
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import check_file_name_part, read_regular_file, write_text_atomically
from experiment_core_utils.primitives.flat_table import read_table

_NUMBERS = ("duration", "emissions", "cpu_energy", "gpu_energy", "ram_energy", "energy_consumed", "gpu_count")
_TEXTS = ("tracking_mode", "cpu_model", "gpu_model", "country_iso_code")
REQUIRED_COLUMNS = (*_NUMBERS, *_TEXTS)


def emissions_path(experiment_id: str, output_dir: Path) -> Path:
    """The published name; raises ConfigurationError for an id that is no part of a file name."""
    check_file_name_part(experiment_id, "the experiment id")
    return output_dir / f"emissions_{experiment_id}.csv"


def read_windows(path: Path) -> list[dict[str, Cell]]:
    """The rows of an emissions file, also of one that codecarbon wrote itself.

    Raises:
        ResultsError: torn, no row, a column missing, or a figure that is no number.
    """
    try:
        text = read_regular_file(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path} cannot be read ({error}); remove it or measure again") from error
    rows = read_table(text, str(path))
    if not rows:
        raise ResultsError(f"{path} holds no measured window; remove it or measure again")
    for number, row in enumerate(rows, start=1):
        lacking = [name for name in REQUIRED_COLUMNS if name not in row]
        if lacking:
            raise ResultsError(f"{path} is no emissions file of codecarbon: it lacks the column {lacking[0]}")
        wrong = [name for name in _NUMBERS if isinstance(row[name], str | bool | None)]
        if wrong:
            raise ResultsError(f"{path}, window {number}: {wrong[0]} is {row[wrong[0]]!r}, no number; it is torn")
    return rows


def append_window(window: Mapping[str, Cell], path: Path) -> None:
    """Add a row, or begin the file; a reader sees the file before or after, never a part.

    Raises:
        ResultsError: there is a file of that name that holds something else.
        ResultsNotSaved: the disk does not take it.
    """
    rows: Sequence[Mapping[str, Cell]] = [*(read_windows(path) if path.exists() else ()), window]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    write_text_atomically(csv_of_rows(({**dict.fromkeys(columns), **row} for row in rows), columns), path)
