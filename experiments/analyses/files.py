"""The files of an analysis: its contents, tables and figures, written into one folder."""

import argparse
import json
import sys
import time
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


def split_intervals(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as cells of a row: each `..._ci95` as two, `..._ci95_low` and `..._ci95_high`."""
    cells: dict[str, Any] = {}
    for name, value in fields.items():
        if name.endswith("_ci95"):
            cells[f"{name}_low"], cells[f"{name}_high"] = value or (None, None)
        else:
            cells[name] = value
    return cells


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
    return "[\n  " + ",\n  ".join(json.dumps(each, allow_nan=False) for each in value) + "\n ]"


# Above, fewer draws are made, the spread is not split into effects, and the estimator is fitted to some of them.
MOST_SETTINGS = 1000
# A knob of more values is not held at each of them.
MOST_VALUES = 100
FEWEST_DRAWS = 100
# Settings that the estimator is fitted to where there are more than MOST_SETTINGS.
MOST_FITTED = 500
# Of those off a front, in a figure of more than MOST_SETTINGS.
MOST_DRAWN = 300
# Values of the vision knob, each of which is a panel or a group of bars, in a figure of stages.
MOST_PANELS = 12


def draws_for(num_settings: int, num_draws: int) -> int:
    """The number of paired draws for so many settings: as requested up to MOST_SETTINGS, then fewer in proportion."""
    if num_settings <= MOST_SETTINGS:
        return num_draws
    return min(num_draws, max(FEWEST_DRAWS, num_draws * MOST_SETTINGS // num_settings))


class Steps:
    """Lines on standard error that say what is being computed; none for a folder that takes seconds."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def say(self, num_settings: int, step: str) -> None:
        """Report that the next step begins."""
        if num_settings > MOST_SETTINGS:
            print(f"{time.monotonic() - self._started:.0f} s: {step}", file=sys.stderr, flush=True)
