"""The caveats that hold for a whole run: its processes, its data and its batches."""

import re
from collections.abc import Mapping, Sequence

import torch

from experiment_core_utils.records.caveats import Caveat, caveat
from experiment_core_utils.tasks.interface import Task
from experiment_core_utils.tasks.sampling import inspected

_COMMIT = re.compile(r"[0-9a-f]{40}")


def caveats_of(
    random_weights: bool, device: torch.device, processes_here: int, data_source: Mapping[str, str]
) -> list[Caveat]:
    """What a reader must know before quoting the numbers.

    Args:
        data_source: the task's `source`.
    """
    caveats = []
    if data_source.get("read_from") == "hub" and not _COMMIT.fullmatch(data_source["revision"]):
        caveats.append(caveat("data_commit_unknown"))
    if "left_out" in data_source:
        caveats.append(caveat("task_decoding_left_out", names=data_source["left_out"]))
    if random_weights:
        caveats.append(caveat("random_weights"))
    return [*caveats, *shared_cores_caveats(device, processes_here)]


def shared_cores_caveats(device: torch.device, processes_here: int) -> list[Caveat]:
    """The caveat of a run on the CPU of which several processes are on this machine; none otherwise."""
    if device.type != "cpu" or processes_here == 1:
        return []
    return [caveat("shared_cores", num_processes=processes_here)]


def crowded_cores_caveats(device: torch.device, processes_here: int, cores: float) -> list[Caveat]:
    """The caveat of a run on the CPU whose processes on this machine have more threads than cores; none otherwise.

    Args:
        cores: `usable_cores` of all of them.
    """
    threads = processes_here * torch.get_num_threads()
    is_crowded = device.type == "cpu" and threads > cores
    return [caveat("crowded_cores", num_threads=threads, num_cores=cores)] if is_crowded else []


def picture_caveats(task: Task, sample_ids: Sequence[int], takes_pictures: bool) -> list[Caveat]:
    """The caveat where a text model gets a task with pictures, by the first few samples that can be read."""
    if takes_pictures:
        return []
    if all(sample.image is None for sample in inspected(task, sample_ids)):
        return []
    return [caveat("pictures_not_shown")]


def batching_caveats(num_samples: int, num_latency_samples: int | None, dtype: str | None) -> list[Caveat]:
    """What a reader must know where samples are answered in batches in another precision than float32.

    Args:
        dtype: None where a server answers, whose batches are not seen.
    """
    if num_latency_samples is None or num_latency_samples >= num_samples or dtype in ("float32", None):
        return []
    answered = num_samples - num_latency_samples
    return [caveat("batched_answers", num_batched=answered, num_samples=num_samples, dtype=dtype)]
