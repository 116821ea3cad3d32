"""DocVQA (arXiv 2007.00398): questions about scanned pages."""

from collections.abc import Sequence
from types import MappingProxyType

from experiment_core_utils.tasks.datasets.hub_tables import HubDataset
from experiment_core_utils.tasks.datasets.published import Place, PublishedTask, SplitSource, file_stem, present
from experiment_core_utils.tasks.datasets.questions import UNTYPED, listed, picture_file
from experiment_core_utils.tasks.datasets.tables import OfficialFile, Row

_PAGE = ("ucsf_document_id", "ucsf_document_page_no")


class DocVQA(PublishedTask):
    """Typed by the kinds of content that the question needs, sorted and joined, as in ``form+handwritten``."""

    name = "doc_qa"
    metric = "ansl_em"
    max_new_tokens = 32
    style = "doc_qa"
    hub = HubDataset("lmms-lab-encoder/DocVQA", config="DocVQA", revision="main")
    # Archives keep the pages in `documents` or `spdocvqa_images`, some below a folder of the split's name.
    splits = MappingProxyType(
        {
            name: SplitSource(name, True, files=(f"{short}_v1.0*.json",), pictures=("spdocvqa_images", short, "."))
            for name, short in (("validation", "val"), ("train", "train"))
        }
    )
    unanswered = ("test",)
    columns = frozenset({"questionId", "question", "image", "docId", "answers"})
    id_column = "questionId"
    kept_columns = ("docId", "question_types")
    type_columns = ("question_types",)

    def image_id_of(self, row: Row) -> str:
        """A document has several pages, so its id alone does not name the picture."""
        page = "_".join(str(row[name]) for name in _PAGE) if all(name in row for name in _PAGE) else None
        return page or file_stem(row["image"]) or f"document-{row['docId']}"

    def type_of(self, row: Row, place: Place) -> str:
        if "question_types" not in row or not row["question_types"]:
            return UNTYPED
        return "+".join(sorted(listed(row["question_types"], "question types")))

    def official_rows(self, files: Sequence[OfficialFile]) -> list[Row]:
        entries = files[0].entries("data", ("questionId", "question", "image", "docId", "answers"))
        kept = ("questionId", "question", "docId", "answers", "question_types", *_PAGE)
        return [{**present(entry, kept), "image": picture_file(entry["image"])} for entry in entries]
