"""The rows of a file, a folder or a dataset of the hub, by column: JSON, CSV and TSV, Parquet, saved datasets, folders
of pictures with metadata.
"""

import codecs
import csv
import hashlib
import io
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiment_core_utils.config.parts import DATA_FILE_ENDINGS
from experiment_core_utils.primitives.errors import ConfigurationError, package_of_extra
from experiment_core_utils.primitives.files import parse_json, read_given, refuse_unreadable
from experiment_core_utils.primitives.texts import counted, did_you_mean, shown
from experiment_core_utils.tasks.datasets.files.columns import COLUMNS, is_empty, ours_near
from experiment_core_utils.tasks.datasets.files.picture_cells import looks_like_picture
from experiment_core_utils.tasks.datasets.tables import Row

if TYPE_CHECKING:
    from experiment_core_utils.tasks.datasets.hub_tables import HubTable

_FORMS = "a .jsonl, .json, .csv, .tsv or .parquet file"
# What spreadsheets and others write in place of commas, and its name.
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars", "^": "carets", ":": "colons"}
# A file of another encoding shows that within these.
_INSPECTED_BYTES = 1000
# Endings of files that have to become another file first, and how.
_CONVERTED = {
    **dict.fromkeys((".xlsx", ".xls", ".xlsm", ".ods", ".numbers"), "a spreadsheet; save it as CSV UTF-8 with commas"),
    **dict.fromkeys((".gz", ".zip", ".bz2", ".xz", ".zst", ".tar", ".tgz", ".7z"), "an archive; unpack it"),
    **dict.fromkeys((".arrow", ".feather", ".pkl", ".pickle", ".npy"), "no table of text; save it as Parquet"),
}
# Lists of rows within an object of JSON are called so.
_LISTS = ("data", "rows", "questions", "samples", "examples", "items", "annotations", "test", "validation", "train")
_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
# What a folder of pictures calls the paths in its metadata, as the `datasets` library reads it.
_OF_METADATA = ("file_name", "file_names", "image_file_name", "image_file_names")
# Files of `save_to_disk`, with splits and without.
_SAVED = ("dataset_dict.json", "state.json")
_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")
# Of tables on disk, so many rows are looked at before any is requested.
_INSPECTED_ROWS = 20


@dataclass(frozen=True)
class FileRows:
    """The rows of what `--data_file` names."""

    name: str  #: what results call the data
    columns: tuple[str, ...]  #: all that any row has
    where: Sequence[str]  #: names each row in messages: `my.jsonl line 3`
    #: the rows with these columns only, or of each the reason why it is none; pictures are not decoded
    select: Callable[[Collection[str]], Sequence[Row | str]]
    row: Callable[[int], Row]  #: the row at an index with all columns
    filled: Callable[[str], Sequence[bool]]  #: of each row, whether it has something in a column
    source: Mapping[str, str]  #: for provenance
    folders: tuple[Path, ...]  #: where pictures lie
    split: str = "all"
    mapping: Mapping[str, str] = field(default_factory=dict)  #: columns that the form itself calls otherwise
    is_in_memory: bool = True

    def inspected(self) -> Iterator[Row]:
        """The rows in memory, or the first ones of a table on disk."""
        if self.is_in_memory:
            return (row for row in self.select(self.columns) if not isinstance(row, str))
        return (self.row(index) for index in range(min(len(self.where), _INSPECTED_ROWS)))


def read_rows(path: Path, cache_dir: Path | None, split: str | None = None, revision: str | None = None) -> FileRows:
    """The rows of a file by its ending, of a folder by what is in it, or of a dataset of the hub, OWNER/NAME or
    OWNER/NAME:CONFIG, where nothing here is called so.

    Raises:
        ConfigurationError: it is not there, cannot be read, or is in another form, which the message names.
    """
    hub_id = _HUB_ID.fullmatch(str(path))
    if path.is_dir():
        if revision is not None:
            raise ConfigurationError(f"--data_file {path} is a folder: --dataset_revision cannot act; drop it")
        return _folder_rows(path, cache_dir, split)
    if not path.exists() and hub_id is not None and path.suffix.lower() not in (*DATA_FILE_ENDINGS, *_CONVERTED):
        return _hub_rows(path, hub_id[1], hub_id[2], cache_dir, split, revision)
    return _file_rows(path, cache_dir)


def _file_rows(path: Path, cache_dir: Path | None) -> FileRows:
    refuse_unreadable(path, "--data_file")
    ending = path.suffix.lower()
    if ending in _CONVERTED:
        raise ConfigurationError(f"--data_file {path} is {_CONVERTED[ending]}, and give that")
    if ending not in DATA_FILE_ENDINGS:
        raise ConfigurationError(f"--data_file {path} is read by its ending: give {_FORMS}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # Not its folder: a copy elsewhere is the same data.
    source = {"read_from": "data file", "file": path.name, "sha256": digest}
    if ending == ".parquet":
        with _datasets_library():
            from experiment_core_utils.tasks.datasets.hub_tables import read_parquet
        try:
            table = read_parquet(path, cache_dir)
        except ConfigurationError as error:
            raise ConfigurationError(f"--data_file {path} cannot be read as Parquet: {error}") from error
        return replace(_of_table(table, path.name, (path.parent,)), name=path.stem, source=source)
    text = _text_of(path)
    read = {".jsonl": _jsonl_rows, ".json": _json_rows}.get(ending, _separated_rows)
    unit, found = read(text, path)
    return _in_memory(found, path, unit, source)


def _text_of(path: Path) -> str:
    data = read_given(path, "--data_file")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data[:_INSPECTED_BYTES]:
        raise ConfigurationError(
            f"--data_file {path} has zero bytes or the mark of UTF-16, and is read as UTF-8; save it as UTF-8"
        )
    if data.startswith((b"PK\x03\x04", b"\x1f\x8b", b"\xd0\xcf\x11\xe0")):
        raise ConfigurationError(
            f"--data_file {path} is a spreadsheet or an archive by its content, not text; save it as CSV UTF-8 with "
            "commas, or unpack it"
        )
    # What is no UTF-8 is reported with its row.
    return data.decode("utf-8-sig", errors="surrogateescape")


Found = Sequence[tuple[int, Row | str]]


def _in_memory(found: Found, path: Path, unit: str, source: Mapping[str, str]) -> FileRows:
    rows = [row for _, row in found]
    names = tuple(dict.fromkeys(name for row in rows if not isinstance(row, str) for name in row))

    def select(columns: Collection[str]) -> Sequence[Row | str]:
        kept = frozenset(columns)
        if kept.issuperset(names):
            return rows
        return [row if isinstance(row, str) else {name: row[name] for name in row if name in kept} for row in rows]

    def row_at(index: int) -> Row:
        row = rows[index]
        return {} if isinstance(row, str) else row

    def filled(name: str) -> Sequence[bool]:
        return [not isinstance(row, str) and not is_empty(row.get(name)) for row in rows]

    where = [f"{path.name} {unit} {at}" for at, _ in found]
    return FileRows(path.stem, names, where, select, row_at, filled, source, (path.parent,))


# --- JSON ---------------------------------------------------------------------------------------------------------


def _jsonl_rows(text: str, path: Path) -> tuple[str, Found]:
    if text.lstrip().startswith("[") and _is_list_of_objects(text):
        raise ConfigurationError(f"--data_file {path} is one list of JSON, not an object in each line; name it .json")
    return "line", list(_lines_of_json(text))


def _lines_of_json(text: str) -> Iterator[tuple[int, Row | str]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, _object_or_reason(parse_json(line, "it"))
        except ConfigurationError as error:
            yield number, str(error)


def _object_or_reason(content: Any) -> Row | str:
    return content if isinstance(content, dict) else f"it is {shown(content)}, not an object"


def _is_list_of_objects(text: str) -> bool:
    try:
        content = parse_json(text, "it")
    except ConfigurationError:
        return False
    return isinstance(content, list) and any(isinstance(each, dict) for each in content)


def _json_rows(text: str, path: Path) -> tuple[str, Found]:
    """A list of objects, one such list within an object, or an object in each line, as many sets are published."""
    first, _, rest = text.strip().partition("\n")
    if first.endswith("}") and rest.strip():
        return _jsonl_rows(text, path)
    content = parse_json(text, f"--data_file {path}", "give a list of objects, or one object in each line")
    if isinstance(content, dict):
        content = _only_list_in(content, path)
    if not isinstance(content, list):
        raise ConfigurationError(f"--data_file {path} is {shown(content)}; give a list of objects")
    return "row", [(number, _object_or_reason(each)) for number, each in enumerate(content, start=1)]


def _only_list_in(content: Mapping[str, Any], path: Path) -> Any:
    lists = [
        name for name, each in content.items() if isinstance(each, list) and any(isinstance(x, dict) for x in each)
    ]
    named = lists if len(lists) < 2 else [name for name in lists if name in _LISTS]
    if len(named) == 1:
        return content[named[0]]
    if len(lists) > 1:
        raise ConfigurationError(
            f"--data_file {path} has several lists of objects ({shown(', '.join(lists))}); save the one with the "
            "questions alone"
        )
    if any(ours_near(name) for name in content) and all(isinstance(each, list | dict) for each in content.values()):
        raise ConfigurationError(
            f"--data_file {path} is written by column ({shown(', '.join(content))}), not by row; with pandas write it "
            'by to_json(..., orient="records")'
        )
    raise ConfigurationError(
        f"--data_file {path} is an object without a list of objects (it has {shown(', '.join(content))}); give a list "
        "of objects"
    )


# --- CSV and TSV --------------------------------------------------------------------------------------------------


def _separated_rows(text: str, path: Path) -> tuple[str, Found]:
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    first = text.lstrip(" \r\n").split("\n")[0].strip("\r\n ")
    if re.fullmatch(r"\"?sep=.?\"?,*", first, re.IGNORECASE):
        raise ConfigurationError(
            f"--data_file {path} begins with the line {shown(first)}, which is for Excel alone; remove that line"
        )
    _check_separator(first, separator, path)
    with _cells_of_any_size():
        return "line", list(_rows_of_cells(text, separator, path))


@contextmanager
def _cells_of_any_size() -> Iterator[None]:
    """The module takes cells of 131,072 characters, and a picture in base64 has more."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _rows_of_cells(text: str, separator: str, path: Path) -> Iterator[tuple[int, Row | str]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=separator)
    header: list[str] = []
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, f"it is not CSV ({error})"
            continue
        if not header:
            header = [name.strip() for name in cells]
            _check_header(header, line, path)
        elif len(cells) == len(header):
            yield line, dict(zip(header, cells, strict=True))
        elif cells:
            yield line, f"it has {counted(len(cells), 'cell')}, and the first line has {len(header)}"


def _check_header(header: Sequence[str], line: int, path: Path) -> None:
    blank = [number for number, name in enumerate(header, start=1) if not name]
    if header and (len(blank) > 1 or len(blank) == len(header)):
        raise ConfigurationError(
            f"--data_file {path} has no name for columns {', '.join(map(str, blank))} in line {line}; write the names, "
            f"such as {', '.join(COLUMNS[:3])}, into it"
        )
    if any(map(looks_like_picture, header)):
        raise ConfigurationError(
            f"--data_file {path} begins with a row ({shown(', '.join(header))}), not with the names of its columns; "
            f"write these, such as {', '.join(COLUMNS[:3])}, above it"
        )
    if len(set(header)) < len(header):
        raise ConfigurationError(f"--data_file {path} has two columns of one name in line {line}; rename one")


def _check_separator(header: str, separator: str, path: Path) -> None:
    """Raises ConfigurationError for a first line whose columns something else than `separator` separates: by the names
    that we know, and among other names by there being one column, or more of common marks than of `separator`.
    """

    def num_columns(mark: str) -> int:
        # A letter alone is near to many a name.
        names = [name.strip(" \"'") for name in header.split(mark)]
        return sum(len(name) > 1 and ours_near(name) is not None for name in names)

    def rank(mark: str) -> tuple[int, int]:
        is_common = separator not in header or mark in (";", "\t", "|", separator)
        return num_columns(mark), header.count(mark) if is_common else 0

    other = max((mark for mark in _SEPARATORS if mark != separator), key=rank)
    is_better = num_columns(other) > num_columns(separator) if rank(separator)[0] else rank(other) > rank(separator)
    if other in header and is_better:
        expected = _SEPARATORS[separator]
        raise ConfigurationError(
            f"--data_file {path} separates its columns by {_SEPARATORS[other]} ({shown(header)}), and is read with "
            f"{expected}; save it with {expected}"
        )


# --- tables of the `datasets` library -------------------------------------------------------------------------------


def _datasets_library() -> Any:
    """The library takes seconds to import, and no other form needs it."""
    return package_of_extra("datasets", "datasets")


def _of_table(table: "HubTable", name: str, folders: tuple[Path, ...]) -> FileRows:
    def named(row: Row) -> Row:
        numbers = {name: row[name] for name in table.class_names if row.get(name) is not None and row[name] >= 0}
        return {**row, **{name: table.class_names[name][number] for name, number in numbers.items()}}

    def select(columns: Collection[str]) -> Sequence[Row | str]:
        return [named(row) for row in table.select(sorted(table.columns & set(columns)))]

    where = [f"{name} row {number}" for number in range(1, len(table) + 1)]
    columns = tuple(sorted(table.columns))
    source = table.source
    return FileRows(name, columns, where, select, table.row, table.has_picture, source, folders, is_in_memory=False)


def _folder_rows(folder: Path, cache_dir: Path | None, split: str | None) -> FileRows:
    name = folder.resolve().name
    if (metadata := _metadata_in(folder, split)) is not None:
        rows = _file_rows(metadata, cache_dir)
        named = [column for column in _OF_METADATA if column in rows.columns and "image" not in rows.columns]
        return replace(rows, name=name, split=split or "all", mapping={"image": named[0]} if named else {})
    splits = _splits_in(folder)
    if splits and split not in splits:
        raise ConfigurationError(
            f"--data_file {folder} has the splits {', '.join(splits)}"
            f"{'' if split is None else f' and not {split}{did_you_mean(split, splits)}'}; give one by --split"
        )
    if any((folder / state).is_file() for state in _SAVED):
        with _datasets_library():
            from experiment_core_utils.tasks.datasets.hub_tables import read_saved
        table = read_saved(folder, split)
        if split is not None and not splits and table.source["split"] != split:
            raise ConfigurationError(f"--data_file {folder} was saved without splits; drop --split {split}")
    else:
        table = _table_of_split(folder, split, cache_dir)
    return replace(_of_table(table, name, (folder,)), split=split or "all")


def _metadata_in(folder: Path, split: str | None) -> Path | None:
    """The metadata of a folder of pictures, or of its folder of a split; raises ConfigurationError for several."""
    of_split = folder if split is None else folder / split
    files = [path for path in (of_split / name for name in _METADATA) if path.is_file()]
    if len(files) > 1:
        raise ConfigurationError(f"--data_file {folder} has {', '.join(path.name for path in files)}; keep one")
    return files[0] if files else None


def _splits_in(folder: Path) -> list[str]:
    """The splits that a folder states: of a saved dataset, or folders of pictures with metadata."""
    if (folder / _SAVED[0]).is_file():
        stated = parse_json(read_given(folder / _SAVED[0]), str(folder / _SAVED[0]))
        return list(stated.get("splits", ())) if isinstance(stated, dict) else []
    return sorted({path.parent.name for name in _METADATA for path in folder.glob(f"*/{name}")})


def _table_of_split(folder: Path, split: str | None, cache_dir: Path | None) -> "HubTable":
    if not any(next(folder.rglob(f"*.{kind}"), None) is not None for kind in ("parquet", "arrow")):
        raise ConfigurationError(
            f"--data_file {folder} is a folder, not a regular file, and neither one of save_to_disk nor one with "
            f"metadata.jsonl or metadata.csv beside its pictures; give one of these, or {_FORMS}"
        )
    if split is None:
        raise ConfigurationError(f"--data_file {folder} has files of several splits, or of one; give it by --split")
    with _datasets_library():
        from experiment_core_utils.tasks.datasets.hub_tables import HubDataset, read_folder
    table = read_folder(folder, HubDataset(folder.name, None, ""), split, cache_dir)
    if table is None:
        raise ConfigurationError(f"--data_file {folder} has no files of split {split}; give another --split")
    return table


def _hub_rows(
    path: Path, hub_id: str, config: str | None, cache_dir: Path | None, split: str | None, revision: str | None
) -> FileRows:
    there_is_none = f"--data_file {path}: there is no such file or folder, and as a dataset of the hub it"
    if split is None:
        raise ConfigurationError(f"{there_is_none} needs --split, such as --split validation")
    with _datasets_library():
        from experiment_core_utils.tasks.datasets.hub_tables import HubDataset, cache_folders, read_hub
    try:
        table = read_hub(HubDataset(hub_id, config, revision or "main"), split, cache_dir)
    except ConfigurationError as error:
        raise type(error)(f"{there_is_none} cannot be read ({error})") from error
    return replace(_of_table(table, path.name, cache_folders(cache_dir)), split=split)
