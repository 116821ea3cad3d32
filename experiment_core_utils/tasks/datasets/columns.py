"""Which columns of a file are the picture, the question, the answer and the options of its rows.

A column with a name near to ours that is not read would leave a wrong number behind (a question without its picture, a
choice without its options), so it is refused with the way to read it.
"""

import re
import string
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.primitives.texts import did_you_mean, shown
from experiment_core_utils.tasks.datasets.picture_cells import looks_like_picture
from experiment_core_utils.tasks.datasets.tables import Row

COLUMNS = ("image", "question", "answer", "answers", "options", "type")
LETTERS = string.ascii_uppercase
_NUMBERED = re.compile(r"image_([1-9]\d?)")
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_LETTERED = re.compile(r"(?:(?:option|choice|opt)?[ _-]?(?:[a-z]|\d\d?)|answer[ _-]?[a-z])", re.IGNORECASE)

# Words that name a picture, and those that leave it one: `input_image_path` is a picture, `image_width` is not.
_PICTURES = frozenset("image images img imgs picture pictures pic pics photo photos screenshot screenshots".split())
_OF_PICTURES = frozenset(
    "path paths file files filename filenames filepath name names url urls uri link src bytes base64 b64 base data "
    "input raw decoded local full rel relative abs absolute encoded pil png jpg jpeg".split()
)
_ALONE = frozenset("base64 png jpg jpeg webp visual visuals pil".split())
# Names of the other columns in common data sets, written in small letters and digits alone.
_NEAR = {
    "question": frozenset(
        "question questions questiontext questionstring prompt prompts query queries instruction instructions text "
        "input inputs problem q user userprompt request utterance".split()
    ),
    "answer": frozenset(
        "answer answers label labels target targets gt gts groundtruth groundtruths gold golds goldanswer goldanswers "
        "reference references response responses output outputs solution answerkey answertext answerlabel correct "
        "correctanswer correctanswers rightanswer correctchoice expected expectedanswer expectedoutput completion ans "
        "finalanswer gtanswer truth reply a".split()
    ),
    "options": frozenset(
        "options option choices choice candidates candidate opts alternatives answerchoices answeroptions optionlist "
        "choicelist multiplechoices multiplechoiceoptions possibleanswers mcoptions endings".split()
    ),
    "type": frozenset({"type"}),
}


def normal(name: str) -> str:
    """A column's name in small letters and digits alone."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def is_empty(value: Any) -> bool:
    """Whether a cell has nothing in it: none, an empty text or list, or the NaN that pandas writes for one."""
    return value is None or (isinstance(value, str) and not value.strip()) or value in ([], ()) or value != value


def ours_near(name: str) -> str | None:
    """Our name that a name is near to, or is; None where it is near to none."""
    if _names_picture(name):
        return "image"
    return next((ours for ours, near in _NEAR.items() if normal(name) in near), None)


@dataclass(frozen=True)
class Columns:
    """The columns of a file by what they are."""

    by_name: Mapping[str, str]  #: the file's column for each of our names that it has
    pictures: tuple[str, ...]  #: the file's columns of pictures, in the order of their numbers
    letters: tuple[str, ...]  #: the file's columns A, B, ... of options; empty where it has none or has `options`
    others: tuple[str, ...]  #: what is kept beside the result
    path: Path  #: of the file, for messages

    @classmethod
    def of(cls, names: Sequence[str], mapping: Mapping[str, str], path: Path) -> "Columns":
        """The columns `names` of a file by our names, or as `mapping` (ours -> the file's) says.

        Raises:
            ConfigurationError: the mapping has a name that is none of ours, or a column that the file lacks.
        """
        known = (*COLUMNS, "image_1", *LETTERS)
        for name, column in mapping.items():
            if name not in known and not _NUMBERED.fullmatch(name):
                raise ConfigurationError(
                    f"--columns {name}={column}: {name} is no column of ours"
                    f"{did_you_mean(ours_near(name) or name, COLUMNS)}; give one of {', '.join(COLUMNS)}, image_1 to "
                    "image_99 or A to Z"
                )
            if column not in names:
                raise ConfigurationError(
                    f"--columns {name}={column}: {path} has no column {column}{did_you_mean(column, names)}; it has "
                    f"{shown(', '.join(names))}"
                )
        by_name = {name: name for name in names if name in known or _NUMBERED.fullmatch(name)} | dict(mapping)
        if not {"A", "B"} <= by_name.keys() or "options" in by_name:
            by_name = {name: column for name, column in by_name.items() if name not in LETTERS}
        numbered = sorted((each for each in by_name if _NUMBERED.fullmatch(each)), key=lambda each: int(each[6:]))
        pictures = tuple(by_name[each] for each in ("image", *numbered) if each in by_name)
        letters = tuple(by_name[each] for each in LETTERS if each in by_name)
        read = {*by_name.values(), *COLUMNS}
        return cls(by_name, pictures, letters, tuple(each for each in names if each not in read), path)

    def near_pictures(self, row: Row) -> list[str]:
        """Columns that are not read and contain a picture in this row, by their name or by what is in them."""
        found = []
        for name in self.others:
            value = row.get(name)
            named = _names_picture(name) and isinstance(value, str | bytes | Mapping | list)
            if not is_empty(value) and (named or looks_like_picture(value)):
                found.append(name)
        return found

    def near_options(self, row: Row) -> list[str]:
        """Columns that are not read and contain a list of options in this row, or one option each."""
        listed = [
            name
            for name in self.others
            if normal(name) in _NEAR["options"] and not is_empty(value := row.get(name)) and _is_list(value)
        ]
        return listed or self._single_options(row)

    def _single_options(self, row: Row) -> list[str]:
        """Columns as `option_a` and `option_b`, or `a` and `b`, with a text each."""
        matches = [(name, _WORDS.findall(name)[-1].upper()) for name in self.others if _LETTERED.fullmatch(name)]
        bare = {name for name, mark in matches if name.upper() == mark}
        texts = [
            (name, mark)
            for name, mark in matches
            if not is_empty(row.get(name)) and (name not in bare or (isinstance(row[name], str) and mark.isalpha()))
        ]
        marks = {mark for _, mark in texts}
        is_several = any(pair <= marks for pair in ({"A", "B"}, {"0", "1"}, {"1", "2"}))
        return [name for name, _ in sorted(texts, key=lambda each: (len(each[1]), each[1]))] if is_several else []

    def refuse_near(self, rows: Callable[[], Iterator[Row]], filled: Callable[[str], bool], *, text_only: bool) -> None:
        """Refuse columns near to ours that would not be read, where no row has what ours is for.

        Args:
            rows: the rows of the file, or the first ones, that can be read.
            filled: whether any row has something in a column of the file.

        Raises:
            ConfigurationError: see above; it says which, and how they are read.
        """
        missing: dict[str, str] = {}
        unread: list[str] = []

        def note(ours: str, names: Sequence[str]) -> None:
            missing[ours] = max(names, key=lambda each: SequenceMatcher(None, normal(each), ours).ratio())
            unread.extend(names)

        if not text_only:
            near = _of_rows(self.near_pictures, rows)
            numbered = [name for name in near if any(each.isdigit() for each in _WORDS.findall(name))]
            if near and not any(map(filled, self.pictures)):
                if len(numbered) > 1:
                    missing |= {f"image_{at}": name for at, name in enumerate(numbered, start=1)}
                    unread.extend(numbered)
                else:
                    note("image", near)
            elif numbered:
                raise ConfigurationError(
                    f"--data_file {self.path} has pictures in {', '.join(self.pictures)}, and those in "
                    f"{shown(', '.join(numbered))} are not read: call all of them image_1, image_2, ..., from 1"
                )
        for ours, others in (("question", ()), ("answer", ("answers",)), ("type", ())):
            near = [each for each in self.others if normal(each) in _NEAR[ours] and filled(each)]
            if ours == "answer" and self.letters:
                near = [each for each in near if normal(each) != "a"]
            if near and not any(filled(self.by_name[each]) for each in (ours, *others) if each in self.by_name):
                note(ours, near)
        if not self.letters and not ("options" in self.by_name and filled(self.by_name["options"])):
            near = _of_rows(self.near_options, rows)
            if near and normal(near[0]) in _NEAR["options"]:
                note("options", near)
            elif near:
                missing |= dict(zip(LETTERS, near, strict=False))
                unread.extend(near)
        if "" in unread:
            raise ConfigurationError(
                f"--data_file {self.path} has no {', '.join(missing)}, and a column without a name would not be read; "
                "give it one in the first line"
            )
        if missing:
            pairs = " ".join(f"{name}={_quoted(column)}" for name, column in missing.items())
            no_pictures = ", or --text_only to leave the pictures out" if "image" in missing else ""
            ours = "options" if missing.keys() <= set(LETTERS) else ", ".join(missing)
            raise ConfigurationError(
                f"--data_file {self.path} has no {ours}, and {shown(', '.join(dict.fromkeys(unread)))} would not be "
                f"read: give --columns {pairs}{no_pictures}"
            )

    def cell(self, row: Row, name: str) -> Any:
        """What a row has in the column of one of our names; None without it."""
        return row.get(self.by_name[name]) if name in self.by_name else None

    def own(self, row: Row) -> dict[str, Any]:
        """The row by our names, without empty cells; options of the columns A, B, ... as a list.

        Raises:
            SampleError: there is an option after an empty one.
        """
        found = {name: row[column] for name, column in self.by_name.items() if not is_empty(row.get(column))}
        lettered = {name: found.pop(name) for name in LETTERS if self.letters and name in found}
        cells = {name: value for name, value in lettered.items() if normal(str(value)) != "nan"}
        if cells:
            if list(cells) != list(LETTERS[: len(cells)]):
                raise SampleError(f"its options are {', '.join(cells)}, with an empty one between them; close the gap")
            found["options"] = list(cells.values())
        return found


def _of_rows(near: Callable[[Row], list[str]], rows: Callable[[], Iterator[Row]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows() for name in near(row)))


def _names_picture(name: str) -> bool:
    words = {each.casefold() for each in _WORDS.findall(name)}
    rest = {each for each in words if not each.isdigit()} - _OF_PICTURES - _PICTURES
    return normal(name) in _ALONE or (bool(words & _PICTURES) and not rest) or normal(name) in _JOINED


_JOINED = frozenset(one + other for one in _PICTURES for other in _OF_PICTURES)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | Mapping) or (isinstance(value, str) and value.strip()[:1] in "[({")


def _quoted(column: str) -> str:
    return column if re.fullmatch(r"[\w.-]+", column) else f"'{column}'"


def mapping_of(given: Collection[str] | None) -> dict[str, str]:
    """`--columns` as a mapping of our names to the file's.

    Raises:
        ConfigurationError: one is not NAME=COLUMN, or a name is given twice.
    """
    found: dict[str, str] = {}
    for each in given or ():
        name, equals, column = each.partition("=")
        if not (name and equals and column):
            raise ConfigurationError(f"--columns {each} is not NAME=COLUMN; write it as image=image_path")
        if name in found:
            raise ConfigurationError(f"--columns names {name} twice; give one column for it")
        found[name] = column
    return found
