"""MMMU (arXiv 2311.16502): college questions with one to seven pictures, multiple-choice and open.

A question with several is a failed sample for models that take one, counted with its reason.
"""

import string
from types import MappingProxyType
from typing import Any

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.datasets.hub_tables import HubDataset
from experiment_core_utils.tasks.datasets.published import Place, PublishedTask, SplitSource, present
from experiment_core_utils.tasks.datasets.questions import QuestionRow, literal_list
from experiment_core_utils.tasks.datasets.tables import Row
from experiment_core_utils.tasks.interface import Sample

_PICTURES = tuple(f"image_{number}" for number in range(1, 8))
_METADATA_KEYS = ("subfield", "topic_difficulty", "img_type")
_OPEN_STYLE = "vqa2"


def open_answers(text: str) -> list[Any]:
    """The answers of an open question: a list in Python's notation, or one text (which an interval ``[0, 1)`` is)."""
    try:
        return literal_list(text, "answer") if text.startswith("[") else [text]
    except SampleError:
        return [text]


def subject_of(question_id: str) -> str:
    """``Art_Theory`` of ``validation_Art_Theory_12``."""
    return question_id.partition("_")[2].rpartition("_")[0]


class MMMU(PublishedTask):
    """The marks ``<image 1>`` stay in the text; of several pictures each takes its mark's place in a prompt.

    There are no official files besides those on the hub.
    """

    name = "mmmu"
    metric = "mmmu_score"
    max_new_tokens = 128
    style = "a_okvqa_mc"
    hub = HubDataset("lmms-lab-encoder/MMMU", config=None, revision="main")
    splits = MappingProxyType(
        {"validation": SplitSource("validation", on_hub=True), "dev": SplitSource("dev", on_hub=True)}
    )
    unanswered = ("test",)
    columns = frozenset({"id", "question", "options", "answer", "question_type", *_PICTURES})
    type_columns = ("id",)
    required_fields = ("question", "options")

    def question_of(self, row: Row, place: Place) -> QuestionRow:
        filled = [name for name in _PICTURES if row[name] is not None]
        if not filled or (len(filled) > 1 and filled != list(_PICTURES[: len(filled)])):
            raise SampleError(f"question {row['id']} has {', '.join(filled) or 'no'} pictures, not those from 1 on")
        pictures = [row[name] for name in filled]
        metadata = {
            **present(row, _METADATA_KEYS),
            "question_format": row["question_type"],
            "num_images": len(pictures),
        }
        fields = {
            "question_id": row["id"],
            "image_id": row["id"],
            "question": row["question"],
            "picture": pictures[0],
            "further_pictures": tuple(pictures[1:]),
        }
        form = row["question_type"].replace("_", "-").lower()
        if form not in ("multiple-choice", "open"):
            raise SampleError(f"question {row['id']} is of type {row['question_type']!r}, not multiple-choice or open")
        if form == "open":
            answers = open_answers(row["answer"])
            return QuestionRow(**fields, answers=tuple(str(entry) for entry in answers), metadata=metadata)
        options = tuple(str(option) for option in literal_list(row["options"], f"options of {row['id']}"))
        index = string.ascii_uppercase.find(row["answer"]) if len(row["answer"]) == 1 else -1
        if not 0 <= index < len(options):
            raise SampleError(f"the answer of {row['id']} is {row['answer']!r}, none of its {len(options)} options")
        return QuestionRow(**fields, answers=(options[index],), metadata=metadata, options=options, answer_index=index)

    def type_of(self, row: Row, place: Place) -> str:
        return subject_of(row["id"])

    def style_of(self, sample: Sample) -> str:
        """Molmo's style is for multiple choice, and its short answers are for open questions."""
        return self.style if sample.options else _OPEN_STYLE
