"""In: the trainings behind a checkpoint, requests that it is evaluated on; out: caveats where it may have seen them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiment_core_utils.c_prompt_processing import fingerprint_of_ids
from experiment_core_utils.tasks.interface import Task
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.training_run import earlier_trainings

LAST, BEFORE = "trained on", "started from a training on"
NOT_KNOWN = (
    "it is unknown whether two_stage was started from another training: it may have seen the samples that it is "
    "evaluated on there"
)


def live_leaks(checkpoint: Path, task: Task, sample_ids: Sequence[int]) -> list[str]:
    """Caveats over all trainings behind the checkpoint, for a live evaluation on these samples of the task."""
    found, are_all = earlier_trainings(checkpoint)
    notes = [
        note
        for place, each in enumerate(found)
        for note in training_caveats(each, task, sample_ids, BEFORE if place else LAST)
    ]
    return [*dict.fromkeys(notes), *[NOT_KNOWN] * (not are_all)]


def training_caveats(
    trained_on: Mapping[str, Any] | None, task: Task, sample_ids: Sequence[int], how: str = LAST
) -> list[str]:
    """Whether a two-stage controller is judged on samples of one training.

    Args:
        trained_on: what the training's environment said of itself. A replay keeps a digest of its samples alone, so
            that a part of them cannot be recognised.
        sample_ids: of the task, that it is evaluated on.
        how: `LAST` or `BEFORE`.
    """
    described = trained_on or {}
    if "sample_ids" in described:
        same_task = (described["task"], described["split"]) == (task.name, task.split)
        seen = len(set(described["sample_ids"]) & set(sample_ids)) if same_task else 0
        return [_counted(how, seen, len(sample_ids))] * (seen > 0)
    if described.get("kind") == "synthetic":
        return []
    digests = described.get("samples")
    if digests is None:
        return [f"which samples two_stage was {how} is not known: it may have seen those that it is evaluated on"]
    if task.name not in digests or described.get("splits", {}).get(task.name, task.split) != task.split:
        return []
    if digests[task.name] in (fingerprint_of_ids(sample_ids), fingerprint_of_ids(sorted(sample_ids))):
        return [f"two_stage was {how} samples of the same ids as those that it is evaluated on"]
    return [
        f"two_stage was {how} a replay of {task.name}, of whose samples only a digest is known: it may have seen "
        "those that it is evaluated on"
    ]


def replay_leaks(checkpoint: Path, calibration: MeasuredGrid, validated: MeasuredGrid) -> list[str]:
    """Caveats over all trainings behind the checkpoint, for a replay.

    Args:
        calibration: those of its samples that a training could use; a training on just these has seen nothing that is
            judged. May be empty.
    """
    own = fingerprints(calibration)
    found, are_all = earlier_trainings(checkpoint)
    notes = []
    for place, described in enumerate(found):
        how = BEFORE if place else LAST
        if "sample_ids" in described:
            seen = _seen_of_grid(described, validated)
            notes += [_counted(how, seen, len(validated))] * (seen > 0)
        elif described.get("kind") != "synthetic" and described.get("samples") != own:
            notes.append(
                f"two_stage was {how} other samples than the calibration ones, and may have seen those that it is "
                f"evaluated on"
            )
    return [*dict.fromkeys(notes), *[NOT_KNOWN] * (not are_all)]


def _seen_of_grid(described: Mapping[str, Any], validated: MeasuredGrid) -> int:
    task, split = described["task"], described["split"]
    if validated.splits.get(task, split) != split:
        return 0
    ids = set(described["sample_ids"])
    return sum(name == task and at in ids for name, at in zip(validated.tasks, validated.sample_ids, strict=True))


def _counted(how: str, seen: int, number: int) -> str:
    return f"two_stage was {how} {seen} of the {number} requests that it is evaluated on"


def fingerprints(grid: MeasuredGrid) -> dict[str, str]:
    """Task -> digest of its samples, as a training notes it."""
    pairs = list(zip(grid.tasks, grid.sample_ids, strict=True))
    return {
        task: fingerprint_of_ids([sample_id for name, sample_id in pairs if name == task])
        for task in sorted(set(grid.tasks))
    }
