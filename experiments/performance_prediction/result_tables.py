"""In: rows of one combination, size after size; out: its two CSV files, whole at every moment, and what they hold.

A size counts as done once its row is in the overall table, which is written behind the table of layers. Layers of a
size that is not there come from a run that was killed between the two, and are dropped by the next one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiment_core_utils.primitives.csv_tables import Cell, csv_text, raw_cell, read_table_file
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import write_text_atomically
from experiment_core_utils.records.locks import locked
from experiments.performance_prediction.layer_rows import LAYER_COLUMNS
from experiments.performance_prediction.overall_row import OVERALL_COLUMNS
from experiments.performance_prediction.profile_provenance import IDENTITY

Row = Mapping[str, Cell]


def combination_name(model: str, algorithm: str) -> str:
    """As folders and files begin: spaces become underscores."""
    return f"{model}_{algorithm.replace(' ', '_')}"


class ResultTables:
    """The tables of a model with an algorithm on a device.

    Args:
        stage_folder: such as `results/3_full`.
        gpu: the device's label.
        identity: what all rows agree in, by column.
    """

    def __init__(self, stage_folder: Path, gpu: str, identity: Row) -> None:
        name = combination_name(str(identity["model"]), str(identity["algorithm"]))
        self._identity = identity
        self.folder = stage_folder / f"{name}_{gpu}"
        self.overall_path = self.folder / f"{name}_overall.csv"
        self.layers_path = self.folder / f"{name}_layers.csv"

    def done_sizes(self) -> frozenset[int]:
        """Input sizes that have a row.

        Raises:
            ResultsError: the table is of another model, device, precision, …, or not one of this version's.
        """
        return frozenset(_size_of(row) for row in self._overall())

    def append(self, overall: Row, layers: Sequence[Row]) -> None:
        """One size's rows; none where another process has written them meanwhile. Raises as `done_sizes`."""
        with locked(self.overall_path):
            known = self._overall()
            done = {_size_of(row) for row in known}
            if _size_of(overall) in done:
                return
            kept = [row for row in _rows(self.layers_path, LAYER_COLUMNS) if _size_of(row) in done]
            _write([*kept, *layers], LAYER_COLUMNS, self.layers_path)
            _write([*known, overall], OVERALL_COLUMNS, self.overall_path)

    def _overall(self) -> list[dict[str, Cell]]:
        rows = _rows(self.overall_path, OVERALL_COLUMNS)
        for row in rows:
            others = [
                f"{name} {row[name]!r}, not {self._identity[name]!r}"
                for name in IDENTITY
                if row[name] != self._identity[name]
            ]
            if others:
                raise ResultsError(
                    f"{self.overall_path} contains rows of {', '.join(others)}; choose another --output-dir or "
                    f"delete it"
                )
        return rows


def _rows(path: Path, columns: Sequence[str]) -> list[dict[str, Cell]]:
    if not path.exists():
        return []
    rows = read_table_file(path)
    if rows and tuple(rows[0]) != tuple(columns):
        raise ResultsError(f"{path} has other columns than this version's; choose another --output-dir or delete it")
    return rows


def _write(rows: Sequence[Row], columns: Sequence[str], path: Path) -> None:
    cells = [[raw_cell(name, "a column's name") for name in columns]]
    cells += [[raw_cell(row[name], name) for name in columns] for row in rows]
    write_text_atomically(csv_text(cells), path)


def _size_of(row: Row) -> int:
    size = row["input_size"]
    if not isinstance(size, int):
        raise ResultsError(f"an input size is a whole number, not {size!r}; the table is not one of this version's")
    return size
