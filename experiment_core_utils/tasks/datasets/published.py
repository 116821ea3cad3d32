"""The base class of the readers of published datasets, which makes a task of each.

A reader says how a row of its table becomes a question, and how rows are made of its official files; see
docs/datasets.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError, first_line
from experiment_core_utils.primitives.texts import is_text, shown
from experiment_core_utils.tasks.datasets.hub_tables import HubDataset, HubTable, cache_folders, read_folder, read_hub
from experiment_core_utils.tasks.datasets.pictures import PictureFolders
from experiment_core_utils.tasks.datasets.questions import (
    UNTYPED,
    QuestionRow,
    RowTask,
    check_template,
    check_texts,
    listed,
)
from experiment_core_utils.tasks.datasets.tables import (
    OfficialFile,
    OfficialTable,
    Row,
    find_files,
    read_official,
)
from experiment_core_utils.tasks.interface import Sample

Table = HubTable | OfficialTable
# What a reader meets in a row that is not as the dataset's layout says: a null, a number for a text, a missing field,
# an infinite id, lists within lists within lists.
ODD_ROW = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class SplitSource:
    """Where one split of a dataset is."""

    stored: str  #: its name in the hub's layout
    on_hub: bool  #: whether the hub's copy has it with answers
    #: name patterns of the official annotation files, in the order that the reader takes them; empty where there are
    #: none
    files: tuple[str, ...] = ()
    #: folders of the official pictures, beside these files; one of them has to be there
    pictures: tuple[str, ...] = (".",)


def coco_splits(stored: tuple[str, str], files: Sequence[str]) -> Mapping[str, SplitSource]:
    """Validation, which alone is on the hub, and train of a dataset of COCO 2014's pictures.

    Args:
        stored: names of the two in the hub's layout.
        files: the official ones, with {} in place of COCO's name of the split.
    """

    def source(name: str, stored: str, on_hub: bool) -> SplitSource:
        pictures = (f"{name}2014", f"images/{name}2014")
        return SplitSource(stored, on_hub, tuple(file.format(name) for file in files), pictures)

    return MappingProxyType({"validation": source("val", stored[0], True), "train": source("train", stored[1], False)})


@dataclass(frozen=True)
class Place:
    """Where a sample is: its row, and its place among the questions of that row."""

    row: int
    item: int = 0


class PublishedTask(RowTask):
    """A split of a published dataset. Implements `Task`.

    Args:
        split: one of `splits`.
        data_dir: a local copy in the hub's layout, or the official files; None reads the hub.
        cache_dir: where the `datasets` library keeps what it downloads and converts; None: its own place.
        prompt_template: instead of Molmo's; its fields are {question}, {style} and {options}.
        revision: commit, tag or branch on the hub instead of `hub.revision`.

    Attributes:
        source: where the rows were read from: hub id and revision, or files.

    Raises:
        ConfigurationError: unknown split, missing or unreadable files, a template that cannot be filled.
    """

    metric: str
    max_new_tokens: int
    hub: HubDataset  #: the copy on the hub
    splits: Mapping[str, SplitSource]  #: those with answers, by our names
    unanswered: tuple[str, ...] = ()  #: splits that are published without answers
    columns: frozenset[str]  #: what a row needs to have
    id_column = "question_id"
    image_id_column = "image_id"  #: names the picture, in the rows that have it
    kept_columns: tuple[str, ...] = ()  #: what is kept beside the result, as far as the rows have it
    type_columns: tuple[str, ...] = ()  #: what the question type is read from, as far as the rows have it
    required_fields: tuple[str, ...] = ("question",)  #: what a prompt template has to name

    def __init__(
        self,
        split: str = "validation",
        *,
        data_dir: Path | None = None,
        cache_dir: Path | None = None,
        prompt_template: str | None = None,
        revision: str | None = None,
    ) -> None:
        choices = ", ".join(self.splits)
        if split in self.unanswered:
            raise ConfigurationError(f"{self.name} {split} is published without answers: choose one of {choices}")
        if split not in self.splits:
            raise ConfigurationError(f"{self.name} has no split {split!r}: choose one of {choices}")
        if data_dir is not None and revision is not None:
            raise ConfigurationError(
                f"{self.name}: revision {revision} is of the hub, and the rows are to come from {data_dir}; drop one"
            )
        if prompt_template is not None:
            check_template(prompt_template, self.required_fields)
        self.split = split
        self._template = prompt_template
        hub = self.hub if revision is None else HubDataset(self.hub.id, self.hub.config, revision)
        self._table = self._open(hub, data_dir, cache_dir)
        folders = cache_folders(cache_dir) if data_dir is None else (data_dir, *_blobs_of(data_dir))
        self._pictures = PictureFolders(self._table.roots, folders)
        self.source: Mapping[str, str] = self._table.source
        missing = sorted(self.columns - self._table.columns) if len(self._table) else []
        if missing:
            raise ConfigurationError(
                f"{self.name} {split}: the rows have no {', '.join(missing)}; they have "
                f"{', '.join(sorted(self._table.columns))}, so this is another layout than {self.hub.id}'s"
            )
        try:
            self._places = self.places_of(self._table) if len(self._table) else []
        except ODD_ROW as error:
            raise ConfigurationError(f"{self.name} {split}: {self._other_layout(error)}") from error
        if not self._places:
            raise ConfigurationError(f"{self.name} {split} has no samples in {self.source}")
        self._types: list[str] | None = None

    # --- what a reader says ---

    def question_of(self, row: Row, place: Place) -> QuestionRow:
        """The question at `place`, from the columns of most datasets; raises SampleError for a row that is none."""
        return QuestionRow(
            question_id=str(row[self.id_column]),
            image_id=self.image_id_of(row),
            question=row["question"],
            answers=self.answers_of(row),
            picture=row["image"],
            metadata=present(row, self.kept_columns),
        )

    def image_id_of(self, row: Row) -> str:
        """The picture's name, or, in rows without one, its file's; else its question's."""
        named = str(row[self.image_id_column]) if self.image_id_column in row else file_stem(row["image"])
        return named or f"question-{row[self.id_column]}"

    def answers_of(self, row: Row) -> tuple[str, ...]:
        """The reference answers; none where the row has none."""
        return listed(row["answers"], "answers")

    def official_rows(self, files: Sequence[OfficialFile]) -> list[Row]:
        """The official files' entries with the hub's column names."""
        raise NotImplementedError(f"{self.name} has no official files besides the hub's")

    def places_of(self, table: Table) -> Sequence[Place]:
        """The samples in their order; one for each row unless a reader says otherwise."""
        return [Place(row) for row in range(len(table))]

    def type_of(self, row: Row, place: Place) -> str:
        """The question type, from a row with the `type_columns` that there are: the first one's value."""
        found = row.get(self.type_columns[0]) if self.type_columns else None
        return UNTYPED if found is None else str(found)

    # --- Task ---

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Sample:
        """The picture is read and decoded here and not before."""
        question_row = self.row_at(index)
        where = f"{self.name} {self.split} question {shown(question_row.question_id)}"
        if not question_row.answers:
            raise SampleError(f"{where} has no reference answers")
        try:
            check_texts(question_row)
            first = self._pictures.opened(question_row.picture, question_row.image_id)
            further = [self._pictures.opened(each, question_row.image_id) for each in question_row.further_pictures]
        except SampleError as error:
            raise type(error)(f"{where}: {error}") from error
        named = replace(question_row, metadata={"question_id": question_row.question_id, **question_row.metadata})
        return named.sample(index, (first, *further), self.question_type(index))

    def row_at(self, index: int) -> QuestionRow:
        place = self._places[self._checked(index)]
        try:
            return self.question_of(self._table.row(place.row), place)
        except SampleError as error:
            # Of its own class: a sample that is out of time says so.
            raise type(error)(f"{self.name} {self.split} sample {index}: {error}") from error
        except ODD_ROW as error:
            raise SampleError(f"{self.name} {self.split} sample {index}: {self._other_layout(error)}") from error

    def question_type(self, index: int) -> str:
        """The first call reads the types of the whole split."""
        self._checked(index)
        if self._types is None:
            columns = [name for name in self.type_columns if name in self._table.columns]
            try:
                rows = self._table.select(columns) if columns else [{}] * len(self._table)
            except ODD_ROW as error:
                raise ConfigurationError(f"{self.name} {self.split}: {self._other_layout(error)}") from error
            self._types = [self._type_at(rows[place.row], place) for place in self._places]
        return self._types[index]

    # --- reading ---

    def _type_at(self, row: Row, place: Place) -> str:
        """`type_of`; a row without one is untyped (read as a sample, it raises what is missing)."""
        try:
            found = self.type_of(row, place)
        except ODD_ROW:
            return UNTYPED
        return found if is_text(found) else UNTYPED

    def _other_layout(self, error: BaseException) -> str:
        return f"a row is not as in {self.hub.id} ({type(error).__name__}: {shown(first_line(error))})"

    def _open(self, hub: HubDataset, data_dir: Path | None, cache_dir: Path | None) -> Table:
        split = self.splits[self.split]
        if data_dir is None:
            if not split.on_hub:
                raise ConfigurationError(f"{self.name} {self.split} is not on the hub: {self._how_to_get(hub)}")
            try:
                return read_hub(hub, split.stored, cache_dir)
            except ConfigurationError as error:
                # Of the same class: that there is no network is true of other datasets, too.
                raise type(error)(
                    f"{self.name} {self.split} cannot be read from the hub ({error}): {self._how_to_get(hub)}"
                ) from error
        if not data_dir.is_dir():
            raise ConfigurationError(f"{self.name}: there is no folder {data_dir}; {self._how_to_get(hub)}")
        table = read_folder(data_dir, hub, split.stored, cache_dir)
        if table is not None:
            return table
        paths = find_files(data_dir, split.files)
        if paths is None:
            raise ConfigurationError(f"{self.name} {self.split} is not in {data_dir}: {self._how_to_get(hub)}")
        roots = tuple(data_dir / name for name in split.pictures if (data_dir / name).is_dir())
        if not roots:
            raise ConfigurationError(
                f"{self.name} {self.split}: {data_dir} has {paths[0].name} but no pictures; put them in "
                f"{' or '.join(f'{name}/' for name in split.pictures)} there"
            )
        files = [read_official(path) for path in paths]
        source = {
            "read_from": "official files",
            "path": str(data_dir),
            "split": self.split,
            "files": ", ".join(f"{file.path.name} (sha256 {file.sha256})" for file in files),
        }
        try:
            return OfficialTable(self.official_rows(files), roots, source)
        except ODD_ROW as error:
            named = ", ".join(file.path.name for file in files)
            raise ConfigurationError(
                f"{self.name} {self.split}: {named} in {data_dir} are not the official files of that name "
                f"({type(error).__name__}: {shown(first_line(error))})"
            ) from error

    def _how_to_get(self, hub: HubDataset) -> str:
        """What would provide the split, as the end of a one-line message."""
        split = self.splits[self.split]
        download = f"hf download --repo-type dataset {hub.id} --revision {hub.revision} --local-dir DIR"
        ways = [f"give a --data_dir with {split.stored}-*.parquet in the layout of {hub.id}"]
        if split.on_hub:
            ways = [f"run `{download}` and give --data_dir DIR"]
        if split.files:
            where = "beside it" if "." in split.pictures else f"in {split.pictures[0]}/"
            ways.append(f"give a --data_dir with the official {', '.join(split.files)} and the pictures {where}")
        return ", or ".join(ways)


def _blobs_of(folder: Path) -> tuple[Path, ...]:
    """Where the files are that a snapshot in the hub's cache links to: REPOSITORY/snapshots/COMMIT, /blobs."""
    above = (folder.absolute(), *folder.absolute().parents)
    return tuple(each.parent / "blobs" for each in above if each.name == "snapshots")


def list_of_records(value: Any) -> list[Mapping[str, Any]]:
    """A list of objects, also where the `datasets` library stores it as an object of lists (its older `Sequence`)."""
    if isinstance(value, Mapping):
        return [dict(zip(value, entry, strict=True)) for entry in zip(*value.values(), strict=True)]
    return list(value)


def file_stem(picture: Mapping[str, Any] | None) -> str | None:
    """The name of the picture's file without its ending; None where the row does not have it."""
    return None if picture is None or not picture["path"] else Path(picture["path"]).stem


def present(row: Row, names: Sequence[str]) -> Mapping[str, Any]:
    """The named columns that the row has."""
    return {name: row[name] for name in names if name in row}
