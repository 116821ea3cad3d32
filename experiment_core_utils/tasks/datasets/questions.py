"""Questions read from rows of a table: texts that are checked, a picture that is opened, a prompt that is filled in."""

import ast
import io
import json
import re
import string
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError, first_line
from experiment_core_utils.primitives.texts import is_text, shown
from experiment_core_utils.tasks.content import joined_digests, sample_digest
from experiment_core_utils.tasks.datasets.pictures import OpenedPicture, PictureFolders
from experiment_core_utils.tasks.interface import Sample

UNTYPED = "all"
OPEN_TEMPLATE = " User: {style}: {question} Assistant:"
CHOICE_TEMPLATE = " User: {style}: {question}\n{options} Assistant:"
FIELDS = ("question", "style", "options")


def options_block(options: Sequence[str]) -> str:
    """One line for each option, ``A: text`` and a line break; raises SampleError above 26 options."""
    return "".join(f"{letter}: {option}\n" for letter, option in lettered(options))


def lettered(options: Sequence[str]) -> list[tuple[str, str]]:
    """Each option behind its letter; raises SampleError above 26 options."""
    if len(options) > len(string.ascii_uppercase):
        raise SampleError(
            f"a question has {len(options)} options, more than the {len(string.ascii_uppercase)} letters: give it fewer"
        )
    return list(zip(string.ascii_uppercase, options, strict=False))


def check_template(template: str, required: Sequence[str]) -> str:
    """`template` itself, if it names `required` fields and none that is unknown.

    Raises:
        ConfigurationError: an unknown or missing field, a conversion or format specification, a lone brace.
    """
    if not is_text(template):
        raise ConfigurationError(f"prompt template {template!r} is not valid UTF-8; write it in UTF-8")
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigurationError(
            f"prompt template {template!r} is malformed ({error}): write a brace of the text itself as {{{{ or }}}}"
        ) from error
    named = [(name, spec, conversion) for _, name, spec, conversion in parts if name is not None]
    known = ", ".join(f"{{{name}}}" for name in FIELDS)
    for name, spec, conversion in named:
        if name not in FIELDS or spec or conversion:
            raise ConfigurationError(f"prompt template {template!r} has the field {{{name}}}: plain {known} are known")
    missing = [f"{{{name}}}" for name in required if name not in {found for found, _, _ in named}]
    if missing:
        raise ConfigurationError(f"prompt template {template!r} leaves out {', '.join(missing)}, which this task needs")
    return template


def fill(template: str, style: str, question: str, options: Sequence[str]) -> str:
    """The prompt; braces within the question or the options stay as they are."""
    return template.format(style=style, question=question, options=options_block(options))


@dataclass(frozen=True)
class QuestionRow:
    """A row read as a question; the fields are those of `Sample`, the picture still encoded."""

    question_id: str
    image_id: str
    question: str
    answers: tuple[str, ...]
    picture: Mapping[str, Any] | None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    answer_index: int | None = None
    further_pictures: tuple[Mapping[str, Any], ...] = ()

    @property
    def pictures(self) -> tuple[Mapping[str, Any], ...]:
        """All pictures, in their order."""
        return () if self.picture is None else (self.picture, *self.further_pictures)

    def sample(self, sample_id: int, pictures: Sequence[OpenedPicture], question_type: str) -> Sample:
        """The question as a sample, with its opened pictures."""
        of_row = ("question_id", "picture", "further_pictures")
        own = {name: value for name, value in vars(self).items() if name not in of_row}
        return Sample(
            sample_id=sample_id,
            image=pictures[0].image if pictures else None,
            question_type=question_type,
            picture_sha256=joined_digests(picture.sha256 for picture in pictures),
            further_images=tuple(each.image for each in pictures[1:]),
            **own,
        )


def check_texts(row: QuestionRow) -> None:
    """Raises SampleError where the question, an answer, an option or an id is not a text, or the rest is not JSON."""
    if not is_text(row.question) or not row.question.strip():
        raise SampleError(f"the question is {shown(repr(row.question))}, not a text")
    odd = [text for text in (*row.answers, *row.options) if not is_text(text)]
    if odd:
        raise SampleError(f"{shown(repr(odd[0]))} is among the answers or options, which must be texts; quote it")
    for name, value in (("question's id", row.question_id), ("picture's name", row.image_id)):
        if not is_text(value):
            raise SampleError(f"the {name} is {shown(repr(value))}, not a text")
    try:
        json.dumps(dict(row.metadata), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SampleError(f"what is kept of the row beside the question is not JSON ({first_line(error)})") from error


def listed(values: Any, what: str) -> tuple[Any, ...]:
    """The entries of a list; none of a null. Raises SampleError for anything else: letters would pass for answers."""
    if values is None:
        return ()
    if not isinstance(values, list | tuple):
        raise SampleError(f"the {what} are {shown(repr(values))}, not a list")
    return tuple(values)


# A list as numpy, pandas and others show it: `array([...], dtype=object)`, and its texts as `np.str_(...)`.
_ARRAY = re.compile(
    r"(?:(?:np\.|numpy\.)?array|tensor|frozenset|set|deque|dict_keys|dict_values|\w*Index)\(([\[{(].*[\]})])"
    r"(?:,\s*\w+=[\w.'<>|=, ]+)?\)",
    re.DOTALL,
)
_SCALAR = re.compile(r"\b(?:np|numpy)\.(?:str_|u?int\d*|float\d*)\(([^()]*|'[^']*'|\"[^\"]*\")\)")
_BESIDE = (tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER, tokenize.ENCODING, tokenize.INDENT, tokenize.DEDENT)


def is_list_literal(text: str) -> bool:
    """Whether a text is a list, or a tuple or set of texts, in the notation of Python, numpy or pandas."""
    text = text.strip()
    is_tuple = re.match(r"\(\s*['\"].*['\"]\s*,?\s*\)$", text)
    return text.startswith("[") or bool(_ARRAY.fullmatch(text)) or bool(is_tuple) or _is_set_of_texts(text)


def _is_set_of_texts(text: str) -> bool:
    if not (text.startswith("{") and text.endswith("}")):
        return False
    try:
        body = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return isinstance(body, ast.Set) and all(
        isinstance(each, ast.Constant) and isinstance(each.value, str) for each in body.elts
    )


def literal_list(text: str, what: str) -> list[Any]:
    """The list that a string contains in Python's notation, or in numpy's, which has no commas. Runs nothing.

    Raises:
        SampleError: it is something else, or a list of which some entries only are separated by commas: Python would
            join the texts between them.
    """
    text = text.strip()
    bare = array[1] if (array := _ARRAY.fullmatch(text)) else text
    if bare.startswith("{"):  # a set, in the order in which it is written
        bare = f"[{bare[1:-1]}]"
    try:
        found = ast.literal_eval(_with_commas(bare, what))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, tokenize.TokenError) as error:
        raise SampleError(f"{what} is not a list: {shown(repr(text))}") from error
    if not isinstance(found, list | tuple):
        raise SampleError(f"{what} is not a list: {shown(repr(text))}")
    odd = [each for each in found if not isinstance(each, str | int | float)]
    if odd:
        raise SampleError(f"{what} contains {shown(repr(odd[0]))}, neither a text nor a number")
    return list(found)


def _with_commas(text: str, what: str) -> str:
    """A list of texts and numbers with commas between them; any other text as it is."""
    text = _SCALAR.sub(r"\1", text)
    tokens = [each for each in tokenize.generate_tokens(io.StringIO(text).readline) if each.type not in _BESIDE]
    is_value = [each.type in (tokenize.STRING, tokenize.NUMBER) for each in tokens]
    signs = [each.string in "+-" and bool(each.string) for each in tokens]
    # A value, or its sign, that follows a value.
    joined = [at for at in range(1, len(tokens)) if is_value[at - 1] and (is_value[at] or signs[at])]
    if not joined:
        return text
    # Doubled quotes within a text look like two texts without a gap.
    has_gaps = all(tokens[at - 1].end != tokens[at].start for at in joined)
    if not has_gaps or any(each.string == "," for each in tokens):
        raise SampleError(
            f"{what} is a list with a comma missing between {shown(tokens[joined[0] - 1].string)} and "
            f"{shown(tokens[joined[0]].string)}: {shown(repr(text))}; write it in JSON"
        )
    return "".join(f",{each.string}" if at in joined else each.string for at, each in enumerate(tokens))


def picture_file(path: str) -> Mapping[str, Any]:
    """A picture named by its path, in the hub's form."""
    return {"bytes": None, "path": path}


class RowTask:
    """What tasks of rows share; implements a part of `Task`."""

    name: str
    split: str
    style: str  #: Molmo's name of the kind of question
    _template: str | None  #: instead of Molmo's
    _pictures: PictureFolders

    def __len__(self) -> int:
        raise NotImplementedError

    def row_at(self, index: int) -> QuestionRow:
        """The row of the sample at `index` as a question, its picture not read; raises SampleError for none."""
        raise NotImplementedError

    def data_sha256(self, index: int) -> str | None:
        try:
            row = self.row_at(index)
            digest = joined_digests(self._pictures.digest(picture, row.image_id) for picture in row.pictures)
        except SampleError:  # not counted: it is a failed sample where it is requested
            return None
        return sample_digest(row, digest)

    def file_of(self, index: int) -> str | None:
        try:
            pictures = self.row_at(index).pictures
        except SampleError:  # not counted: it is a failed sample where it is requested
            return None
        paths: list[Any] = [picture.get("path") for picture in pictures if isinstance(picture, Mapping)]
        return ", ".join(filter(is_text, paths)) or None

    def style_of(self, sample: Sample) -> str:
        """Molmo's style for this sample."""
        return self.style

    @property
    def prompt_template(self) -> str | None:
        """The words that `--prompt_template` gives; None for Molmo's, or those of another family."""
        return self._template

    @property
    def prompt_form(self) -> Mapping[str, str]:
        """The style and the templates in force."""
        return {
            "style": self.style,
            "open": self._template or OPEN_TEMPLATE,
            "choice": self._template or CHOICE_TEMPLATE,
        }

    def prompt(self, sample: Sample) -> str:
        template = self.prompt_form["choice" if sample.options else "open"]
        return fill(template, self.style_of(sample), sample.question, sample.options)

    def _checked(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} {self.split} has samples 0 to {len(self) - 1}, not {index}")
        return index
