"""ScienceQA (arXiv 2209.09513): multiple-choice school questions, those with a picture."""

from collections.abc import Sequence
from types import MappingProxyType

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.primitives.texts import is_text, shown
from experiment_core_utils.tasks.datasets.hub_tables import HubDataset
from experiment_core_utils.tasks.datasets.published import Place, PublishedTask, SplitSource, Table, file_stem, present
from experiment_core_utils.tasks.datasets.questions import QuestionRow, listed, picture_file
from experiment_core_utils.tasks.datasets.tables import OfficialFile, Row

_FILES = ("problems.json", "pid_splits.json")
_NEEDED = ("question", "choices", "answer", "hint", "image", "subject")
_METADATA_KEYS = ("subject", "topic", "category", "skill", "grade", "task")


class ScienceQAImages(PublishedTask):
    """The hint is on the line before the question, and never instead of it."""

    name = "science_qa_img"
    metric = "mc"
    max_new_tokens = 16
    style = "science_qa"
    hub = HubDataset("lmms-lab-encoder/ScienceQA", config="ScienceQA-IMG", revision="main")
    splits = MappingProxyType(
        {
            name: SplitSource(name, on_hub=True, files=_FILES, pictures=(f"images/{short}", short))
            for name, short in (("validation", "val"), ("train", "train"), ("test", "test"))
        }
    )
    columns = frozenset({"image", "question", "choices", "answer", "hint", "subject"})
    type_columns = ("subject",)
    required_fields = ("question", "options")

    def places_of(self, table: Table) -> Sequence[Place]:
        """Only rows with a picture have a place."""
        return [Place(row) for row, has in enumerate(table.has_picture("image")) if has]

    def question_of(self, row: Row, place: Place) -> QuestionRow:
        """The hub's rows have no ids: their number in the split is used instead."""
        options = listed(row["choices"], "options")
        # Joined below, where anything would become a text.
        if not is_text(row["question"]) or not (row["hint"] is None or is_text(row["hint"])):
            raise SampleError(f"question or hint is not a text: {shown(repr((row['question'], row['hint'])))}")
        if not 0 <= row["answer"] < len(options):
            raise SampleError(f"the answer is option {row['answer']} of {len(options)}, counted from 0")
        question_id = str(row["question_id"]) if "question_id" in row else f"{self.split}-{place.row}"
        # Every picture of ScienceQA is called image.png; a question has its own.
        named = file_stem(row["image"])
        return QuestionRow(
            question_id=question_id,
            image_id=question_id if named in (None, "image") else str(named),
            question=f"{row['hint']}\n{row['question']}" if row["hint"] else row["question"],
            answers=(options[row["answer"]],),
            picture=row["image"],
            metadata={**present(row, _METADATA_KEYS), "hint": row["hint"]},
            options=options,
            answer_index=row["answer"],
        )

    def official_rows(self, files: Sequence[OfficialFile]) -> list[Row]:
        """The problems of the split are in the order of pid_splits.json."""
        problems, by_split = files
        key = self.split.replace("validation", "val")
        if not isinstance(by_split.content, dict) or key not in by_split.content:
            raise ConfigurationError(f"{by_split.path} has no split {key!r}: it is not the official file of that name")
        rows: list[Row] = []
        for number in by_split.content[key]:
            if not isinstance(problems.content, dict) or number not in problems.content:
                raise ConfigurationError(f"{problems.path} has no problem {number}, which {by_split.path.name} names")
            problem = problems.content[number]
            if any(name not in problem for name in _NEEDED):
                raise ConfigurationError(f"{problems.path}: problem {number} lacks one of {', '.join(_NEEDED)}")
            picture = None if problem["image"] is None else picture_file(f"{number}/{problem['image']}")
            rows.append(
                {
                    **present(problem, ("question", "choices", "answer", "hint", *_METADATA_KEYS)),
                    "question_id": number,
                    "image": picture,
                }
            )
        return rows
