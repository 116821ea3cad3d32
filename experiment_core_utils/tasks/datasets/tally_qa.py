"""TallyQA (arXiv 1810.12440): counting questions about COCO and Visual Genome pictures, simple and complex."""

from collections.abc import Sequence
from types import MappingProxyType

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.primitives.texts import shown
from experiment_core_utils.tasks.datasets.hub_tables import HubDataset
from experiment_core_utils.tasks.datasets.published import (
    Place,
    PublishedTask,
    SplitSource,
    Table,
    file_stem,
    list_of_records,
)
from experiment_core_utils.tasks.datasets.questions import UNTYPED, QuestionRow, picture_file
from experiment_core_utils.tasks.datasets.tables import OfficialFile, Row


class TallyQA(PublishedTask):
    """One question is one sample, scored by its own answer: a row of the hub has all questions about a picture."""

    name = "tally_qa"
    metric = "em"
    max_new_tokens = 16
    style = "tally_qa"
    hub = HubDataset("vikhyatk/tallyqa-test", config=None, revision="main")
    splits = MappingProxyType(
        {
            "test": SplitSource("test", on_hub=True, files=("test.json",), pictures=(".",)),
            "train": SplitSource("train", on_hub=False, files=("train.json",), pictures=(".",)),
        }
    )
    columns = frozenset({"image", "qa"})
    type_columns = ("qa",)

    def places_of(self, table: Table) -> Sequence[Place]:
        return [
            Place(number, item)
            for number, row in enumerate(table.select(("qa",)))
            for item in range(len(list_of_records(row["qa"] or ())))
        ]

    def question_of(self, row: Row, place: Place) -> QuestionRow:
        """The hub's rows have no ids: row and place are used instead."""
        pair = list_of_records(row["qa"])[place.item]
        question_id = str(pair["question_id"]) if "question_id" in pair else f"{place.row}-{place.item}"
        if not isinstance(pair["answer"], str | int | None):
            raise SampleError(f"the answer is {shown(repr(pair['answer']))}, neither a number nor a text")
        named = row["image_name"] if "image_name" in row else file_stem(row["image"])
        return QuestionRow(
            question_id=question_id,
            image_id=named or f"row-{place.row}",
            question=pair["question"],
            answers=() if pair["answer"] is None else (str(pair["answer"]),),
            picture=row["image"],
            metadata={"is_simple": pair["is_simple"]},
        )

    def type_of(self, row: Row, place: Place) -> str:
        simple = list_of_records(row["qa"])[place.item]["is_simple"]
        if simple is None:
            return UNTYPED
        return "simple" if simple else "complex"

    def official_rows(self, files: Sequence[OfficialFile]) -> list[Row]:
        """There is one row for each question, in the file's order."""
        rows: list[Row] = []
        for entry in files[0].entries(None, ("question_id", "image", "question", "answer")):
            pair = {
                "question_id": entry["question_id"],
                "question": entry["question"],
                "answer": entry["answer"],
                "is_simple": bool(entry["issimple"]) if "issimple" in entry else None,
            }
            # Ids of COCO and of Visual Genome may be equal; the file's path is not.
            rows.append({"image": picture_file(entry["image"]), "image_name": entry["image"], "qa": [pair]})
        return rows
