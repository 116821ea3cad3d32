"""In: the JSON files of a run's settings or of text experiments; out: tidy CSV files."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiment_core_utils.config.parts import TableFormat
from experiment_core_utils.primitives.csv_tables import (
    Cell,
    check_table_format,
    checked_rows,
    csv_content,
    csv_of_rows,
    csv_text,
    named_rows,
    read_table_file,
    reordered_columns,
    spreadsheet_safe,
    table_text,
)
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import replaced_whole, write_text_atomically
from experiment_core_utils.records.columns import KNOB_COLUMNS
from experiment_core_utils.records.ledger import plan_path
from experiment_core_utils.records.locks import locked
from experiment_core_utils.records.result_files import RESULT_FILES, aggregated_path, read_experiments, read_rows
from experiment_core_utils.records.setting_result import SettingResult, read_setting, setting_key
from experiment_core_utils.tables.frames import sample_columns, table_of_settings

_IN_NO_CSV = re.compile("[\0\ud800-\udfff]")


# Digits that are kept of a number in the CSV files; the JSON files have all.
_DIGITS = 6


def read_results(folder: Path) -> dict[str, SettingResult]:
    """The settings' files in `folder` itself, by file name in alphabetical order; files of other names are not read.

    Raises:
        ResultsError: no such folder, no such file in it, or one that is not what its name says.
    """
    if not folder.is_dir():
        raise ResultsError(f"{folder} is not a folder; give the --output_dir of a profiling run")
    results = {path.name: read_setting(path) for path in sorted(folder.glob(RESULT_FILES))}
    if not results and plan_path(folder).is_file():
        raise ResultsError(
            f"{folder} has no results yet: no sample has run at every setting; `knobprof status {folder}` says how far "
            "its run is, and the same command resumes one that stopped"
        )
    if not results:
        raise ResultsError(f"{folder} contains no results ({RESULT_FILES}); give the --output_dir of a profiling run")
    return results


def write_settings_csv(results: Sequence[SettingResult], path: Path) -> None:
    """`table_of_settings` as CSV, written whole or not at all; six digits of a number."""
    frame = table_of_settings(results)
    rows: list[Any] = frame.astype(object).where(frame.notna(), None).to_dict("records")
    write_text_atomically(_csv_of(rows, list(frame.columns)), path)


def _csv_of(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> str:
    return csv_of_rows(({name: _short(cell) for name, cell in row.items()} for row in rows), names)


def _short(cell: Any) -> Any:
    """The cell with six digits of a number, and U+FFFD for characters that no CSV file can contain."""
    if isinstance(cell, float):
        return float(f"{cell:.{_DIGITS}g}")
    return _IN_NO_CSV.sub("\ufffd", cell) if isinstance(cell, str) else cell


def write_tables(
    results: Sequence[SettingResult], task_name: str, folder: Path, table_format: TableFormat = "csv"
) -> Path:
    """The tables of one task's settings and of their samples; returns the path of the former's CSV.

    Args:
        table_format: `parquet` writes Parquet files, with all digits, beside the CSV files.

    Raises:
        ConfigurationError: see `check_table_format`.
        ResultsError: a number that is not finite.
        ResultsNotSaved: the disk does not take them.
    """
    check_table_format(table_format)
    settings_csv, samples_csv, *_ = table_paths(task_name, folder)
    write_settings_csv(results, settings_csv)
    write_samples_csv(results, samples_csv)
    if table_format == "parquet":
        samples = pd.DataFrame(sample_columns((result, setting_key(result)) for result in results))
        for frame, path in ((table_of_settings(results), settings_csv), (samples, samples_csv)):
            with replaced_whole(path.with_suffix(".parquet")) as temporary:
                frame.to_parquet(temporary, index=False)
    return settings_csv


def table_paths(task_name: str, folder: Path, table_format: TableFormat = "csv") -> list[Path]:
    """The files of `write_tables`: the CSV of the settings, that of the samples, and then the Parquet files."""
    settings_csv = folder / f"{task_name.replace('_', '-')}_settings.csv"
    paths = [settings_csv, samples_csv_beside(settings_csv)]
    return paths + ([path.with_suffix(".parquet") for path in paths] if table_format == "parquet" else [])


def write_experiments_table(task_type: str, results_dir: Path) -> Path | None:
    """Write `{task_type}_results.csv` anew from all saved experiments of text runs; None where there are none.

    Raises:
        ResultsError: the saved experiments are torn, or two keys would share a column.
        ResultsNotSaved: the disk does not take it.
    """
    with locked(aggregated_path(task_type, "", results_dir)):
        experiments = read_experiments(aggregated_path(task_type, ".json", results_dir))
        if not experiments:
            return None
        path = aggregated_path(task_type, ".csv", results_dir)
        write_text_atomically(table_text(named_rows(experiments)), path)
        return path


def samples_csv_beside(settings_csv: Path) -> Path:
    """`<task>_samples.csv` beside `<task>_settings.csv`."""
    return settings_csv.with_name(settings_csv.name.replace("_settings.csv", "_samples.csv"))


def write_samples_csv(results: Sequence[SettingResult], path: Path) -> None:
    """All columns with a row for each sample that ran, setting by setting, written as the other table.

    A character that no CSV file can contain becomes U+FFFD.

    Raises:
        ResultsError: a number that is not finite.
        ResultsNotSaved: the disk does not take it.
    """
    columns = sample_columns((result, setting_key(result)) for result in results)
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    write_text_atomically(_csv_of(rows, list(columns)), path)


def json_to_csv(json_file_path: Path | str, csv_file_path: Path | str) -> None:
    """Write the experiments of a JSON file as CSV, one row each, as `flatten_results_to_csv` does.

    Args:
        json_file_path: a file of many experiments (a dict of dicts by name, or a list of dicts), or of one: a dict
            with other values than dicts, or one whose keys are all result types (`inference_metrics`, ...).

    Raises:
        ResultsError: no such file, torn, something else in it, or two keys that would share a column.
        ResultsNotSaved: the disk does not take it.
    """
    write_text_atomically(table_text(read_rows(Path(json_file_path))), Path(csv_file_path))


def reorder_csv_columns(csv_file_path: Path | str, priority_columns: Sequence[str]) -> None:
    """Put these columns first, in this order; cells as they are.

    A column is named whole or by its last part (`model_name` for `experiment_variables.model_name`); names that the
    file does not have are passed over. The other columns of the project's own tables (of experiments, of settings)
    keep their order, those of any other table are sorted alphabetically (places in lists by number).

    Raises:
        ResultsError: no such file, torn, ragged, or two columns of one name: it is left as it is.
        ResultsNotSaved: the disk does not take it.
    """
    path = Path(csv_file_path)
    rows = checked_rows(csv_content(path), str(path))
    names = [cell.text for cell in rows[0]]
    priority = [spreadsheet_safe(name) for name in priority_columns]
    if "num_samples" in names and {"setting", *KNOB_COLUMNS} & set(names):
        priority += [name for name in names if name not in priority]
    places = [names.index(name) for name in reordered_columns(names, priority)]
    write_text_atomically(csv_text([row[place] for place in places] for row in rows), path)


def read_results_csv(csv_file_path: Path | str) -> list[dict[str, Cell]]:
    """The rows of a results CSV by column name: text, numbers, booleans and None (an empty cell) as they were.

    Raises:
        ResultsError: no such file, torn, ragged, or two columns of one name.
    """
    return read_table_file(Path(csv_file_path))
