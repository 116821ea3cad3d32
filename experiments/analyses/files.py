"""The files of an analysis: its contents, tables and figures, written into one folder."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiment_core_utils.config.command_line import add_knob_module
from experiment_core_utils.primitives.csv_tables import csv_of_rows
from experiment_core_utils.primitives.files import write_text_atomically
from experiment_core_utils.primitives.texts import counted
from experiments.analyses.charts.chart import Chart
from experiments.analyses.charts.matplotlib_charts import save_chart


@dataclass(frozen=True)
class AnalysisFiles:
    """The contents, tables and charts of an analysis, by the names of their files without endings."""

    contents: Mapping[str, Any]  #: of JSON files
    #: rows of CSV files, all of a table with the same columns; a table without rows has no file
    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    charts: Sequence[Chart]  #: each as PNG and SVG, with the caption at its foot
    caption: str

    def write(self, folder: Path) -> list[Path]:
        """Write all of them, each whole or not at all, and return their paths.

        Raises:
            ResultsNotSaved: the disk does not take a file.
        """
        written = []
        for name, content in self.contents.items():
            written.append(folder / f"{name}.json")
            write_text_atomically(json_text(content), written[-1])
        for name, rows in self.tables.items():
            if rows:
                written.append(folder / f"{name}.csv")
                write_text_atomically(csv_of_rows(rows, list(rows[0])), written[-1])
        for chart in self.charts:
            written += save_chart(chart, self.caption, folder)
        return written


# Lines that an analysis prints unless --verbose asks for all.
MOST_LINES = 10


def add_output_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """The flags that every analysis has: where its files go, and whether it prints everything."""
    parser.add_argument("--output_dir", type=Path, metavar="DIR", help=f"folder of the output (default: {default})")
    parser.add_argument("--verbose", action="store_true", help="print all findings, tables and names of files")
    add_knob_module(parser)


def finding_lines(findings: Sequence[str], details: Sequence[str], written: Sequence[Path], verbose: bool) -> list[str]:
    """What an analysis prints of its findings, most important first, and where its files are.

    Args:
        details: lines that only `verbose` shows.
        written: the files, all in one folder.
    """
    if verbose:
        return [*findings, *details, *(str(path) for path in written)]
    shown = list(findings)
    if len(shown) >= MOST_LINES:
        shown = [*shown[: MOST_LINES - 2], f"and {len(shown) - MOST_LINES + 2} more findings (--verbose)"]
    return [*shown, f"{counted(len(written), 'file')} in {written[0].parent} (--verbose lists them)"]


def json_text(content: Mapping[str, Any]) -> str:
    """JSON with a line for each key, and for each item of a list: an indent would be written by slow Python."""
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {_lines(value)}" for key, value in content.items()) + "\n}\n"


def _lines(value: Any) -> str:
    if not isinstance(value, list | tuple) or not value:
        return json.dumps(value, allow_nan=False)
    return "[\n  " + ",\n  ".join(json.dumps(item, allow_nan=False) for item in value) + "\n ]"
