"""Tasks on the pictures of COCO 2014, with several answers each.

VQA v2 (arXiv 1612.00837) and OK-VQA (arXiv 1906.00067): questions, ten answers each; captions (arXiv 1504.00325): five
of each picture.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.primitives.texts import shown
from experiment_core_utils.tasks.datasets.hub_tables import HubDataset
from experiment_core_utils.tasks.datasets.published import (
    Place,
    PublishedTask,
    coco_splits,
    list_of_records,
    present,
)
from experiment_core_utils.tasks.datasets.questions import QuestionRow, listed, picture_file
from experiment_core_utils.tasks.datasets.tables import OfficialFile, Row


def answer_texts(answers: Sequence[Any] | Mapping[str, Any]) -> tuple[str, ...]:
    """The annotators' answers as they gave them: OK-VQA's `answer` is a stem, with the text in `raw_answer`."""
    if isinstance(answers, list | tuple) and all(isinstance(answer, str) for answer in answers):
        return tuple(answers)
    records = list_of_records(answers)
    if not all(isinstance(record, Mapping) for record in records):
        raise SampleError(f"the answers are {shown(repr(answers))}, neither texts nor records")
    names = ["raw_answer" if "raw_answer" in record else "answer" for record in records]
    if not all(name in record for name, record in zip(names, records, strict=True)):
        raise SampleError("an answer has neither raw_answer nor answer")
    return tuple(record[name] for name, record in zip(names, records, strict=True))


class _CocoVQA(PublishedTask):
    """The layout that both share, on the hub and in the official files."""

    metric = "vqa_score"
    max_new_tokens = 16
    columns = frozenset({"question_id", "question", "image", "answers"})
    kept_columns = ("answer_type", "question_type", "multiple_choice_answer")

    def answers_of(self, row: Row) -> tuple[str, ...]:
        return () if row["answers"] is None else answer_texts(row["answers"])

    def official_rows(self, files: Sequence[OfficialFile]) -> list[Row]:
        """The questions are in their file's order, each with its annotation."""
        question_file, annotation_file = files
        answers = {
            entry["question_id"]: entry for entry in annotation_file.entries("annotations", ("question_id", "answers"))
        }
        rows: list[Row] = []
        for entry in question_file.entries("questions", ("question_id", "image_id", "question")):
            if entry["question_id"] not in answers:
                raise ConfigurationError(f"{annotation_file.path} has no answers to question {entry['question_id']}")
            annotation = answers[entry["question_id"]]
            name = f"COCO_{self.split.replace('validation', 'val')}2014_{int(entry['image_id']):012d}.jpg"
            rows.append(
                {
                    **present(annotation, self.kept_columns),
                    "question_id": entry["question_id"],
                    "image_id": entry["image_id"],
                    "question": entry["question"],
                    "answers": annotation["answers"],
                    "image": picture_file(name),
                }
            )
        return rows


class Coco2014VQA(_CocoVQA):
    """VQA v2, typed by its answer_type (yes/no, number, other)."""

    name = "coco_2014_vqa"
    style = "vqa2"
    hub = HubDataset("lmms-lab-encoder/VQAv2", config=None, revision="main")
    splits = coco_splits(
        ("validation", "train"),
        ("v2_OpenEnded_mscoco_{}2014_questions.json", "v2_mscoco_{}2014_annotations.json"),
    )
    unanswered = ("test", "testdev")
    columns = _CocoVQA.columns | {"answer_type"}
    type_columns = ("answer_type",)


class OKVQA(_CocoVQA):
    """OK-VQA, typed by its knowledge category (`question_type`) where the rows have it."""

    name = "okvqa"
    style = "okvqa"
    hub = HubDataset("lmms-lab-encoder/OK-VQA", config=None, revision="main")
    splits = coco_splits(
        ("val2014", "train2014"), ("OpenEnded_mscoco_{}2014_questions.json", "mscoco_{}2014_annotations.json")
    )
    type_columns = ("question_type",)


CAPTION_QUESTION = "Provide a one-sentence caption for the provided image."


class CocoCaption(PublishedTask):
    """Every picture is requested with the same words."""

    name = "coco_caption"
    metric = "cider_score"
    max_new_tokens = 64
    style = "coco_captioning"
    hub = HubDataset("lmms-lab-encoder/COCO-Caption", config=None, revision="main")
    splits = coco_splits(("val", "train"), ("captions_{}2014.json",))
    unanswered = ("test",)
    columns = frozenset({"question_id", "image", "answer"})
    required_fields = ()

    def question_of(self, row: Row, place: Place) -> QuestionRow:
        """A row's id is its file's name; the picture's number follows the last underscore."""
        number = Path(row["question_id"]).stem.rpartition("_")[2]
        if not number.isdecimal():
            raise SampleError(f"question_id {row['question_id']!r} is not the name of a COCO file")
        return QuestionRow(
            question_id=row["question_id"],
            image_id=str(int(number)),
            question=CAPTION_QUESTION,
            answers=listed(row["answer"], "answers"),
            picture=row["image"],
        )

    def type_of(self, row: Row, place: Place) -> str:
        return "caption"

    def official_rows(self, files: Sequence[OfficialFile]) -> list[Row]:
        """The pictures are in their file's order, each with its captions in the order of their ids."""
        captions = defaultdict(list)
        for entry in files[0].entries("annotations", ("image_id", "id", "caption")):
            captions[entry["image_id"]].append((entry["id"], entry["caption"]))
        return [
            {
                "question_id": entry["file_name"],
                "image": picture_file(entry["file_name"]),
                "answer": [caption for _, caption in sorted(captions[entry["id"]])],
            }
            for entry in files[0].entries("images", ("id", "file_name"))
        ]
