"""In: the JSON files of a run's settings or of text experiments; out: tidy CSV files."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiment_core_utils.config.parts import TableFormat
from experiment_core_utils.knobs.interface import Knob
from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.knobs.setting import Setting, setting_of
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
from experiment_core_utils.primitives.statistics import rate
from experiment_core_utils.records.columns import (
    KNOB_COLUMNS,
    LAST_COLUMNS,
    SAMPLE_COLUMNS,
    SETTING_COLUMNS,
    SHARE_OF_REFERENCE,
    SettingColumn,
)
from experiment_core_utils.records.ledger import plan_path
from experiment_core_utils.records.locks import locked
from experiment_core_utils.records.result_files import RESULT_FILES, aggregated_path, read_experiments, read_rows
from experiment_core_utils.records.sample_result import SampleResult
from experiment_core_utils.records.setting_result import (
    SettingResult,
    read_setting,
    setting_file_name,
    setting_key,
    share_of_reference,
)

_IN_NO_CSV = re.compile("[\0\ud800-\udfff]")


def sample_rows(result: SettingResult, setting_key: str) -> Iterator[dict[str, Cell]]:
    """The rows of one setting's result, by column; absent is None."""
    columns = sample_columns([(result, setting_key)])
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, row, strict=True))


def sample_columns(results: Iterable[tuple[SettingResult, str]]) -> dict[str, list[Cell]]:
    """The columns of results with their setting's keys, a cell for each sample; absent is None."""
    results = list(results)
    further = further_knobs([result for result, _ in results])
    samples: list[SampleResult] = []
    of_setting: dict[str, list[Cell]] = {name: [] for name in ("task", "setting", *KNOB_COLUMNS)}
    of_knobs: dict[str, list[Cell]] = {knob.name: [] for knob in further}
    for result, key in results:
        own = result.per_sample_results
        samples += own
        shared = result.provenance.task.name, key, *(getattr(result, name) for name in KNOB_COLUMNS)
        for column, cell in zip(of_setting.values(), shared, strict=True):
            column += [cell] * len(own)
        setting = setting_of(result) if further else Setting({})
        for name, column in of_knobs.items():
            column += [setting.level(name)] * len(own)
    of_samples = {
        each.name: _values(samples, each.source)
        for each in SAMPLE_COLUMNS
        if each.name not in of_setting
        and (each.is_everywhere or any(each.source in sample.model_fields_set for sample in samples))
    }
    return of_setting | of_samples | of_knobs


def further_knobs(results: Sequence[SettingResult]) -> list[Knob[Any]]:
    """The knobs that any of these settings turns and that have a column of their name, in the order of the registry."""
    return [knob for knob in all_knobs() if not knob.published and any(knob.name in each.knobs for each in results)]


def _values(samples: Sequence[SampleResult], source: str) -> list[Cell]:
    values: list[Any] = list(map(attrgetter(source), samples))
    if source == "metadata.answers":
        return [json.dumps(value, ensure_ascii=False) for value in values]
    return [len(value) if isinstance(value, list) else value for value in values]


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


def settings_frame(results: Sequence[SettingResult]) -> pd.DataFrame:
    """One row a setting with all columns in reading order, the schema of every table of settings.

    Units are in the names (times in ms, energy in J). Absent numbers and texts are NaN, absent answers None, never 0 or
    False. Counts, bytes and levels of knobs without gaps are whole numbers.
    """
    further = further_knobs(results)
    references = {each.provenance.task.name: each for each in results if each.is_reference}
    rows = [_setting_row(each, further, references.get(each.provenance.task.name)) for each in results]
    columns = (*SETTING_COLUMNS, *LAST_COLUMNS)
    texts, flags = ([column.name for column in columns if column.kind is kind] for kind in (str, bool))
    return typed(pd.DataFrame(rows), texts, flags)


def table_of_settings(results: Sequence[SettingResult]) -> pd.DataFrame:
    """`settings_frame` as the files have it: without columns that have no value.

    Knobs and accuracy are always there (`vision_tokens_target` where one was requested); columns of empty and one-token
    answers where there is such an answer.
    """
    frame = settings_frame(results)
    left_out = {column.name: column.left_out for column in (*SETTING_COLUMNS, *LAST_COLUMNS)}
    are_there = {
        "never": lambda cells: True,
        "if absent": lambda cells: cells.notna().any(),
        "if 0": lambda cells: cells.fillna(0).any(),
    }
    return frame[[name for name in frame if are_there[left_out.get(str(name), "if absent")](frame[name])]]


def typed(frame: pd.DataFrame, texts: Iterable[str], flags: Iterable[str], whole: Iterable[str] = ()) -> pd.DataFrame:
    """The frame with texts, yes or no (None where absent), whole numbers where a column has no gaps, and floats.

    Args:
        whole: columns of whole numbers, beside those that are by their name.
    """
    kinds = dict.fromkeys(texts, "str")
    kinds |= {name: "bool" if frame[name].notna().all() else "object" for name in flags}
    whole_numbers = {*whole, *(column.name for column in SETTING_COLUMNS if column.kind is int)}
    levels = {*KNOB_COLUMNS, *(knob.name for knob in all_knobs())}
    for name in map(str, frame.columns):
        is_whole = name in whole_numbers or "num_" in name or name.endswith("_bytes")
        if name in levels:
            is_whole = all(isinstance(level, int | np.integer) for level in frame[name])
            if any(isinstance(level, str) for level in frame[name]):
                kinds[name] = "str"
        kinds.setdefault(name, "int64" if is_whole and frame[name].notna().all() else "float64")
    return frame.astype({str(name): kinds[str(name)] for name in frame.columns})


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


def _setting_row(
    result: SettingResult, further: Sequence[Knob[Any]], reference: SettingResult | None
) -> dict[str, Any]:
    """The cells of a setting by column, in the order of the table."""
    measured = [sample for sample in result.per_sample_results if sample.mean_total is not None]
    # Of requests that overlap the sum of their times is no time.
    total_s = 0.0 if result.open_loop else sum(sample.mean_total or 0.0 for sample in measured) / 1000
    setting = setting_of(result)
    low, high = result.accuracy_ci95 or (None, None)
    computed = {
        "setting": setting.key,
        "file": setting_file_name(result),
        "accuracy_ci95_low": low,
        "accuracy_ci95_high": high,
        "tokens_per_second": rate(sum(sample.output_tokens for sample in measured), total_s),
        "requests_per_second": rate(len(measured), total_s),
        "vision": setting.level("vision"),
        SHARE_OF_REFERENCE: None if reference is None else share_of_reference(result, reference),
    }

    def cells(columns: Iterable[SettingColumn]) -> dict[str, Any]:
        return {
            column.name: computed[column.name] if column.name in computed else _value_at(result, column.source)
            for column in columns
        }

    return cells(SETTING_COLUMNS) | {knob.name: setting.level(knob.name) for knob in further} | cells(LAST_COLUMNS)


def _value_at(result: SettingResult, source: str) -> Any:
    """What a result has at a dotted key, of several the first that is there; None where there is none."""
    for path in source.split("|"):
        value: Any = result
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
        if value is not None:
            return value
    return None
