"""In: a task and what was asked of it; out: the samples to ask, and each as tensors with true token counts."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.config import ProfilingConfig
from experiment_core_utils.primitives.knobs import CropRange
from experiment_core_utils.primitives.records import PreparedRequest
from experiment_core_utils.primitives.stability import shuffled
from experiment_core_utils.tasks.interface import Sample, Task
from experiment_core_utils.tasks.registry import load_task
from experiment_core_utils.tasks.sampling import SampledDataset, create_sampled_dataset


def open_task(config: ProfilingConfig) -> Task:
    """The split of the dataset that was asked for; raises ConfigurationError where it is not there."""
    return load_task(
        config.dataset_name,
        config.split,
        data_dir=config.data_dir,
        cache_dir=config.hf_cache_dir,
        prompt_template=config.prompt_template,
        revision=config.dataset_revision,
    )


def draw_samples(task: Task, config: ProfilingConfig) -> SampledDataset[Sample]:
    """The samples that the flags ask for, in the order in which every setting measures them.

    Ids ascend, so that neighbours that share a picture stay neighbours. Where a setting may stop early
    (`--until_precision`) they are shuffled by the seed: any beginning is then a random sample of the whole, and the
    settings share their beginnings.

    Raises:
        ConfigurationError: `--ids` outside the split.
    """
    drawn = create_sampled_dataset(
        task, config.num_samples, config.seed, stratify_by_type=config.sample_by == "question_type", ids=config.ids
    )
    ascending = tuple(sorted(drawn.sample_ids))
    in_order = ascending if config.until_precision is None else shuffled(ascending, config.seed)
    return replace(drawn, sample_ids=in_order)


def share_of_process(sample_ids: Sequence[int], rank: int, num_processes: int) -> tuple[int, ...]:
    """Every `num_processes`-th id from `rank` on: the shares are disjoint and together complete."""
    return tuple(sample_ids[rank::num_processes])


def choose_latency_ids(sample_ids: Sequence[int], num_latency_samples: int | None, seed: int) -> frozenset[int]:
    """The samples that are measured: the first so many in a random order of all, which depends on ids and seed only.

    More of them include fewer of them; None, or as many as there are, takes all.
    """
    if num_latency_samples is None or num_latency_samples >= len(sample_ids):
        return frozenset(sample_ids)
    order = np.random.default_rng(seed).permutation(sorted(sample_ids))
    return frozenset(map(int, order[:num_latency_samples]))


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
