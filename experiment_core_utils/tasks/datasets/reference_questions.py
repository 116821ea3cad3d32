"""Questions of general knowledge without pictures, for language models: capitals, opposites, plurals, sums and more.

The questions, their answers and options were written for this project. `reference_questions` asks them open,
`reference_questions_choice` with four options of the same kind, whose right letters are evenly spread.
"""

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import parse_json
from experiment_core_utils.tasks.datasets.files.data_file import CHOICE_STYLE, OPEN_STYLE
from experiment_core_utils.tasks.datasets.questions import QuestionRow, RowTask, check_template
from experiment_core_utils.tasks.interface import Sample

QUESTIONS_FILE = Path(__file__).parent / "reference_questions.jsonl"


@cache
def _questions() -> tuple[Mapping[str, Any], ...]:
    lines = QUESTIONS_FILE.read_text(encoding="utf-8").splitlines()
    return tuple(parse_json(line, QUESTIONS_FILE.name) for line in lines)


class ReferenceQuestions(RowTask):
    """The questions as open ones; implements `Task`.

    Args:
        split: `validation`, the only one.
        prompt_template: in place of the task's own; its fields are {question}, {style} and {options}.

    Raises:
        ConfigurationError: another split, or a template that cannot be filled.
    """

    name = "reference_questions"
    metric = "relaxed"
    style = OPEN_STYLE
    max_new_tokens = 64
    _fields: tuple[str, ...] = ("question",)

    def __init__(self, split: str = "validation", prompt_template: str | None = None) -> None:
        if split != "validation":
            raise ConfigurationError(f"{self.name} has no split {split!r}: give validation")
        self.split = split
        self._template = None if prompt_template is None else check_template(prompt_template, self._fields)
        digest = hashlib.sha256(QUESTIONS_FILE.read_bytes()).hexdigest()
        self.source: Mapping[str, str] = {"read_from": "package", "file": QUESTIONS_FILE.name, "sha256": digest}

    def __len__(self) -> int:
        return len(_questions())

    def __getitem__(self, index: int) -> Sample:
        return self.row_at(index).sample(index, (), self.question_type(index))

    def row_at(self, index: int) -> QuestionRow:
        row = _questions()[self._checked(index)]
        return QuestionRow(str(index), f"question {index}", row["question"], tuple(row["answers"]), None)

    def question_type(self, index: int) -> str:
        return str(_questions()[self._checked(index)]["type"])


class ReferenceQuestionsChoice(ReferenceQuestions):
    """The same questions with four options each."""

    name = "reference_questions_choice"
    metric = "mc"
    style = CHOICE_STYLE
    _fields = ("question", "options")

    def row_at(self, index: int) -> QuestionRow:
        row = _questions()[self._checked(index)]
        options, right = tuple(row["options"]), row["answer_index"]
        name = f"question {index}"
        return QuestionRow(str(index), name, row["question"], (options[right],), None, {}, options, right)
