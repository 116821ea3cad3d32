"""In: samples that were requested; out: their texts as token ids, those of one picture together.

Pictures are told apart by their pixels: tasks of one dataset show the same ones, and names are of a task alone.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image

from experiment_core_utils.models.hf.requests import check_prompt
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.interface import Sample, Task
from experiments.controller.adaptive_generation import prompt_ids

# Task and sample id.
SampleKey = tuple[str, int]


@dataclass(frozen=True)
class PictureQuestion:
    """A sample without its picture, which is read again when it is needed: many do not fit into memory.

    Attributes:
        text: ids [S] of its prompt on the host, without special tokens.
    """

    task: Task
    sample_id: int
    text: torch.Tensor

    @property
    def key(self) -> SampleKey:
        """Task and sample id."""
        return self.task.name, self.sample_id

    def read(self) -> Sample:
        """The whole sample; raises SampleError for an unreadable one."""
        return self.task[self.sample_id]


def questions_by_picture(
    model: MolmoeStagedModel, asked: Sequence[tuple[Task, int]]
) -> tuple[list[list[PictureQuestion]], dict[SampleKey, str]]:
    """Each sample once, in the order in which pictures first come; and why samples could not be read.

    A sample without a picture stands alone.
    """
    by_picture: dict[str | SampleKey, list[PictureQuestion]] = {}
    failed: dict[SampleKey, str] = {}
    for task, sample_id in {(task.name, sample_id): (task, sample_id) for task, sample_id in asked}.values():
        try:
            sample = task[sample_id]
            prompt = task.prompt(sample)
            check_prompt(prompt)
        except SampleError as error:
            failed[task.name, sample_id] = str(error)
            continue
        question = PictureQuestion(task, sample_id, prompt_ids(model, prompt))
        picture = question.key if sample.image is None else picture_digest(sample.image)
        by_picture.setdefault(picture, []).append(question)
    return list(by_picture.values()), failed


def picture_digest(image: Image.Image) -> str:
    """The same for the same pixels."""
    digest = hashlib.sha256(f"{image.mode} {image.size}".encode())
    digest.update(image.tobytes())
    return digest.hexdigest()
