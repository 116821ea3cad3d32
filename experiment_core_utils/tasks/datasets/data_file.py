"""A task made from your own JSONL, CSV or Parquet file; see docs/datasets.md."""

import codecs
import csv
import hashlib
import io
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiment_core_utils.primitives.errors import (
    LIBRARY_ERRORS,
    ConfigurationError,
    SampleError,
    first_line,
    package_of_extra,
)
from experiment_core_utils.primitives.files import parse_json, read_given, refuse_unreadable
from experiment_core_utils.primitives.texts import is_text, shown
from experiment_core_utils.tasks.datasets.pictures import PictureFolders
from experiment_core_utils.tasks.datasets.questions import (
    UNTYPED,
    QuestionRow,
    RowTask,
    check_template,
    check_texts,
    literal_list,
    picture_file,
)
from experiment_core_utils.tasks.datasets.tables import Row
from experiment_core_utils.tasks.interface import Sample

COLUMNS = ("image", "question", "answer", "answers", "options", "type")
# What spreadsheets write in place of commas, and its name.
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
# A file of another encoding shows that within these.
_INSPECTED_BYTES = 1000
# Molmo's names of short answers and of multiple choice.
OPEN_STYLE, CHOICE_STYLE = "vqa2", "a_okvqa_mc"
OPEN_METRIC, CHOICE_METRIC = "em_lenient", "mc"


@dataclass(frozen=True)
class FileRows:
    """What a file contains."""

    rows: Sequence[Row | str]  #: each a row by column, or the reason why it is none
    lines: Sequence[int]  #: where each begins, counted from 1: its line, or in Parquet its row
    #: the `image` of the row at an index; Parquet may contain pictures that are too many to be kept
    image: Callable[[int], Any]


class DataFileTask(RowTask):
    """The rows of a file. Implements `Task`.

    Args:
        path: a .jsonl, .csv or .parquet file.
        data_dir: what the paths of pictures are relative to, and where they have to lie; None: the file's folder.
        cache_dir: where the `datasets` library keeps what it converts of a Parquet file; None: its own place.
        prompt_template: instead of Molmo's; its fields are {question}, {style} and {options}.

    Attributes:
        metric: `mc` where every row has options, `em_lenient` where none has; "" where only some have.

    Raises:
        ConfigurationError: no such file, no row that can be used, or a template that cannot be filled.
    """

    split = "all"
    style = f"{OPEN_STYLE}, with options {CHOICE_STYLE}"
    max_new_tokens = 64

    def __init__(
        self,
        path: Path,
        *,
        data_dir: Path | None = None,
        cache_dir: Path | None = None,
        prompt_template: str | None = None,
    ) -> None:
        self.name = re.sub(r"[^A-Za-z0-9]+", "_", path.stem).strip("_")[:60] or "data_file"
        folder = path.parent if data_dir is None else data_dir
        if not folder.is_dir():
            raise ConfigurationError(f"--data_dir {folder} is not a folder; give the folder of the pictures")
        self._pictures = PictureFolders((folder,), (folder,), exactly=True)
        self._file = read_rows(path, cache_dir)
        self._where = [f"{path.name} {'row' if path.suffix == '.parquet' else 'line'} {at}" for at in self._file.lines]
        self._questions = [
            _question_or_reason(row, where) for row, where in zip(self._file.rows, self._where, strict=True)
        ]
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        # Not its folder: a copy elsewhere is the same data.
        self.source: Mapping[str, str] = {"read_from": "data file", "file": path.name, "sha256": digest}
        self.first_usable = self._first_usable(path)
        has_options = {bool(question.options) for question in self._questions if isinstance(question, QuestionRow)}
        self.metric = "" if len(has_options) > 1 else CHOICE_METRIC if True in has_options else OPEN_METRIC
        self._template = prompt_template
        if prompt_template is not None:
            check_template(prompt_template, ("question", "options") if True in has_options else ("question",))

    def __len__(self) -> int:
        return len(self._questions)

    def __getitem__(self, index: int) -> Sample:
        """See `Task`; the picture is read and decoded here and not before."""
        try:
            question = self.row_at(index)
            opened = None if question.picture is None else self._pictures.opened(question.picture, question.image_id)
        except SampleError as error:
            # Of its own class: a sample that is out of time says so.
            raise type(error)(f"{self._where[index]}: {error}") from error
        return question.sample(index, opened, self.question_type(index))

    def faults(self, indices: Iterable[int]) -> Iterator[str]:
        """Of each of these rows that cannot be used, where it is and why; only the headers of pictures are read."""
        for index in indices:
            try:
                question = self.row_at(index)
                if question.picture is not None:
                    self._pictures.check(question.picture, question.image_id)
            except SampleError as error:
                yield f"{self._where[index]}: {error}"
            except LIBRARY_ERRORS as error:
                yield f"{self._where[index]}: it cannot be read ({type(error).__name__}: {shown(first_line(error))})"

    def row_at(self, index: int) -> QuestionRow:
        """See `RowTask`."""
        question = self._questions[self._checked(index)]
        if isinstance(question, str):
            raise SampleError(question)
        picture = _picture(self._file.image(index))
        return replace(question, image_id=_name_of(picture) or question.image_id, picture=picture)

    def question_type(self, index: int) -> str:
        """See `Task`; a row that cannot be read or has no type is of type `all`."""
        row = self._file.rows[self._checked(index)]
        found = None if isinstance(row, str) else _text(row.get("type"))
        return found if is_text(found) and found else UNTYPED

    def style_of(self, sample: Sample) -> str:
        """See `RowTask`."""
        return CHOICE_STYLE if sample.options else OPEN_STYLE

    def _first_usable(self, path: Path) -> Sample:
        reason = ""
        for index in range(len(self)):
            try:
                return self[index]
            except SampleError as error:
                reason = reason or f": {error}"
        raise ConfigurationError(
            f"--data_file {path} has {len(self)} rows and none can be used{reason}; see docs/datasets.md for its form"
        )


def read_rows(path: Path, cache_dir: Path | None) -> FileRows:
    """The rows of a file by its ending; raises ConfigurationError where it cannot be read."""
    refuse_unreadable(path, "--data_file")
    if path.suffix == ".parquet":
        return _parquet_rows(path, cache_dir)
    if path.suffix not in (".jsonl", ".csv"):
        raise ConfigurationError(f"--data_file {path} is read by its ending: give a .jsonl, .csv or .parquet file")
    data = read_given(path, "--data_file")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data[:_INSPECTED_BYTES]:
        raise ConfigurationError(
            f"--data_file {path} has zero bytes or the mark of UTF-16, and is read as UTF-8; save it as UTF-8"
        )
    # What is no UTF-8 is reported with its row.
    text = data.decode("utf-8-sig", errors="surrogateescape")
    found = list(_jsonl_rows(text) if path.suffix == ".jsonl" else _csv_rows(text, path))
    images = [None if isinstance(row, str) else row.get("image") for _, row in found]
    return FileRows([row for _, row in found], [line for line, _ in found], images.__getitem__)


def _jsonl_rows(text: str) -> Iterator[tuple[int, Row | str]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            content = parse_json(line, "it")
            yield number, content if isinstance(content, dict) else f"it is {shown(line)}, not an object"
        except ConfigurationError as error:
            yield number, str(error)


def _csv_rows(text: str, path: Path) -> Iterator[tuple[int, Row | str]]:
    _check_separator(text.lstrip().split("\n")[0].strip(), path)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
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
            if len(set(header)) < len(header):
                raise ConfigurationError(f"--data_file {path} has two columns of one name in line {line}; rename one")
        elif len(cells) == len(header):
            yield line, dict(zip(header, cells, strict=True))
        elif cells:
            yield line, f"it has {len(cells)} cells, and the first line has {len(header)}"


def _check_separator(header: str, path: Path) -> None:
    """Raises ConfigurationError for a first line whose columns something else than commas separates."""

    def has_columns(mark: str) -> bool:
        return bool({each.strip(" \"'") for each in header.split(mark)} & set(COLUMNS))

    other = next((name for mark, name in _OTHER_SEPARATORS.items() if mark in header and has_columns(mark)), None)
    if other is not None and not has_columns(","):
        raise ConfigurationError(
            f"--data_file {path} separates its columns by {other} ({shown(header)}), and is read with commas; save it "
            "with commas"
        )


def _parquet_rows(path: Path, cache_dir: Path | None) -> FileRows:
    # The library behind it takes seconds to import, and no other form needs it.
    with package_of_extra("datasets", "datasets"):
        from experiment_core_utils.tasks.datasets.hub_tables import read_parquet
    try:
        table = read_parquet(path, cache_dir)
    except ConfigurationError as error:
        raise ConfigurationError(f"--data_file {path} cannot be read as Parquet: {error}") from error
    texts = table.select(sorted(table.columns - {"image"}))
    image = (lambda index: table.row(index)["image"]) if "image" in table.columns else lambda index: None
    return FileRows(texts, range(1, len(texts) + 1), image)


def _question_or_reason(row: Row | str, where: str) -> QuestionRow | str:
    try:
        return row if isinstance(row, str) else _question(row, where)
    except SampleError as error:
        return str(error)


def _question(row: Row, where: str) -> QuestionRow:
    """The row without its picture; raises SampleError for one that is no question."""
    given = {name: row[name] for name in COLUMNS if row.get(name) not in (None, "", [])}
    for name, value in given.items():
        odd = [ord(each) - 0xDC00 for each in value if "\udc80" <= each <= "\udcff"] if isinstance(value, str) else []
        if odd:
            raise SampleError(
                f"its {name} has a byte that is not UTF-8 (0x{odd[0]:02x}), as of Windows-1252 or Latin-1; save the "
                "file as UTF-8"
            )
    if "question" not in given:
        raise SampleError(f"it has no question; its columns are {shown(', '.join(row))}")
    if len(given.keys() & {"answer", "answers"}) != 1:
        raise SampleError(
            f"it has {'both answer and' if 'answer' in given else 'neither answer nor'} answers; give one of them"
        )
    if isinstance(given.get("answer"), list):
        raise SampleError("its answer is a list; call the column answers")
    answers = (_text(given["answer"]),) if "answer" in given else _texts(given["answers"], "answers")
    if not answers:
        raise SampleError("its answers are an empty list; give at least one")
    options, index = _texts(given.get("options", []), "options"), None
    if options:
        index = _right_option(options, answers)
        answers = (options[index],)
    others = {name: value for name, value in row.items() if name not in COLUMNS and _is_metadata(value)}
    question = QuestionRow(where, where, given["question"], answers, None, others | {"row": where}, options, index)
    check_texts(question)
    return question


def _texts(value: Any, what: str) -> tuple[Any, ...]:
    """A list, also one written as text in JSON or as Python shows it (a cell of a CSV file); one answer is a list."""
    if isinstance(value, str):
        if not value.lstrip().startswith("["):
            if what == "options":
                raise SampleError(f"its options are {shown(repr(value))}, not a list")
            return (value,)
        try:
            value = parse_json(value, what)
        except ConfigurationError:
            value = literal_list(value.strip(), what)
    if not isinstance(value, list):
        raise SampleError(f"its {what} are {shown(repr(value))}, not a list")
    return tuple(map(_text, value))


def _text(value: Any) -> Any:
    """A whole number as it is written; anything else as it is."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _right_option(options: Sequence[Any], answers: Sequence[Any]) -> int:
    """The place of the one answer among the options, of which it is the text or, where none is, the letter."""
    (answer, *more) = answers
    letters = string.ascii_uppercase[: len(options)]
    if more or options.count(answer) > 1:
        raise SampleError(f"{shown(repr(answer))} is not the one right answer: it has several, or equal options")
    if answer in options:
        return options.index(answer)
    if isinstance(answer, str) and len(answer) == 1 and answer in letters:
        return letters.index(answer)
    raise SampleError(f"its answer is {shown(repr(answer))}, which is neither one of its options nor a letter of one")


def _is_metadata(value: Any) -> bool:
    """Whether a cell of a further column can be in a result file: a text or a number."""
    return is_text(value) or (isinstance(value, int | float) and value - value == 0)


def _picture(image: Any) -> Mapping[str, Any] | None:
    """The picture in the form of the hub: a path, bytes, or both; raises SampleError for anything else."""
    if image is None or image == "":
        return None
    if isinstance(image, str):
        return picture_file(image)
    if isinstance(image, bytes):
        return {"bytes": image, "path": None}
    if not isinstance(image, Mapping):
        raise SampleError(f"its image is {shown(repr(image))}, neither a path nor bytes")
    return image if image.get("bytes") is not None or image.get("path") is not None else None


def _name_of(picture: Mapping[str, Any] | None) -> str | None:
    name = None if picture is None else picture.get("path")
    return name if is_text(name) else None
