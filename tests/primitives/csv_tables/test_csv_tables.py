"""Cells by hand, wild values there and back, and what a spreadsheet must not run."""

import csv
import io
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment_core_utils.primitives.csv_tables import (
    FORMULA_STARTS,
    RawCell,
    cell_value,
    csv_of_rows,
    csv_text,
    parse_csv,
    raw_cell,
    spreadsheet_safe,
)
from experiment_core_utils.primitives.errors import ResultsError

# Everything that UTF-8 and CSV can hold, with the difficult characters often.
TEXT = st.text(
    st.one_of(st.sampled_from("'=+-@\t\r\n\",;01.eE truefals"), st.characters(exclude_categories=["Cs"])), max_size=12
).filter(lambda text: "\0" not in text)
CELLS = st.one_of(TEXT, st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none())


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, ""),
        (True, "true"),
        (False, "false"),
        (12, "12"),
        (-7, "-7"),
        (0.1, "0.1"),
        (-0.0, "-0.0"),
        (1e22, "1e+22"),
        ("plain", "plain"),
        ("0001", "0001"),
        ("12", '"12"'),
        ("1e5", '"1e5"'),
        ("true", '"true"'),
        ("", '""'),
        ("=1+1", "'=1+1"),
        ("-5", "'-5"),
        ("'=1", "''=1"),
        ("'quoted'", "'quoted'"),
        ("\tx", "'\tx"),
        ("\n", '"\'\n"'),
        ('a "b", c', '"a ""b"", c"'),
    ],
)
def test_cells_by_hand(value: Any, written: str) -> None:
    assert csv_text([[raw_cell(value, "x")]]) == written + "\n"
    ((cell,),) = parse_csv(written + "\n", "a file")
    assert cell_value(cell) == value and type(cell_value(cell)) is type(value)


@given(st.lists(st.lists(CELLS, min_size=1, max_size=4), min_size=1, max_size=4))
def test_any_value_comes_back_equal(rows: list[list[Any]]) -> None:
    written = csv_text([[raw_cell(value, "x") for value in row] for row in rows])
    found = [[cell_value(cell) for cell in row] for row in parse_csv(written, "a file")]
    # repr distinguishes 1 from 1.0 and True, and -0.0 from 0.0.
    assert repr(found) == repr(rows)


@given(st.lists(CELLS, min_size=1, max_size=4))
def test_another_reader_sees_the_same_cells_and_no_formula(row: list[Any]) -> None:
    cells = [raw_cell(value, "x") for value in row]
    # The module takes a line without any character for no row.
    read = list(csv.reader(io.StringIO(csv_text([cells]), newline="")))
    assert read == ([[cell.text for cell in cells]] if csv_text([cells]) != "\n" else [[]])
    for value, cell in zip(row, cells, strict=True):
        if cell.text.startswith(FORMULA_STARTS):
            assert isinstance(value, int | float) and type(value)(cell.text) == value


@given(TEXT)
def test_guarding_a_text_can_be_undone(text: str) -> None:
    assert not spreadsheet_safe(text).startswith(FORMULA_STARTS)
    assert cell_value(RawCell(spreadsheet_safe(text), quoted=True)) == text


@given(st.text(string.printable))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    try:
        rows = parse_csv(text, "a file")
    except ResultsError as refused:
        message = str(refused)
    else:
        again = parse_csv(csv_text(rows), "a file")
        assert [[cell.text for cell in row] for row in again] == [[cell.text for cell in row] for row in rows]
        return
    assert message.startswith("a file, line ") and "\n" not in message


def test_files_of_other_writers_are_read() -> None:
    assert parse_csv('a,"b"\r\n1,\r\n', "a file") == [
        [RawCell("a", False), RawCell("b", True)],
        [RawCell("1", False), RawCell("", False)],
    ]
    assert parse_csv("a\n1", "a file") == [[RawCell("a", False)], [RawCell("1", False)]]
    assert parse_csv('5" disk,', "a file") == [[RawCell('5" disk', False), RawCell("", False)]]
    assert cell_value(RawCell("=1", quoted=False)) == "=1"
    assert cell_value(RawCell("1e999", quoted=False)) == "1e999"


@pytest.mark.parametrize("text", ['a\n"open', 'a\n"x"y\n'])
def test_torn_quotes_are_named_with_their_line(text: str) -> None:
    with pytest.raises(ResultsError, match="run.csv, line 2: the quotes"):
        parse_csv(text, "run.csv")


@pytest.mark.parametrize(
    ("value", "output"), [("a\0b", "NUL"), ("\ud800", "surrogate"), (float("nan"), "nan"), (float("-inf"), "-inf")]
)
def test_what_no_cell_can_hold_is_refused_by_name(value: Any, output: str) -> None:
    with pytest.raises(ResultsError, match=f"^metrics.x .*{output}"):
        raw_cell(value, "metrics.x")


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠"])
def test_every_beginning_of_a_formula_is_guarded(start: str) -> None:
    assert spreadsheet_safe(f"{start}1+1") == f"'{start}1+1"
    assert spreadsheet_safe(f"'{start}1+1") == f"''{start}1+1"
    assert spreadsheet_safe(f"a{start}") == f"a{start}"


def test_rows_by_name_stand_under_their_heading_in_the_order_of_the_columns() -> None:
    rows = [{"b": 1.5, "a": "x"}, {"a": "=1", "b": None}]
    assert csv_of_rows(rows, ["a", "b"]) == "a,b\nx,1.5\n'=1,\n"
    with pytest.raises(KeyError):
        csv_of_rows([{"a": 1}], ["a", "b"])
