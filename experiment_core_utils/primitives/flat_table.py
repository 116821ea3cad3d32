"""In: nested results, one dict a row; out: one flat table, nothing lost, and its CSV text.

Keys are joined by dots, places in lists are numbers (`gpu_names.0`). An empty dict or list is the text {} or [].
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiment_core_utils.primitives.csv_cells import Cell, RawCell, cell_value, csv_text, parse_csv, raw_cell
from experiment_core_utils.primitives.errors import ResultsError

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
        ResultsError: an experiment that is no dict, or that says another name itself.
    """
    rows: list[Mapping[str, Any]] = []
    for name, content in experiments.items():
        if not isinstance(content, Mapping):
            raise ResultsError(f"{name} holds no experiment: a dict was expected, found {type(content).__name__}")
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
                        f"the column {name} would hold both {list(places[name])} and {list(place)}; rename one of them"
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
        ResultsError: no row or no column, a value that no cell can hold, or two places that share a column.
    """
    flat = flat_rows(rows)
    columns = published_order(list(dict.fromkeys(name for row in flat for name in row)))
    if not columns:
        raise ResultsError("there is nothing to write: the results hold no experiment with a value")
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
            raise ResultsError(f"{name}, row {number} has {len(row)} cells, the header has {len(header)}; it is torn")
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
