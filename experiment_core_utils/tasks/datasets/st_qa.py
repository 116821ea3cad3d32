"""ST-VQA (arXiv 1905.13648): questions about scene text. Only the training answers are published.

"validation" is Molmo's: the training questions sorted by their id and shuffled by a fixed seed, the first 1,024 of
them; "train" is the rest.
"""

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from experiment_core_utils.tasks.datasets.hub_tables import HubDataset
from experiment_core_utils.tasks.datasets.published import Place, PublishedTask, SplitSource, Table, present
from experiment_core_utils.tasks.datasets.questions import picture_file
from experiment_core_utils.tasks.datasets.tables import OfficialFile, Row

VALIDATION_SIZE = 1024
SHUFFLE_SEED = 63069
_TRAIN = SplitSource("train", on_hub=False, files=("train_task_3.json",), pictures=(".",))


class SceneTextQA(PublishedTask):
    """ST-VQA's task 3 (no dictionary). The hub's copy is its test split, without usable answers."""

    name = "st_qa"
    metric = "ansl_em"
    max_new_tokens = 32
    style = "st_qa"
    hub = HubDataset("lmms-lab-encoder/ST-VQA", config=None, revision="main")
    splits = MappingProxyType({"validation": _TRAIN, "train": _TRAIN})
    unanswered = ("test",)
    columns = frozenset({"question_id", "question", "image", "answers"})
    image_id_column = "file_path"
    kept_columns = ("dataset",)

    def places_of(self, table: Table) -> Sequence[Place]:
        ids = [row["question_id"] for row in table.select(("question_id",))]
        order = sorted(range(len(ids)), key=ids.__getitem__)
        np.random.RandomState(SHUFFLE_SEED).shuffle(order)
        chosen = order[:VALIDATION_SIZE] if self.split == "validation" else order[VALIDATION_SIZE:]
        return [Place(row) for row in chosen]

    def official_rows(self, files: Sequence[OfficialFile]) -> list[Row]:
        needed = ("question_id", "file_path", "question", "answers")
        entries = files[0].entries("data", needed)
        return [
            {**present(entry, (*needed, *self.kept_columns)), "image": picture_file(entry["file_path"])}
            for entry in entries
        ]
