"""Nested results as one flat table."""

import io
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment_core_utils.primitives.csv_tables import (
    flat_rows,
    named_rows,
    ordered_columns,
    published_order,
    read_table,
    reordered_columns,
    table_text,
)
from experiment_core_utils.primitives.errors import ResultsError
from tests.primitives.csv_tables.test_csv_tables import CELLS, TEXT


def test_a_row_by_hand() -> None:
    nested = {
        "setup": {"gpu_names": ["A", "B"], "cpu": {"count": 4}},
        "empty": {"dict": {}, "list": []},
        "pairs": [[1, 2], {"x": None}],
        "ok": True,
    }
    assert flat_rows([nested]) == [
        {
            "setup.gpu_names.0": "A",
            "setup.gpu_names.1": "B",
            "setup.cpu.count": 4,
            "empty.dict": "{}",
            "empty.list": "[]",
            "pairs.0.0": 1,
            "pairs.0.1": 2,
            "pairs.1.x": None,
            "ok": True,
        }
    ]


@pytest.mark.parametrize(
    "rows",
    [
        [{"a.b": 1, "a": {"b": 2}}],
        [{"x": [5], "x.0": 6}],
        [{"x": {"0": 1}}, {"x": [1]}],
        [{"a": {"b.c": 1}}, {"a.b": {"c": 1}}],
    ],
)
def test_two_places_that_would_share_a_column_are_both_named(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(ResultsError, match=r"the column \S+ would contain both \[.*\] and \[.*\]; rename one"):
        flat_rows(rows)


def test_a_key_with_a_dot_is_no_problem_by_itself() -> None:
    assert flat_rows([{"a.b": 1}, {"a.b": 2}]) == [{"a.b": 1}, {"a.b": 2}]


def test_names_become_a_column() -> None:
    assert named_rows({"e1": {"a": 1}, "e2": {"experiment": "e2"}}) == [
        {"experiment": "e1", "a": 1},
        {"experiment": "e2"},
    ]
    with pytest.raises(ResultsError, match="e1 has a key 'experiment' that says 'other'"):
        named_rows({"e1": {"experiment": "other"}})
    with pytest.raises(ResultsError, match="e1 contains no experiment: a dict was expected, found int"):
        named_rows({"e1": 3})  # type: ignore[dict-item]


def test_columns_are_alphabetical_with_places_in_lists_by_number() -> None:
    names = ["x.10", "x.2", "x.2.b", "b", "B", "x2", "x10", "x.a", "10.a", "9.a"]
    assert ordered_columns(names, ["b", "absent", "b"]) == [
        "b", "9.a", "10.a", "B", "x.2", "x.2.b", "x.10", "x.a", "x10", "x2",
    ]  # fmt: skip


def test_what_a_reader_looks_for_comes_first() -> None:
    names = [
        "compute_metrics.flops",
        "a",
        "global_energy_results.per_process_breakdown.0.total_energy_kwh",
        "global_energy_results.total_energy_kwh",
        "inference_metrics.tokens_per_second",
        "experiment_setup.experiment_id",
        "experiment",
    ]
    assert published_order(names) == [
        "experiment",
        "experiment_setup.experiment_id",
        "inference_metrics.tokens_per_second",
        "compute_metrics.flops",
        "global_energy_results.total_energy_kwh",
        "a",
        "global_energy_results.per_process_breakdown.0.total_energy_kwh",
    ]


def test_a_whole_name_comes_before_the_last_part_of_one() -> None:
    names = ["b.precision", "precision", "z", "a.precision", "a.0.size", "a.size"]
    assert reordered_columns(names, ["precision", "size"]) == [
        "precision", "a.size", "a.0.size", "a.precision", "b.precision", "z",
    ]  # fmt: skip
    assert reordered_columns(["z", "b.precision", "a.precision"], ["precision"]) == ["a.precision", "b.precision", "z"]


def test_a_table_by_hand_and_as_pandas_reads_it() -> None:
    text = table_text([{"id": "0001", "t": 0.1, "=k": None}, {"id": "0002", "t": 3, "more": "a,b"}])
    assert text == '\'=k,id,more,t\n,0001,,0.1\n,0002,"a,b",3\n'
    assert read_table(text, "a file") == [
        {"=k": None, "id": "0001", "more": None, "t": 0.1},
        {"=k": None, "id": "0002", "more": "a,b", "t": 3},
    ]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_pandas_reads_the_same_numbers(numbers: list[float]) -> None:
    text = table_text([{"n": number} for number in numbers])
    assert list(pd.read_csv(io.StringIO(text))["n"]) == numbers


NESTED = st.recursive(
    CELLS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)), max_leaves=8
)


@given(st.lists(st.dictionaries(TEXT, NESTED, min_size=1, max_size=3), min_size=1, max_size=3))
def test_any_results_come_back_or_are_refused_in_one_line(rows: list[dict[str, Any]]) -> None:
    try:
        expected = flat_rows(rows)
    except ResultsError:
        with pytest.raises(ResultsError, match="would contain both"):
            table_text(rows)
        return
    text = table_text(rows)
    found = read_table(text, "a file")
    assert [{name: cell for name, cell in row.items() if cell is not None} for row in found] == [
        {name: cell for name, cell in row.items() if cell is not None} for row in expected
    ]


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("", "is empty"),
        ("a,b\n1\n", "row 2 has 1 cell, the header has 2"),
        ("a,b\n1,2,3\n", "row 2 has 3 cells"),
        ("a,b,a\n1,2,3\n", "column 'a' more than once"),
    ],
)
def test_a_file_that_is_no_table_is_refused(text: str, output: str) -> None:
    with pytest.raises(ResultsError, match=f"run.csv.*{output}"):
        read_table(text, "run.csv")


def test_nothing_to_write_is_reported() -> None:
    with pytest.raises(ResultsError, match="nothing to write"):
        table_text([])
