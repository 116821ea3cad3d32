"""TextVQA (arXiv 1904.08920): questions about text in photographs, ten answers each."""

from collections.abc import Sequence
from types import MappingProxyType

from experiment_core_utils.tasks.datasets.hub_tables import HubDataset
from experiment_core_utils.tasks.datasets.published import PublishedTask, SplitSource, present
from experiment_core_utils.tasks.datasets.questions import picture_file
from experiment_core_utils.tasks.datasets.tables import OfficialFile, Row

# The training and validation pictures come in one archive.
_PICTURES = ("train_images", "train_val_images/train_images")


class TextVQA(PublishedTask):
    """TextVQA, with the question as it is written: not capitalised, without OCR tokens."""

    name = "text_vqa"
    metric = "vqa_score"
    max_new_tokens = 64
    style = "text_vqa"
    hub = HubDataset("lmms-lab-encoder/textvqa", config=None, revision="main")
    splits = MappingProxyType(
        {
            name: SplitSource(name, on_hub=True, files=(f"TextVQA_0.5.1_{short}.json",), pictures=_PICTURES)
            for name, short in (("validation", "val"), ("train", "train"))
        }
    )
    unanswered = ("test",)
    columns = frozenset({"question_id", "image_id", "question", "image", "answers"})
    kept_columns = ("ocr_tokens", "image_classes")

    def official_rows(self, files: Sequence[OfficialFile]) -> list[Row]:
        needed = ("question_id", "image_id", "question", "answers")
        entries, kept = files[0].entries("data", needed), (*needed, "image_classes")
        return [{**present(entry, kept), "image": picture_file(f"{entry['image_id']}.jpg")} for entry in entries]
