"""COCO captions 2014 (arXiv 1504.00325): five captions of each picture."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.datasets.hub_tables import HubDataset
from experiment_core_utils.tasks.datasets.published import Place, PublishedTask, coco_splits
from experiment_core_utils.tasks.datasets.questions import QuestionRow, listed, picture_file
from experiment_core_utils.tasks.datasets.tables import OfficialFile, Row

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
        """See `PublishedTask`. A row's id is its file's name; the picture's number follows the last underscore."""
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
        """See `PublishedTask`."""
        return "caption"

    def official_rows(self, files: Sequence[OfficialFile]) -> list[Row]:
        """See `PublishedTask`: the pictures in their file's order, each with its captions in the order of their ids."""
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
