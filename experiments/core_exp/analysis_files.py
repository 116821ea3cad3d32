"""In: an analysis as contents, tables and figures by name; out: its files in one folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiment_core_utils.primitives.csv_tables import csv_of_rows
from experiment_core_utils.primitives.files import write_json_atomically, write_text_atomically
from experiments.core_exp.figures import save_figure


@dataclass(frozen=True)
class AnalysisFiles:
    """What an analysis found, by the names of its files without their endings.

    Attributes:
        contents: of JSON files.
        tables: rows of CSV files, all of a table with the same columns; a table without rows has no file.
        figures: each as PNG and SVG.
    """

    contents: Mapping[str, Any]
    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    figures: Mapping[str, Figure]

    def write(self, folder: Path) -> list[Path]:
        """Write all of them, each whole or not at all; returns their paths.

        Raises:
            ResultsNotSaved: the disk does not take a file.
        """
        written = []
        for name, content in self.contents.items():
            written.append(folder / f"{name}.json")
            write_json_atomically(content, written[-1])
        for name, rows in self.tables.items():
            if rows:
                written.append(folder / f"{name}.csv")
                write_text_atomically(csv_of_rows(rows, list(rows[0])), written[-1])
        for name, figure in self.figures.items():
            written += save_figure(figure, folder, name)
        return written
