"""Cells of a table that contain answers and options: texts, lists as programs write them, numbers, indices."""

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.primitives.files import parse_json
from experiment_core_utils.primitives.texts import shown
from experiment_core_utils.tasks.datasets.files.columns import LETTERS, is_empty
from experiment_core_utils.tasks.datasets.questions import is_list_literal, literal_list
from experiment_core_utils.tasks.datasets.tables import Row

# The end of a column of pandas that was written as a text.
_SERIES = re.compile(r"\bdtype: \S+\s*$")
_WHOLE = re.compile(r"-?\d+\.0")
_INDEX = re.compile(r"\d{1,2}", re.ASCII)


def texts_in(value: Any, what: str) -> tuple[Any, ...]:
    """A list, also one written as text in JSON or as Python or numpy shows it (a cell of a CSV file); one answer is a
    list.

    Raises:
        SampleError: it is something else, such as a column of pandas or an object written as a text.
    """
    if isinstance(value, str):
        if not is_list_literal(value):
            refuse_series(value, what)
            if what == "options" or _is_object(value):
                raise SampleError(f"its {what} are {shown(repr(value))}, not a list; write one in JSON")
            return (value,)
        try:
            value = parse_json(value, what)
        except ConfigurationError:
            value = literal_list(value.strip(), what)
    if not isinstance(value, list):
        raise SampleError(f"its {what} are {shown(repr(value))}, not a list")
    return tuple(map(text_of, value))


def refuse_series(value: Any, what: str) -> None:
    """Raises SampleError for a text that is a column of pandas as it is printed."""
    if isinstance(value, str) and _SERIES.search(value):
        raise SampleError(f"its {what} is a Series of pandas as text, {shown(repr(value))}; write a list in JSON")


def _is_object(text: str) -> bool:
    """Whether a text is a dict, or a set of something else than texts, in Python's notation or in JSON."""
    if not (text.strip().startswith("{") and text.strip().endswith("}")):
        return False
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    values = body.elts if isinstance(body, ast.Set) else []
    return isinstance(body, ast.Dict) or (bool(values) and all(isinstance(value, ast.Constant) for value in values))


def text_of(value: Any) -> Any:
    """A whole number as it is written; anything else as it is."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def with_whole_numbers(rows: Sequence[Row | str], names: Iterable[str]) -> tuple[list[Row | str], list[str]]:
    """The rows with 2.0 read as 2 in columns where all is so and a cell is empty, and the names of these columns.

    Pandas has no empty cell among whole numbers, and makes all of them such fractions.
    """
    changed = []
    for name in names:
        cells = [row.get(name) for row in rows if not isinstance(row, str)]
        filled = [cell for cell in cells if not is_empty(cell)]
        if filled and len(filled) < len(cells) and all(map(_is_whole, filled)):
            changed.append(name)

    def changed_row(row: Row | str) -> Row | str:
        if isinstance(row, str):
            return row
        return {**row, **{name: str(int(float(row[name]))) for name in changed if not is_empty(row.get(name))}}

    return [changed_row(row) for row in rows] if changed else list(rows), changed


def _is_whole(cell: Any) -> bool:
    if isinstance(cell, str):
        return bool(_WHOLE.fullmatch(cell.strip()))
    return isinstance(cell, float) and cell.is_integer()


def possible_firsts(questions: Iterable[tuple[Sequence[Any], Any]]) -> tuple[int, ...]:
    """The numbers, of 0 and 1, that the first option may have where right answers are numbers of options.

    Args:
        questions: options and right answer of each row. Those count whose options are no numbers, and whose answer is.

    Returns:
        Nothing where there are no such rows, or where they contradict each other; both where 0 never occurs and the
        number of the options neither.
    """
    numbers = [
        (int(answer), len(options))
        for options, answer in questions
        if _is_index(answer) and int(answer) <= len(options) and not any(map(_is_number, options))
    ]
    fitting = [first for first in (0, 1) if all(first <= number < first + count for number, count in numbers)]
    return tuple(fitting) if numbers else ()


def _is_index(answer: Any) -> bool:
    return isinstance(answer, str) and bool(_INDEX.fullmatch(answer.strip()))


def _is_number(option: Any) -> bool:
    try:
        float(option)
    except (TypeError, ValueError):
        return False
    return True


def right_option(options: Sequence[Any], answers: Sequence[Any], firsts: Sequence[int], *, has_letters: bool) -> int:
    """The place of the one answer among the options, of which it is the text or, where none is, the letter or number.

    Args:
        firsts: see `possible_firsts`.
        has_letters: whether the options stand in columns of their letters, where an answer is first of all a letter.

    Raises:
        SampleError: it is none of these, or may be several.
    """
    (answer, *more) = answers
    letters = LETTERS[: len(options)]
    letter = answer.strip().upper() if isinstance(answer, str) and len(answer.strip()) == 1 else None
    if has_letters and not more and letter is not None and letter in letters:
        return letters.index(letter)
    if more or options.count(answer) > 1:
        raise SampleError(f"{shown(repr(answer))} is not the one right answer: it has several, or equal options")
    numbered = {int(answer) - first for first in firsts} & set(range(len(options))) if _is_index(answer) else set()
    if answer in options:
        numbered.add(options.index(answer))
    if len(numbered) > 1:
        raise SampleError(
            f"its answer {answer} may be {' or '.join(shown(repr(options[place])) for place in sorted(numbered))}: by "
            "the file's other answers it is the number of an option; write the option's letter"
        )
    if numbered:
        return numbered.pop()
    if letter is not None and letter in letters:
        return letters.index(letter)
    raise SampleError(f"its answer is {shown(repr(answer))}, which is neither one of its options nor a letter of one")


def listed_beside(names: Iterable[str], rows: Sequence[Row], answer_of: Callable[[Row], Any]) -> list[str]:
    """Which of these columns have, in each row that fills them, a list of different texts with the right answer in it:
    options under any name.
    """

    def has_answer(row: Row, name: str) -> bool:
        if not isinstance(row[name], str | list) or (isinstance(row[name], str) and not is_list_literal(row[name])):
            return False
        try:
            texts = texts_in(row[name], name)
        except SampleError:  # not counted: a column of anything else
            return False
        return len(texts) > 1 and texts.count(text_of(answer_of(row))) == 1 and len(set(map(str, texts))) == len(texts)

    filled = {name: [row for row in rows if not is_empty(row.get(name))] for name in names}
    return [name for name, some in filled.items() if some and all(has_answer(row, name) for row in some)]
