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
from experiment_core_utils.tasks.datasets.files.picture_cells import looks_like_picture
from experiment_core_utils.tasks.datasets.tables import Row

COLUMNS = ("image", "question", "answer", "answers", "options", "type")
LETTERS = string.ascii_uppercase
_NUMBERED = re.compile(r"image_([1-9]\d?)")
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
# The letter or number at the end of a column of one option.
_LETTERED = re.compile(
    r"(?:(?:.*[ _-])?(?:option|choice|opt|op|candidate|alternative|ending|solution|sol)s?(?:[ _-]?text)?[ _-]?)?"
    r"([a-z]|\d\d?)|answer[ _-]?([a-z])",
    re.IGNORECASE,
)
# Options without the right one, compared as `normal` makes names.
_WRONG = re.compile(r"(?:distractor|(?:incorrect|wrong|false)(?:answer|option|choice))s?(?:list|text|[a-z]|\d+)?")

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
        "finalanswer gtanswer truth reply answerindex answeridx answerid correctindex correctidx correctoption "
        "correctanswerindex correctansweridx correctchoiceidx a".split()
    ),
    "options": frozenset(
        "options option choices choice candidates candidate opts alternatives answerchoices answeroptions optionlist "
        "choicelist multiplechoices multiplechoiceoptions possibleanswers mcoptions endings".split()
    ),
    "type": frozenset({"type"}),
}
_OPTION_WORDS = frozenset("options option choices choice candidates alternatives opts".split())
# Options within one text: `A. red B. blue`, or lines, or with marks between them.
_OPTIONS_IN_TEXT = re.compile(r"\(?\bA[.):].*\bB[.):]|\S\s*[|;,\n]\s*\S", re.DOTALL)
# What `str` makes of the missing cells of numpy and pandas.
_MISSING = frozenset({"", "nan", "<na>"})


def normal(name: str) -> str:
    """A column's name in small letters and digits alone."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def is_empty(value: Any) -> bool:
    """Whether a cell has nothing in it: none, an empty text or list, or the NaN that pandas writes for one, also as
    text.
    """
    if isinstance(value, str):
        return value.strip().casefold() in _MISSING
    return value is None or value in ([], ()) or value != value


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
        if "question_type" in names and "type" not in by_name:
            by_name["type"] = "question_type"
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

    def all_near_pictures(self, rows: Callable[[], Iterator[Row]]) -> list[str]:
        """The columns that `near_pictures` gives of any of these rows."""
        return _of_rows(self.near_pictures, rows)

    def near_options(self, row: Row) -> list[str]:
        """Columns that are not read and contain a list of options in this row, or one option each."""
        return self._option_lists(row) or self._single_options(row)

    def _option_lists(self, row: Row) -> list[str]:
        return [name for name in self.others if not is_empty(row.get(name)) and _are_options(name, row[name])]

    def _single_options(self, row: Row) -> list[str]:
        """Columns as `option_a` and `option_b`, or `a` and `b`, with a text each."""
        texts = []
        for name in self.others:
            match = _LETTERED.fullmatch(name)
            if match is None or normal(name) in _NEAR["options"]:
                continue
            mark = (match[1] or match[2]).upper()
            is_bare = len(normal(name)) == len(mark)
            if not is_empty(row.get(name)) and (not is_bare or (isinstance(row[name], str) and mark.isalpha())):
                texts.append((len(mark), mark, name))
        marks = {mark for _, mark, _ in texts}
        is_several = any(pair <= marks for pair in ({"A", "B"}, {"0", "1"}, {"1", "2"}))
        return [name for _, _, name in sorted(texts)] if is_several else []

    def refuse_near(self, rows: Callable[[], Iterator[Row]], filled: Callable[[str], bool], *, text_only: bool) -> None:
        """Refuse columns near to ours that would not be read, where no row has what ours is for.

        Args:
            rows: the rows of the file, or the first ones, that can be read.
            filled: whether any row has something in a column of the file.

        Raises:
            ConfigurationError: see above; it says which, and how they are read.
        """
        near = {} if text_only else self._unread_pictures(rows, filled)
        near |= self._unread_texts(filled)
        if not self.letters and not ("options" in self.by_name and filled(self.by_name["options"])):
            near |= self._unread_options(rows)
        if not near:
            return
        missing = {ours: max(names, key=lambda name: _likeness(name, ours)) for ours, names in near.items()}
        unread = dict.fromkeys(name for names in near.values() for name in names)
        if "" in unread:
            raise ConfigurationError(
                f"--data_file {self.path} has no {', '.join(missing)}, and a column without a name would not be read; "
                "give it one in the first line"
            )
        pairs = " ".join(f"{name}={_quoted(column)}" for name, column in missing.items())
        no_pictures = ", or --text_only to leave the pictures out" if "image" in missing else ""
        ours = "options" if missing.keys() <= set(LETTERS) else ", ".join(missing)
        raise ConfigurationError(
            f"--data_file {self.path} has no {ours}, and {shown(', '.join(unread))} would not be read: give --columns "
            f"{pairs}{no_pictures}"
        )

    def _unread_pictures(
        self, rows: Callable[[], Iterator[Row]], filled: Callable[[str], bool]
    ) -> dict[str, Sequence[str]]:
        """Columns of pictures that are not read, by our names for them; raises as `refuse_near`."""
        near = self.all_near_pictures(rows)
        numbered = [name for name in near if any(word.isdigit() for word in _WORDS.findall(name))]
        if any(map(filled, self.pictures)):
            if numbered:
                raise ConfigurationError(
                    f"--data_file {self.path} has pictures in {', '.join(self.pictures)}, and those in "
                    f"{shown(', '.join(numbered))} are not read: call all of them image_1, image_2, ..., from 1"
                )
            return {}
        if len(numbered) > 1:
            return {f"image_{number}": [name] for number, name in enumerate(numbered, start=1)}
        return {"image": near} if near else {}

    def _unread_texts(self, filled: Callable[[str], bool]) -> dict[str, Sequence[str]]:
        """Columns of questions, answers and types that are not read, by our names for them."""
        near: dict[str, Sequence[str]] = {}
        for ours, others in (("question", ()), ("answer", ("answers",)), ("type", ())):
            names = [name for name in self.others if normal(name) in _NEAR[ours] and filled(name)]
            if ours == "answer" and self.letters:
                names = [name for name in names if normal(name) != "a"]
            if names and not any(filled(self.by_name[name]) for name in (ours, *others) if name in self.by_name):
                near[ours] = names
        return near

    def _unread_options(self, rows: Callable[[], Iterator[Row]]) -> dict[str, Sequence[str]]:
        """Columns of options that are not read, by our names for them; raises for options without the right one."""
        if listed := _of_rows(self._option_lists, rows):
            return {"options": listed}
        if single := _of_rows(self._single_options, rows):
            return {letter: [name] for letter, name in zip(LETTERS, single, strict=False)}
        if wrong := _of_rows(self._wrong_options, rows):
            raise ConfigurationError(
                f"--data_file {self.path} has no options, and the wrong ones in {shown(', '.join(wrong))} would not be "
                "read: write them and the right one into a column options, or leave them out for open questions"
            )
        return {}

    def _wrong_options(self, row: Row) -> list[str]:
        return [
            name
            for name in self.others
            if _WRONG.fullmatch(normal(name)) and not is_empty(row.get(name)) and isinstance(row[name], str | list)
        ]

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
        if lettered:
            if list(lettered) != list(LETTERS[: len(lettered)]):
                raise SampleError(
                    f"its options are {', '.join(lettered)}, with an empty one between them; close the gap"
                )
            found["options"] = list(lettered.values())
        return found


def _of_rows(near: Callable[[Row], list[str]], rows: Callable[[], Iterator[Row]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows() for name in near(row)))


def _names_picture(name: str) -> bool:
    words = {each.casefold() for each in _WORDS.findall(name)}
    rest = {word for word in words if not word.isdigit()} - _OF_PICTURES - _PICTURES
    return normal(name) in _ALONE or (bool(words & _PICTURES) and not rest) or normal(name) in _JOINED


_JOINED = frozenset(one + other for one in _PICTURES for other in _OF_PICTURES)


def _are_options(name: str, value: Any) -> bool:
    """Whether a cell has several options by its column's name and its content."""
    is_list = isinstance(value, list | tuple | Mapping) or (isinstance(value, str) and value.strip()[:1] in "[({")
    if normal(name) in _NEAR["options"]:
        return is_list or (isinstance(value, str) and bool(_OPTIONS_IN_TEXT.search(value)))
    if isinstance(value, Mapping) and any(normal(str(key)) in _NEAR["options"] for key in value):
        return True
    if not _OPTION_WORDS & {word.casefold() for word in _WORDS.findall(name)}:
        return False
    # Not their scores or lengths.
    return is_list and (not isinstance(value, list) or isinstance(value[0], str))


def _likeness(name: str, ours: str) -> float:
    return SequenceMatcher(None, normal(name), ours).ratio()


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
            more = " (--type_column is one of them)" if name == "type" else ""
            raise ConfigurationError(f"--columns names {name} twice{more}; give one column for it")
        found[name] = column
    return found
