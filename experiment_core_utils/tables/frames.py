"""The tables of settings and samples, column by column from the declarations."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import pandas as pd

from experiment_core_utils.knobs.interface import Knob
from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.knobs.setting import Setting, setting_of
from experiment_core_utils.primitives.csv_tables import Cell
from experiment_core_utils.records.columns import (
    KNOB_COLUMNS,
    LAST_COLUMNS,
    SAMPLE_COLUMNS,
    SETTING_COLUMNS,
    SHARE_OF_REFERENCE,
    SettingColumn,
)
from experiment_core_utils.records.sample_result import SampleResult
from experiment_core_utils.records.setting_result import (
    SettingResult,
    setting_file_name,
    share_of_reference,
    throughput_of,
)


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
    has_fractions = any(result.vision_fraction is not None for result, _ in results)
    knobs = [name for name in KNOB_COLUMNS if has_fractions or name != "vision_fraction"]
    of_setting: dict[str, list[Cell]] = {name: [] for name in ("task", "setting", *knobs)}
    of_knobs: dict[str, list[Cell]] = {knob.name: [] for knob in further}
    for result, key in results:
        own = result.per_sample_results
        samples += own
        shared = result.provenance.task.name, key, *(getattr(result, name) for name in knobs)
        for column, cell in zip(of_setting.values(), shared, strict=True):
            column += [cell] * len(own)
        setting = setting_of(result) if further else Setting({})
        for name, column in of_knobs.items():
            column += [setting.level(name)] * len(own)
    of_samples = {
        each.name: _values(samples, each.source)
        for each in SAMPLE_COLUMNS
        if each.name not in (*of_setting, *KNOB_COLUMNS)
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

    Knobs and accuracy are always there (`vision_tokens_target` and `vision_fraction` where one was requested); columns
    of empty and one-token answers where there is such an answer.
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


def _setting_row(
    result: SettingResult, further: Sequence[Knob[Any]], reference: SettingResult | None
) -> dict[str, Any]:
    """The cells of a setting by column, in the order of the table."""
    throughput = throughput_of(result)
    setting = setting_of(result)
    low, high = result.accuracy_ci95 or (None, None)
    computed = {
        "setting": setting.key,
        "file": setting_file_name(result),
        "accuracy_ci95_low": low,
        "accuracy_ci95_high": high,
        "tokens_per_second": throughput.output_tokens_per_s,
        "requests_per_second": throughput.requests_per_s,
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
