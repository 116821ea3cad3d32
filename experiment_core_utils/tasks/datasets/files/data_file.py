"""A task made from your own file, folder or dataset of the hub; see docs/datasets.md."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from experiment_core_utils.primitives.errors import LIBRARY_ERRORS, ConfigurationError, SampleError, first_line
from experiment_core_utils.primitives.texts import counted, is_text, shown
from experiment_core_utils.tasks.datasets.files.answer_cells import (
    listed_beside,
    possible_firsts,
    refuse_series,
    right_option,
    text_of,
    texts_in,
    with_whole_numbers,
)
from experiment_core_utils.tasks.datasets.files.columns import LETTERS, Columns, is_empty
from experiment_core_utils.tasks.datasets.files.file_rows import read_rows
from experiment_core_utils.tasks.datasets.files.layouts import columns_by_shape, unfolded
from experiment_core_utils.tasks.datasets.files.picture_cells import pictures_in
from experiment_core_utils.tasks.datasets.pictures import PictureFolders
from experiment_core_utils.tasks.datasets.questions import (
    UNTYPED,
    QuestionRow,
    RowTask,
    check_template,
    check_texts,
    is_list_literal,
)
from experiment_core_utils.tasks.datasets.tables import Row
from experiment_core_utils.tasks.interface import Answer, Metric, Sample
from experiment_core_utils.tasks.scoring.likelihood import right_scores

# Molmo's names of short answers and of multiple choice.
OPEN_STYLE, CHOICE_STYLE = "vqa2", "a_okvqa_mc"
OPEN_METRIC, CHOICE_METRIC = "em_lenient", "mc"
# What is advised in place of a metric that cannot score the rows, in this order.
# So many rows are looked at for options that no column is named after.
_INSPECTED_ROWS = 20
_ADVISED = ("em_lenient", "relaxed", "mc", "vqa_score", "anls", "mmmu_score")


class DataFileTask(RowTask):
    """The rows of a file. Implements `Task`.

    Args:
        path: a file, a folder or a dataset of the hub; see `file_rows.read_rows`.
        data_dir: what the paths of pictures are relative to, and where they have to lie; None: the file's folder.
        cache_dir: where the `datasets` library keeps what it converts or downloads; None: its own place.
        prompt_template: instead of Molmo's; its fields are {question}, {style} and {options}.
        columns: the file's columns by our names, where they are called otherwise.
        text_only: whether the pictures are left out.
        split, revision: of a folder or a dataset of the hub.
        lists_options: whether a prompt has to list them.

    Attributes:
        metric: `mc` where every row has options, `em_lenient` where none has; "" where only some have.
        has_pictures: whether any row has a picture that is read.
        remarks: what to know of the rows before their scores are read, a sentence each.

    Raises:
        ConfigurationError: no such file, no row that can be used, columns that would not be read, or a template that
            cannot be filled.
    """

    style = f"{OPEN_STYLE}, with options {CHOICE_STYLE}"
    max_new_tokens = 64

    def __init__(
        self,
        path: Path,
        *,
        data_dir: Path | None = None,
        cache_dir: Path | None = None,
        prompt_template: str | None = None,
        columns: Mapping[str, str] | None = None,
        text_only: bool = False,
        split: str | None = None,
        revision: str | None = None,
        lists_options: bool = True,
    ) -> None:
        if data_dir is not None and not data_dir.is_dir():
            raise ConfigurationError(f"--data_dir {data_dir} is not a folder; give the folder of the pictures")
        self._path = path
        self._file = file = read_rows(path, cache_dir, split, revision)
        self.name = re.sub(r"[^A-Za-z0-9]+", "_", file.name).strip("_")[:60] or "data_file"
        self.split = file.split
        self.source: Mapping[str, str] = file.source
        folders = file.folders if data_dir is None else (data_dir,)
        self._pictures = PictureFolders(folders, folders, exactly=True)
        named = {**file.mapping, **(columns or {})}
        first_rows = [row for row, _ in zip(file.inspected(), range(_INSPECTED_ROWS), strict=False)]
        try:
            shaped = columns_by_shape(first_rows, file.columns, named)
        except ConfigurationError as error:
            raise ConfigurationError(f"--data_file {path}: {error}") from error
        self._columns = Columns.of(file.columns, shaped | named, path)
        self._columns.refuse_near(file.inspected, lambda name: any(file.filled(name)), text_only=text_only)
        near = self._columns.all_near_pictures(file.inspected) if text_only else ()
        num_pictures = sum(map(any, zip(*map(file.filled, (*self._columns.pictures, *near)), strict=True)))
        self.has_pictures = num_pictures > 0 and not text_only
        left_out = text_only and num_pictures > 0
        rows_with = counted(num_pictures, "row")
        self.remarks: list[str] = [f"--text_only: the pictures of {rows_with} are left out"] * left_out
        if shaped:
            pairs = " ".join(f"{name}={column}" for name, column in shaped.items())
            self.remarks.append(f"columns are read by their shape, as by --columns {shown(pairs)}")
        rows = file.select([name for name in file.columns if name not in self._columns.pictures])
        texts = self._with_numbers_read(rows)
        self._questions = [self._question_or_reason(row, where) for row, where in zip(texts, file.where, strict=True)]
        self._types = [None if isinstance(row, str) else self._columns.cell(row, "type") for row in texts]
        # As in VLMEvalKit's files: rows that share a picture name the row that has it.
        self._row_of_index = {
            str(row["index"]): at for at, row in enumerate(texts) if not isinstance(row, str) and "index" in row
        }
        self._check_usable()
        has_options = {bool(question.options) for question in self._questions if isinstance(question, QuestionRow)}
        self.metric = "" if len(has_options) > 1 else CHOICE_METRIC if True in has_options else OPEN_METRIC
        self._template = prompt_template
        if prompt_template is not None:
            names_options = lists_options and True in has_options
            check_template(prompt_template, ("question", "options") if names_options else ("question",))

    def __len__(self) -> int:
        return len(self._questions)

    def __getitem__(self, index: int) -> Sample:
        """The pictures are read and decoded here and not before."""
        try:
            question = self.row_at(index)
            opened = [self._pictures.opened(picture, question.image_id) for picture in question.pictures]
        except SampleError as error:
            # Of its own class: a sample that is out of time says so.
            raise type(error)(f"{self._file.where[index]}: {error}") from error
        return question.sample(index, opened, self.question_type(index))

    def faults(self, indices: Iterable[int]) -> Iterator[str]:
        """Of each of these rows that cannot be used, where it is and why; only the headers of pictures are read."""
        for index in indices:
            where = self._file.where[index]
            try:
                question = self.row_at(index)
                for picture in question.pictures:
                    self._pictures.check(picture, question.image_id)
            except SampleError as error:
                yield f"{where}: {error}"
            except LIBRARY_ERRORS as error:
                yield f"{where}: it cannot be read ({type(error).__name__}: {shown(first_line(error))})"

    def row_at(self, index: int) -> QuestionRow:
        question = self._questions[self._checked(index)]
        if isinstance(question, str):
            raise SampleError(question)
        if not self.has_pictures:
            return question
        cells, shared = self._picture_cells(index)
        pictures = [each for cell in cells for each in pictures_in(cell)]
        name = _name_of(pictures[0]) if pictures else None
        return replace(
            question,
            image_id=name or self._file.where[shared],
            picture=pictures[0] if pictures else None,
            further_pictures=tuple(pictures[1:]),
        )

    def question_type(self, index: int) -> str:
        """A row that cannot be read or has no type is of type `all`."""
        found = text_of(self._types[self._checked(index)])
        return found if is_text(found) and found else UNTYPED

    def style_of(self, sample: Sample) -> str:
        return CHOICE_STYLE if sample.options else OPEN_STYLE

    def check_scorable(self, metric: Metric, known: Sequence[Metric]) -> None:
        """Score each row's own right answer. A row in which it scores 0 cannot be used from now on.

        Args:
            known: the project's metrics, of which one that suits is advised; of others, what is their best is not
                questioned.

        Raises:
            ConfigurationError: the metric gives no row's right answer its best score, or can score none.
        """
        usable = {at: each for at, each in enumerate(self._questions) if isinstance(each, QuestionRow)}
        if not metric.scores_each_answer:
            usable = dict(list(usable.items())[:1])
        least = metric.best if metric in known and metric.scores_each_answer else 0.0
        faults, below = dict[int, str](), dict[int, float]()
        # Rows of equal references score alike.
        score_of = cache(lambda *of_row: _best_score(metric, *of_row))
        for at, question in usable.items():
            try:
                value = score_of(question.answers, question.options, question.answer_index, self.question_type(at))
            except SampleError as error:
                faults[at] = f"--metric {metric.name} cannot score it: {error}"
                continue
            if value == 0:
                faults[at] = f"--metric {metric.name} gives even its right answer {_shown_answer(question)} 0"
            elif value is not None and value < least:
                below[at] = value
        first = min((*faults, *below), default=None)
        if first is not None and len(faults) + len(below) == len(usable):
            raise ConfigurationError(self._unscorable(first, faults.get(first), below.get(first), metric, known))
        if below:
            at = min(below)
            self.remarks.append(
                f"{len(below)} of {counted(len(usable), 'row')} cannot reach {metric.best:g} by {metric.name}: even "
                f"the right answer gets less, the first is {self._file.where[at]} ({below[at]:.3g}, of "
                f"{counted(len(usable[at].answers), 'answer')})"
            )
        if faults:
            self._questions = [faults.get(at, each) for at, each in enumerate(self._questions)]
            self._check_usable()

    def _unscorable(
        self, at: int, fault: str | None, value: float | None, metric: Metric, known: Sequence[Metric]
    ) -> str:
        """Why a metric scores no row, by the row at `at`, and which metric does."""
        question, where = self._questions[at], self._file.where[at]
        assert isinstance(question, QuestionRow)
        suited = [each.name for each in known if each.name in _ADVISED and _scores_best(each, question)]
        names = sorted(suited, key=_ADVISED.index)[:2]
        advice = "no metric does better: correct its answers"
        if names:
            advice = f"choose one that gives it its best, such as {' or '.join(names)}"
        if fault is not None and "cannot score" in fault:
            reason = fault.partition("cannot score it: ")[2]
            return f"--metric {metric.name} cannot score the rows of {self._path}: {where}: {reason}; {advice}"
        answer = _shown_answer(question)
        return f"--metric {metric.name} gives even the right answer {answer} of {where} {value or 0:.3g}; {advice}"

    def _picture_cells(self, index: int) -> tuple[list[Any], int]:
        """The cells of a row's pictures, and the row that they are in."""
        row = self._file.row(index)
        filled = [picture for picture in self._columns.pictures if not is_empty(row.get(picture))]
        for name in filled:
            _check_utf8(name, row[name])
        if not filled and (near := self._columns.near_pictures(row)):
            raise SampleError(f"it has no image, and its {shown(', '.join(near))} would not be read; call it image")
        if filled != list(self._columns.pictures[: len(filled)]) and "image" not in self._columns.by_name:
            raise SampleError(f"its pictures are {', '.join(filled)}, with an empty one before the last; close the gap")
        if len(filled) > 1 and self._columns.by_name.get("image") in filled:
            raise SampleError(f"it has pictures in {', '.join(filled)}; give image or image_1, image_2, ...")
        cells = [row[name] for name in filled]
        at = self._row_of_index.get(str(cells[0]), index) if len(cells) == 1 else index
        return (cells if at == index else [self._file.row(at).get(filled[0])]), at

    def _with_numbers_read(self, rows: Sequence[Row | str]) -> Sequence[Row | str]:
        """The rows with whole numbers as such; what numbers and unread lists are taken for is added to the remarks."""
        columns, named = self._columns, ("answer", "answers", "type", *LETTERS)
        rows, changed = with_whole_numbers(rows, [columns.by_name[name] for name in named if name in columns.by_name])
        if changed:
            self.remarks.append(
                f"{', '.join(changed)}: 2.0 is read as 2, since pandas writes whole numbers so beside empty cells"
            )
        choices = [choice for row in rows if not isinstance(row, str) and (choice := self._choice(row)) is not None]
        self._firsts = possible_firsts(choices)
        if len(self._firsts) == 1:
            self.remarks.append(f"answers that are numbers are read as those of options, from {self._firsts[0]}")
        first_rows = [row for row in rows[:_INSPECTED_ROWS] if not isinstance(row, str)]
        lists = [] if choices else listed_beside(columns.others, first_rows, lambda row: columns.cell(row, "answer"))
        if lists:
            self.remarks.append(
                f"{shown(', '.join(lists))} contains the right answer among others and is not read: if these are the "
                f"options, give --columns options={lists[0]}"
            )
        return rows

    def _choice(self, row: Row) -> tuple[Sequence[Any], Any] | None:
        """Options and right answer of a row that has both, as they are written; None of any other."""
        try:
            given = unfolded(self._columns.own(row))
            if "options" not in given or "answer" not in given:
                return None
            return texts_in(given["options"], "options"), text_of(given["answer"])
        except SampleError:  # not counted: it is a failed sample where it is requested
            return None

    def _question_or_reason(self, row: Row | str, where: str) -> QuestionRow | str:
        try:
            return row if isinstance(row, str) else self._question(row, where)
        except SampleError as error:
            return str(error)

    def _question(self, row: Row, where: str) -> QuestionRow:
        """The row without its pictures; raises SampleError for one that is no question."""
        given = unfolded(self._columns.own(row))
        for name, value in given.items():
            _check_utf8(name, value)
        if "question" not in given:
            raise SampleError(f"it has no question; its columns are {shown(', '.join(row))}")
        if len(given.keys() & {"answer", "answers"}) != 1:
            cells = [self._columns.cell(row, name) for name in ("answer", "answers")]
            read = [f" ({cell} is read as empty)" for cell in cells if is_text(cell) and cell and is_empty(cell)]
            which = "both answer and answers" if "answer" in given else "neither answer nor answers"
            raise SampleError(f"it has {which}{''.join(read)}; give one of them")
        answer = given.get("answer")
        refuse_series(answer, "answer")
        if isinstance(answer, list) or (isinstance(answer, str) and is_list_literal(answer)):
            raise SampleError("its answer is a list; call the column answers")
        answers = (text_of(answer),) if "answer" in given else texts_in(given["answers"], "answers")
        if not answers:
            raise SampleError("its answers are an empty list; give at least one")
        if any(isinstance(each, str) and not each.strip() for each in answers):
            raise SampleError("an answer of it is empty; leave that out, or the row where nothing is right")
        options, index = texts_in(given.get("options", []), "options"), None
        if options:
            index = right_option(options, answers, self._firsts, has_letters=bool(self._columns.letters))
            answers = (options[index],)
        elif near := self._columns.near_options(row):
            raise SampleError(f"it has no options, and its {shown(', '.join(near))} would not be read; call it options")
        asked, hint = given["question"], row.get("hint")
        if self._columns.letters and is_text(hint) and not is_empty(hint):
            asked = f"{hint}\n{asked}"
        others = {name: row[name] for name in self._columns.others if name in row and _is_metadata(row[name])}
        question = QuestionRow(where, where, asked, answers, None, others | {"row": where}, options, index)
        check_texts(question)
        return question

    def _check_usable(self) -> None:
        reason = ""
        for index in range(len(self)):
            try:
                self[index]
                return
            except SampleError as error:
                reason = reason or f": {error}"
        raise ConfigurationError(
            f"--data_file {self._path} has {counted(len(self), 'row')} and none can be used{reason}; see "
            "docs/datasets.md for its form"
        )


def _best_score(
    metric: Metric, answers: tuple[str, ...], options: tuple[str, ...], answer_index: int | None, question_type: str
) -> float | None:
    """What the best of a row's own right answers scores; None where one answer alone has no score."""
    right = [each.strip() for each in dict.fromkeys(answers)]
    if answer_index is not None:
        right.append(LETTERS[answer_index])
    best: float | None = None
    for prediction in right:
        answer = Answer(prediction, answers, options, answer_index, question_type, image_id="any")
        if getattr(metric, "scored", None) is not None:
            answer = replace(answer, scores=right_scores(answer))
        value = metric.score([answer]).overall
        best = value if best is None or value is None else max(best, value)
        if best is not None and best >= metric.best:
            break
    return best


def _scores_best(metric: Metric, question: QuestionRow) -> bool:
    try:
        of_row = question.answers, question.options, question.answer_index, UNTYPED
        return _best_score(metric, *of_row) == metric.best
    except SampleError:
        return False


def _shown_answer(question: QuestionRow) -> str:
    return shown(repr(question.answers[0]))


def _check_utf8(name: str, value: Any) -> None:
    odd = [ord(each) - 0xDC00 for each in value if "\udc80" <= each <= "\udcff"] if isinstance(value, str) else []
    if odd:
        raise SampleError(
            f"its {name} has a byte that is not UTF-8 (0x{odd[0]:02x}), as of Windows-1252 or Latin-1; save the file "
            "as UTF-8"
        )


def _is_metadata(value: Any) -> bool:
    """Whether a cell of a further column can be in a result file: a text or a number."""
    return is_text(value) or (isinstance(value, int | float) and value - value == 0)


def _name_of(picture: Mapping[str, Any] | None) -> str | None:
    name = None if picture is None else picture.get("path")
    return name if is_text(name) else None
