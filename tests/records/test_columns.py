"""The columns of both tables: each is from a key that results have, and the schema page says from which."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest

from experiment_core_utils.records.columns import LAST_COLUMNS, SAMPLE_COLUMNS, SETTING_COLUMNS, SettingColumn
from experiment_core_utils.records.json_record import Record
from experiment_core_utils.records.sample_result import QUANTITIES, SampleResult
from experiment_core_utils.records.setting_result import SettingResult


def records_in(kind: Any) -> Iterator[type[Record]]:
    """The records that a field's type names."""
    if isinstance(kind, type) and issubclass(kind, Record):
        yield kind
    for inner in get_args(kind):
        yield from records_in(inner)


def is_key(record: type[Record], path: str) -> bool:
    """Whether the dotted key leads to a field."""
    key, _, rest = path.partition(".")
    if key not in record.model_fields:
        return False
    return not rest or any(is_key(inner, rest) for inner in records_in(record.model_fields[key].annotation))


def test_every_column_is_from_a_key_that_results_have() -> None:
    sources = [path for column in (*SETTING_COLUMNS, *LAST_COLUMNS) for path in column.source.split("|") if path]
    spreads = {quantity.spread for quantity in QUANTITIES.values() if quantity.figures is not None}
    for path in sources:
        above, _, figure = path.partition("aggregate_stats.")
        name = figure.removesuffix("_typical").rpartition("_")[0]
        assert name in spreads if figure else is_key(SettingResult, above), path
    assert not is_key(SettingResult, "energy.summary.visionj") and not is_key(SettingResult, "energi.summary")
    keys = [column.source for column in SAMPLE_COLUMNS if not column.source.startswith("(")]
    assert [path for path in keys if not is_key(SampleResult, path)] == []
    assert len({column.name for column in SAMPLE_COLUMNS}) == len(SAMPLE_COLUMNS)


@pytest.mark.parametrize(
    ("column", "origin"),
    [
        (SettingColumn("top_k", "top_k"), "the same key"),
        (SettingColumn("kind", "energy.kind|task.kind"), "`energy.kind`, else `task.kind`"),
        (SettingColumn("file", meaning="name of the file"), "name of the file"),
        (SettingColumn("empty", "empty", left_out="if 0"), "the same key; left out where it is 0 in every row"),
    ],
)  # fmt: skip
def test_a_column_says_where_it_is_from(column: SettingColumn, origin: str) -> None:
    assert column.origin == origin
