"""CSV cells that a spreadsheet does not run, and flat tables of nested results.

A number is written as Python's repr, None as nothing, booleans as true and false. Text that reads like one of these is
quoted ("12", "true", ""); text that a spreadsheet would run as a formula gets an apostrophe in front. Rows end with a
line feed; the file is UTF-8.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiment_core_utils.primitives.errors import ResultsError, package_of_extra
from experiment_core_utils.primitives.files import read_regular_file
from experiment_core_utils.primitives.texts import counted

Cell = str | int | float | bool | None
# The full-width ones are taken for the others where East Asian text is typed.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_BOOLEANS = {"true": True, "false": False}
_CELL = re.compile(r'(?:"([^"]*(?:""[^"]*)*)"|([^",\r\n][^,\r\n]*)?)(,|\r\n|\r|\n|\Z)')


class RawCell(NamedTuple):
    """A cell as it is in the file: its text without the quotes, and whether there were quotes."""

    text: str
    quoted: bool


def raw_cell(value: Cell, where: str) -> RawCell:
    """The cell that contains `value`; `where` is what it is called, for the message.

    Raises:
        ResultsError: a number that is not finite, or text with a NUL or half a surrogate pair.
    """
    if value is None:
        return RawCell("", quoted=False)
    if isinstance(value, bool):
        return RawCell("true" if value else "false", quoted=False)
    if isinstance(value, str):
        if "\0" in value:
            raise ResultsError(f"{where} contains a NUL character, which no CSV file can; remove it")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ResultsError(f"{where} contains half a surrogate pair, which UTF-8 cannot; repair the text")
        safe = spreadsheet_safe(value)
        reads_as_other = safe == "" or safe in _BOOLEANS or _NUMBER.fullmatch(safe) is not None
        return RawCell(safe, quoted=reads_as_other)
    if not math.isfinite(value):
        raise ResultsError(f"{where} is {value}: a table contains finite numbers, or nothing")
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
    return text[1:] if text.startswith("'") and text.lstrip("'").startswith(FORMULA_STARTS) else text


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
            raise ResultsError(f"{name}, line {line}: the quotes of a cell do not fit; it is torn or not a CSV file")
        quoted, bare, end = found.groups()
        row.append(RawCell(bare or "", quoted=False) if quoted is None else RawCell(quoted.replace('""', '"'), True))
        place = found.end()
        if end != ",":
            rows.append(row)
            row = []
    return rows


def _number(text: str, is_whole: bool) -> Cell:
    if is_whole:
        # "-0" is not an int's repr.
        return int(text) if text != "-0" else text
    number = float(text)
    return number if math.isfinite(number) else text


def _written(cell: RawCell) -> str:
    if cell.quoted or any(character in cell.text for character in ',"\r\n'):
        return '"' + cell.text.replace('"', '""') + '"'
    return cell.text


# Column of a row's name.
NAME_COLUMN = "experiment"
# What a reader looks for first: whole column names, or the last part of one (outside lists).
FIRST_COLUMNS = (
    NAME_COLUMN,
    "experiment_id",
    "cycle_id",
    "timestamp",
    "model_name",
    "precision",
    "quantization.quantization",
    "batch_size",
    "num_processes",
    "num_prompts",
    "total_input_tokens",
    "total_output_tokens",
    "total_tokens",
    "total_time_s",
    "tokens_per_second",
    "queries_per_second",
    "latency_per_query_s",
    "avg_input_tokens_per_prompt",
    "avg_output_tokens_per_prompt",
    "flops",
    "total_energy_kwh",
    "avg_energy_per_process_kwh",
    "cpu_energy_kwh",
    "gpu_energy_kwh",
    "ram_energy_kwh",
    "total_emissions_kg_co2",
    "duration_seconds",
)
_PLACE_IN_LIST = re.compile(r"(?:(?<=\.)|^)([0-9]+)(?=\.|$)")
Place = tuple[str | int, ...]


def named_rows(experiments: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One row an experiment, its name in the column `experiment`.

    Raises:
        ResultsError: an experiment that is not a dict, or that says another name itself.
    """
    rows: list[Mapping[str, Any]] = []
    for name, content in experiments.items():
        if not isinstance(content, Mapping):
            raise ResultsError(f"{name} contains no experiment: a dict was expected, found {type(content).__name__}")
        if content.get(NAME_COLUMN, name) != name:
            raise ResultsError(f"{name} has a key {NAME_COLUMN!r} that says {content[NAME_COLUMN]!r}; rename that key")
        rows.append({NAME_COLUMN: name, **content})
    return rows


def flat_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Cell]]:
    """Each row by column name.

    Raises:
        ResultsError: two different places of the results would share a column; names both.
    """
    places: dict[str, Place] = {}
    flat = []
    for row in rows:
        cells: dict[str, Cell] = {}
        for key, value in row.items():
            for place, cell in _leaves((key,), value):
                name = ".".join(map(str, place))
                if places.setdefault(name, place) != place:
                    raise ResultsError(
                        f"the column {name} would contain both {list(places[name])} and {list(place)}; rename one"
                    )
                cells[name] = cell
        flat.append(cells)
    return flat


def ordered_columns(names: Sequence[str], first: Sequence[str]) -> list[str]:
    """`names` with those of `first` in front, in its order; the others alphabetically, places in lists by number."""
    given = set(names)
    front = [name for name in dict.fromkeys(first) if name in given]
    return [*front, *sorted(given.difference(front), key=_alphabetical)]


def published_order(names: Sequence[str]) -> list[str]:
    """The columns of a results table: what a reader looks for first, then the others alphabetically."""
    return ordered_columns(names, [name for wanted in FIRST_COLUMNS for name in _ending_in(wanted, names)])


def reordered_columns(names: Sequence[str], first: Sequence[str]) -> list[str]:
    """`names` with those that `first` names in front, in its order.

    A name of `first` is a whole column name or, where there is none, the last part of dotted ones (`model_name` for
    `experiment_variables.model_name`). The other columns of a table of experiments keep the order that the project
    writes them in (`published_order`); those of any other table are sorted alphabetically.
    """
    front = [name for wanted in first for name in ([wanted] if wanted in names else _ending_in(wanted, names))]
    return ordered_columns(names, [*front, *(published_order(names) if NAME_COLUMN in names else ())])


def _ending_in(wanted: str, names: Sequence[str]) -> list[str]:
    """The names that are `wanted` or have it as their last part, alphabetically; places in lists are passed over."""
    found = [name for name in names if f".{name}".endswith(f".{wanted}") and not _PLACE_IN_LIST.search(name)]
    return sorted(found, key=_alphabetical)


def table_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The CSV of nested rows in the published order of columns; a row without a value has an empty cell there.

    Raises:
        ResultsError: no row or no column, a value that no cell can contain, or two places that share a column.
    """
    flat = flat_rows(rows)
    columns = published_order(list(dict.fromkeys(name for row in flat for name in row)))
    if not columns:
        raise ResultsError("there is nothing to write: the results contain no experiment with a value")
    header = [raw_cell(name, f"the column name {name!r}") for name in columns]
    return csv_text([header, *([raw_cell(row.get(name), name) for name in columns] for row in flat)])


def read_table(text: str, name: str) -> list[dict[str, Cell]]:
    """The rows that `table_text` wrote, by column: text, numbers, booleans and None as they were.

    Args:
        name: the file's, for the message.

    Raises:
        ResultsError: torn, ragged, without a header, or two columns of one name.
    """
    header, *rows = checked_rows(text, name)
    columns = [str(cell_value(cell._replace(quoted=True))) for cell in header]
    return [dict(zip(columns, map(cell_value, row), strict=True)) for row in rows]


def read_table_file(path: Path) -> list[dict[str, Cell]]:
    """The rows of a file, as `read_table` gives them; raises ResultsError also where it cannot be read."""
    return read_table(csv_content(path), str(path))


def csv_content(path: Path) -> str:
    """The text of a CSV file; raises ResultsError where it is not a file that can be read, or not UTF-8."""
    try:
        # A spreadsheet may have put a byte order mark in front; line ends within cells are kept.
        return read_regular_file(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path} cannot be read ({error}); give a CSV file in UTF-8") from error


def checked_rows(text: str, name: str) -> list[list[RawCell]]:
    """Header and rows as raw cells, all of one length, no column name twice; raises ResultsError."""
    header, *rows = parse_csv(text, name) or [[]]
    if not header:
        raise ResultsError(f"{name} is empty; it has no header")
    names = [cell.text for cell in header]
    twice = sorted({each for each in names if names.count(each) > 1})
    if twice:
        raise ResultsError(f"{name} has the column {twice[0]!r} more than once; rename one of them")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            cells = counted(len(row), "cell")
            raise ResultsError(f"{name}, row {number} has {cells}, the header has {len(header)}; it is torn")
    return [header, *rows]


def _leaves(place: Place, value: Any) -> Iterator[tuple[Place, Cell]]:
    if isinstance(value, Mapping):
        parts: list[tuple[str | int, Any]] = list(value.items())
    elif isinstance(value, list):
        parts = list(enumerate(value))
    else:
        yield place, value
        return
    if not parts:
        yield place, "{}" if isinstance(value, Mapping) else "[]"
    for key, part in parts:
        yield from _leaves((*place, key), part)


def _alphabetical(name: str) -> tuple[list[str | int], str]:
    """Text and numbers alternate, so that no number is compared with text."""
    parts: list[str | int] = list(_PLACE_IN_LIST.split(name))
    parts[1::2] = map(int, parts[1::2])
    return parts, name


def check_table_format(table_format: str) -> None:
    """Raises ConfigurationError where the package that writes Parquet files is not installed."""
    if table_format == "parquet":
        with package_of_extra("pyarrow", "datasets"):
            import pyarrow  # noqa: F401


def split_intervals(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as cells of a row: each `..._ci95` as two, `..._ci95_low` and `..._ci95_high`."""
    cells: dict[str, Any] = {}
    for name, value in fields.items():
        if name.endswith("_ci95"):
            cells[f"{name}_low"], cells[f"{name}_high"] = value or (None, None)
        else:
            cells[name] = value
    return cells
