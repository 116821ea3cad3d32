"""Grids of a few settings and samples with round numbers, for tests of what E2 computes."""

from collections.abc import Sequence

import numpy as np

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import target_of_value
from experiment_core_utils.primitives.replication import COUNTED, IN_ROUNDS, Replication
from experiments.analyses.knobs.grid import KnobPoint, TaskGrid
from experiments.analyses.knobs.objectives import LATENCY_MEAN, Cost, Objectives, objectives

Numbers = Sequence[Sequence[float]] | np.ndarray


def point(vision: str = "low", top_k: int = 1, blocks: int = 12) -> KnobPoint:
    """Its key as a run gives it; `vision` as results have it, such as `low` or `288 tokens`."""
    setting = Setting.of(vision=target_of_value(vision), top_k=top_k, num_active_blocks=RunningBlocks(blocks))
    return KnobPoint(setting.key, setting)


def reference(in_grid: bool = False, vision: str = "own") -> KnobPoint:
    """The model as it is, of 2 experts and 12 blocks."""
    key = f"{vision}_topk2_blocks12"
    return KnobPoint(key, Setting.named(key), is_reference=True, in_grid=in_grid)


def grid(
    points: Sequence[KnobPoint],
    scores: Numbers,
    total_ms: Numbers,
    *,
    energy_j: Numbers | None = None,
    variance: Replication = IN_ROUNDS,
    energies: Replication = COUNTED,
    best: float = 1.0,
    pictures: Sequence[str] | None = None,
) -> TaskGrid:
    """Every sample has a picture of its own unless given otherwise; operations are ten times the milliseconds."""
    rows = np.array(scores, dtype=float)
    ms = np.array(total_ms, dtype=float)
    joules = np.full(rows.shape, np.nan) if energy_j is None else np.array(energy_j, dtype=float)
    ids = tuple(range(rows.shape[1]))
    names = tuple(pictures) if pictures is not None else tuple(f"picture-{each}" for each in ids)
    with np.errstate(divide="ignore"):
        log_times = np.log(ms)
    return TaskGrid(
        "signs", "read_off", best, tuple(points), ids, names, rows, ms, joules, 10 * ms, log_times,
        variance, energies,
    )  # fmt: skip


def measured(made: TaskGrid, of: Cost = LATENCY_MEAN, num_draws: int = 400) -> Objectives:
    """Its objectives, which there must be."""
    found = objectives(made, of, num_draws, seed=0)
    assert isinstance(found, Objectives)
    return found
