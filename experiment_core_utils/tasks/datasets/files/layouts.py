"""Cells as data sets of the hub are laid out, by their shape: turns of a talk, options with labels, answers with more.

A row comes in by our names for its columns, and goes out with a question, options and answers as texts.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.primitives.files import parse_json
from experiment_core_utils.primitives.texts import counted, shown
from experiment_core_utils.tasks.datasets.files.columns import is_empty, ours_near
from experiment_core_utils.tasks.datasets.tables import Row

# Keys of a turn: who speaks, and what is said.
_TURNS = (("role", "content"), ("from", "value"))
_SPEAKERS = {
    "system": "system", "user": "user", "human": "user", "assistant": "answer", "gpt": "answer", "model": "answer"
}  # fmt: skip
# Keys of what is right, in an object or in each of a list of them.
_RIGHT = ("ground_truth", "answer", "answers", "text", "value")
_MARK = "<image>"


def columns_by_shape(rows: Sequence[Row], names: Collection[str], given: Mapping[str, str]) -> dict[str, str]:
    """The columns of turns, of options with labels and of what is right, by our names, where no column has these.

    Args:
        rows: the first ones.
        given: our names that have a column already.

    Raises:
        ConfigurationError: several columns have turns.
    """
    cells = {name: [_parsed(row[name]) for row in rows if not is_empty(row.get(name))] for name in names}
    taken, found = {*given, *names}, dict[str, str]()

    def shaped(is_so: Callable[[Any], bool]) -> list[str]:
        free = [name for name in names if name not in (*given.values(), *found.values())]
        return [name for name in free if cells[name] and all(map(is_so, cells[name]))]

    if "question" not in taken and (talks := shaped(_is_talk)):
        if len(talks) > 1:
            raise ConfigurationError(
                f"{shown(', '.join(talks))} have turns of a talk; give the one to ask by --columns question={talks[0]}"
            )
        found["question"] = talks[0]
    if "options" not in taken and len(labelled := shaped(lambda cell: _with_labels(cell) is not None)) == 1:
        found["options"] = labelled[0]
    if not {"answer", "answers"} & taken:
        right = shaped(lambda cell: isinstance(cell, Mapping) and _RIGHT[0] in cell)
        if "options" in found:
            right += [name for name in shaped(lambda cell: isinstance(cell, str | int)) if ours_near(name) == "answer"]
        found |= {"answer": right[0]} if len(right) == 1 else {}
    pictures = [name for name in names if ours_near(name) == "image" and cells[name]]
    if found and "image" not in taken and len(pictures) == 1:
        found["image"] = pictures[0]
    return found


def unfolded(given: Mapping[str, Any]) -> dict[str, Any]:
    """The row by our names with a question, options and answers as texts; other cells as they are.

    A text of the system stands before the question. Of pictures in a talk several are numbered, the mark of one is left
    out.

    Raises:
        SampleError: a talk that is not one question with at most one answer, or that has a picture in it.
    """
    row = dict(given)
    question = _parsed(row.get("question"))
    if isinstance(question, Mapping) and isinstance(question.get("stem"), str):
        row["question"] = question["stem"]
        row.setdefault("options", question.get("choices"))
    elif _is_talk(question):
        asked, answer = _asked_and_answered(question)
        row["question"] = asked
        if answer is not None and not {"answer", "answers"} & row.keys():
            row["answer"] = answer
    labels: Sequence[str] = ()
    if (options := _with_labels(_parsed(row.get("options")))) is not None:
        labels, row["options"] = options
    for name in ("answer", "answers"):
        right = _right_in(_parsed(row.get(name)))
        if right is not None:
            del row[name]
            row |= {"answer": right[0]} if len(right) == 1 and name == "answer" else {"answers": right}
    if str(row.get("answer")) in labels:
        row["answer"] = row["options"][labels.index(str(row["answer"]))]
    return row


def _parsed(cell: Any) -> Any:
    """A text of JSON as what it contains; any other cell as it is."""
    if not (isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{")):
        return cell
    try:
        return parse_json(cell, "it")
    except ConfigurationError:  # a text that begins with a bracket
        return cell


def _turn(cell: Any) -> tuple[Any, Any] | None:
    if not isinstance(cell, Mapping):
        return None
    return next(((cell[who], cell[what]) for who, what in _TURNS if cell.keys() >= {who, what}), None)


def _is_talk(cell: Any) -> bool:
    return isinstance(cell, list) and bool(cell) and all(_turn(each) is not None for each in cell)


def _asked_and_answered(talk: Sequence[Any]) -> tuple[str, str | None]:
    said: dict[str, list[str]] = {"system": [], "user": [], "answer": []}
    for who, what in filter(None, map(_turn, talk)):
        if who not in _SPEAKERS:
            raise SampleError(f"a turn of it is by {shown(who)}; give turns of system, user and assistant alone")
        said[_SPEAKERS[who]].append(_text_of(what))
    if len(said["user"]) != 1 or len(said["answer"]) > 1:
        raise SampleError(
            f"its talk has {counted(len(said['user']), 'question')} and {counted(len(said['answer']), 'answer')}; "
            "write a row for each question"
        )
    asked = "\n".join(filter(None, [*said["system"], *said["user"]]))
    if asked.count(_MARK) == 1:
        asked = re.sub(rf"\s*{_MARK}\s*", " ", asked).strip()
    number = iter(range(1, asked.count(_MARK) + 1))
    return re.sub(_MARK, lambda _: f"<image {next(number)}>", asked), next(iter(said["answer"]), None)


def _text_of(content: Any) -> str:
    """What a turn says, of parts in order, with a mark for each picture."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise SampleError(f"a turn of it says {shown(content)}; give a text, or a list of parts")
    texts = []
    for part in content:
        if any(not is_empty(part.get(key)) for key in ("image", "image_url", "url", "path", "bytes")):
            raise SampleError("a picture stands in a turn of it; put it into a column image, and its mark <image> here")
        is_text = isinstance(part.get("text"), str) and part.get("type") in (None, "text")
        if not is_text and part.get("type") != "image":
            raise SampleError(f"a part of a turn of it is {shown(part)}; give parts of text and marks of pictures")
        texts.append(part["text"] if is_text else _MARK)
    return "".join(texts)


def _with_labels(cell: Any) -> tuple[list[str], list[Any]] | None:
    """Labels and texts of options that have both; None for any other cell."""
    if isinstance(cell, list) and cell and all(isinstance(each, Mapping) for each in cell):
        if all(each.keys() >= {"label", "text"} for each in cell):
            return [str(each["label"]) for each in cell], [each["text"] for each in cell]
        return None
    if not isinstance(cell, Mapping):
        return None
    labels, texts = cell.get("label"), cell.get("text")
    if isinstance(labels, list) and isinstance(texts, list) and len(labels) == len(texts) > 1:
        return list(map(str, labels)), texts
    filled = {label: text for label, text in cell.items() if text is not None}
    if len(filled) > 1 and all(re.fullmatch(r"[A-Za-z]|\d", str(label)) for label in filled):
        return list(map(str, filled)), list(filled.values())
    return None


def _right_in(cell: Any) -> list[Any] | None:
    """What is right of an object, or of each of a list of them, with other names of it; None for any other cell."""
    if isinstance(cell, Mapping):
        key = next((key for key in _RIGHT if not is_empty(cell.get(key))), None)
        if key is None:
            return None
        found = cell[key] if isinstance(cell[key], list) else [cell[key]]
        return [*found, *(each for each in cell.get("aliases") or () if each not in found)]
    if isinstance(cell, list) and cell and all(isinstance(each, Mapping) for each in cell):
        parts = [_right_in(each) for each in cell]
        return None if None in parts else [text for part in parts for text in part or ()]
    return None
