"""In: text, numbers, booleans, None; out: CSV cells that a spreadsheet does not run, and back to equal values.

A number is written as Python's repr, None as nothing, booleans as true and false. Text that reads like one of these is
quoted ("12", "true", ""); text that a spreadsheet would run as a formula gets an apostrophe in front. Rows end with a
line feed; the file is UTF-8.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiment_core_utils.primitives.errors import ResultsError

Cell = str | int | float | bool | None

# The full-width ones are taken for the others where East Asian text is typed.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_BOOLEANS = {"true": True, "false": False}
_CELL = re.compile(r'(?:"([^"]*(?:""[^"]*)*)"|([^",\r\n][^,\r\n]*)?)(,|\r\n|\r|\n|\Z)')


class RawCell(NamedTuple):
    """A cell as it stands in the file: its text without the quotes, and whether there were quotes."""

    text: str
    quoted: bool


def raw_cell(value: Cell, where: str) -> RawCell:
    """The cell that holds `value`; `where` is what it is called, for the message.

    Raises:
        ResultsError: a number that is not finite, or text with a NUL or half a surrogate pair.
    """
    if value is None:
        return RawCell("", quoted=False)
    if isinstance(value, bool):
        return RawCell("true" if value else "false", quoted=False)
    if isinstance(value, str):
        return _text_cell(value, where)
    if not math.isfinite(value):
        raise ResultsError(f"{where} is {value}: a table holds finite numbers, or nothing")
    return RawCell(repr(value), quoted=False)


def cell_value(cell: RawCell) -> Cell:
    """What `raw_cell` was given."""
    text = cell.text
    if not cell.quoted:
        if text == "":
            return None
        if text in _BOOLEANS:
            return _BOOLEANS[text]
        found = _NUMBER.fullmatch(text)
        if found is not None:
            return _number(text, is_whole=found[2] is None and found[3] is None)
    return text[1:] if _is_guarded(text) else text


def spreadsheet_safe(text: str) -> str:
    """`text`, with an apostrophe in front where a spreadsheet would run it.

    Text that begins with apostrophes followed by such a beginning gets one too, so that it can be undone.
    """
    return f"'{text}" if text.lstrip("'").startswith(FORMULA_STARTS) else text


def csv_text(rows: Iterable[Sequence[RawCell]]) -> str:
    """The content of a CSV file."""
    return "".join(",".join(map(_written, row)) + "\n" for row in rows)


def csv_of_rows(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """The content of a CSV file with these columns under a heading; every row has a value for each.

    Raises:
        ResultsError: see `raw_cell`.
    """
    cells = ([raw_cell(row[name], name) for name in columns] for row in rows)
    return csv_text([[raw_cell(name, name) for name in columns], *cells])


def parse_csv(text: str, name: str) -> list[list[RawCell]]:
    """The rows of a CSV file, quotes remembered; any line ends.

    Args:
        name: the file's, for the message.

    Raises:
        ResultsError: quotes that do not fit.
    """
    rows: list[list[RawCell]] = []
    row: list[RawCell] = []
    place = 0
    # After a comma one more cell is due, also at the end of the file.
    while place < len(text) or row:
        found = _CELL.match(text, place)
        if found is None:
            line = text.count("\n", 0, place) + 1
            raise ResultsError(f"{name}, line {line}: the quotes of a cell do not fit; it is torn or no CSV file")
        quoted, bare, end = found.groups()
        row.append(RawCell(bare or "", quoted=False) if quoted is None else RawCell(quoted.replace('""', '"'), True))
        place = found.end()
        if end != ",":
            rows.append(row)
            row = []
    return rows


def _text_cell(text: str, where: str) -> RawCell:
    if "\0" in text:
        raise ResultsError(f"{where} holds a NUL character, which no CSV file can; remove it")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ResultsError(f"{where} holds half a surrogate pair, which UTF-8 cannot; repair the text")
    safe = spreadsheet_safe(text)
    reads_as_other = safe == "" or safe in _BOOLEANS or _NUMBER.fullmatch(safe) is not None
    return RawCell(safe, quoted=reads_as_other)


def _is_guarded(text: str) -> bool:
    return text.startswith("'") and text.lstrip("'").startswith(FORMULA_STARTS)


def _number(text: str, is_whole: bool) -> Cell:
    if is_whole:
        # "-0" is no int's repr.
        return int(text) if text != "-0" else text
    number = float(text)
    return number if math.isfinite(number) else text


def _written(cell: RawCell) -> str:
    if cell.quoted or any(character in cell.text for character in ',"\r\n'):
        return '"' + cell.text.replace('"', '""') + '"'
    return cell.text
