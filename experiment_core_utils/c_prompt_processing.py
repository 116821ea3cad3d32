"""In: a task and a seed; out: the samples to ask, and each as tensors on the host with true token counts."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.knobs import CropRange
from experiment_core_utils.primitives.records import PreparedRequest
from experiment_core_utils.tasks.interface import Sample, Task


def draw_sample_ids(length: int, num_samples: int, seed: int) -> tuple[int, ...]:
    """`num_samples` ids out of 0..length-1, without replacement, ascending; all of them where fewer are there.

    The draw depends on length, number and seed only, so every setting and every process gets the same one.
    """
    if num_samples >= length:
        return tuple(range(length))
    drawn = np.random.RandomState(seed).choice(length, size=num_samples, replace=False)
    return tuple(sorted(int(index) for index in drawn))


def share_of_process(sample_ids: Sequence[int], rank: int, num_processes: int) -> tuple[int, ...]:
    """Every `num_processes`-th id from `rank` on: the shares are disjoint and together complete."""
    return tuple(sample_ids[rank::num_processes])


def fingerprint_of_ids(sample_ids: Sequence[int]) -> str:
    """Short digest of the ids, to recognise results made on the same samples."""
    return hashlib.sha256(",".join(map(str, sample_ids)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class RequestMaker:
    """Prepares samples of one task for one model."""

    model: StagedModel
    task: Task

    def make(self, sample: Sample, crops: CropRange) -> PreparedRequest:
        """Prompt and crops of a sample as tensors on the host; raises SampleError for a picture without use."""
        return self.model.prepare(sample, self.task.prompt(sample), crops)
