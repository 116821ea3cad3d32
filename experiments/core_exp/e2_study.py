"""In: folders of runs, or the table of a full grid; out: the grids that E2 works on, and where they are from."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiment_core_utils.primitives.errors import ResultsError
from experiments.core_exp.e1_entries import source_fields
from experiments.core_exp.figures import caption_of, joined_caption, setup_of, tasks_named
from experiments.core_exp.knob_grid import KnobPoint, TaskGrid, grids_of
from experiments.core_exp.recorded_table import RecordedTable, read_table
from experiments.core_exp.sweep_results import load_sweep

_KEY = re.compile(r"(?:tier-(\w+)|tokens(\d+))_topk(\d+)_blocks(\d+)")


@dataclass(frozen=True)
class Study:
    """What is analysed.

    Attributes:
        source: provenance, as JSON.
        caption: the line at the foot of figures of all of it.
        setup: device, model, how it ran: what such a line says of any part of it.
        random_weights: accuracy means nothing then.
    """

    source: Mapping[str, Any]
    caption: str
    setup: tuple[str, ...]
    random_weights: bool
    grids: tuple[TaskGrid, ...]


def load_study(paths: Sequence[Path]) -> Study:
    """Folders of runs, read as one sweep, or the one file that `bench_pareto_search.py --collect` wrote.

    Raises:
        ResultsError: no results, broken ones, ones of different sweeps, or a table among other things.
    """
    if not any(path.is_file() for path in paths):
        sweep = load_sweep(*paths)
        caption = caption_of(sweep.provenance, len(sweep.settings), sweep.num_samples)
        setup, is_random = setup_of(sweep.provenance), sweep.provenance.random_weights
        return Study(source_fields(sweep), caption, setup, is_random, grids_of(sweep))
    if len(paths) > 1:
        raise ResultsError(f"{len(paths)} inputs, one of them a file: give folders of runs, or one table alone")
    table = read_table(paths[0])
    try:
        return Study(_source(table), _caption(table), _setup(table), False, (grid_of_table(table),))
    except (KeyError, TypeError) as error:
        raise ResultsError(f"{paths[0]} lacks {error} in its origin; collect the table again") from error


def grid_of_table(table: RecordedTable) -> TaskGrid:
    """A table has scores and times, neither energy nor operations nor readings of drift."""
    absent = np.full(table.scores.shape, np.nan)
    return TaskGrid(
        task=table.origin["task"],
        metric=table.origin["metric"],
        best=float(table.best),
        points=tuple(map(_recorded_point, table.settings)),
        sample_ids=table.sample_ids,
        pictures=table.pictures,
        scores=table.scores,
        total_ms=1000 * table.seconds,
        energy_j=absent,
        flops=absent,
        drift=None,
    )


def _recorded_point(key: str) -> KnobPoint:
    found = _KEY.fullmatch(key)
    if found is None:
        raise ResultsError(
            f"{key!r} is not a key of a setting such as tier-low_topk8_blocks16; collect the table again"
        )
    tier, tokens, top_k, blocks = found.groups()
    return KnobPoint(key, tier or f"{tokens} tokens", int(top_k), int(blocks))


def _source(table: RecordedTable) -> dict[str, Any]:
    return {
        **table.origin,
        "tasks": [table.origin["task"]],
        "num_settings": len(table.settings),
        "num_samples": int(np.isfinite(table.seconds).sum()),
        "num_pictures": len(set(table.pictures)),
    }


def _setup(table: RecordedTable) -> tuple[str, ...]:
    hardware = table.origin["hardware"]
    return hardware["gpu_name"] or hardware["cpu"] or "CPU", table.origin["model"]


def _caption(table: RecordedTable) -> str:
    counted = f"n = {int(np.isfinite(table.seconds).sum())} generations, {len(table.settings)} settings"
    return joined_caption([*_setup(table), counted, tasks_named([table.origin["task"]])])
