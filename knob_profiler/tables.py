"""The settings of a task as a notebook shows them: conclusion, front, and a table with every cost."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from experiment_core_utils.primitives.notebook_html import paragraph, table
from experiment_core_utils.primitives.texts import ABSENT
from experiment_core_utils.records.conclusion import FRONT_OPPOSITE, VERDICT_LEGEND
from experiments.analyses.knobs.conclusion import conclude, front_words, mean_latency_front
from experiments.analyses.knobs.grid import TaskGrid
from experiments.analyses.knobs.records import TaskAnalysis
from experiments.analyses.sweeps import Sweep
from knob_profiler.pictures import LEGEND, LEGEND_WITHOUT_WORDS, front_svg

# Of a column that the frame does not have.
FLOPS = "flops"
# Heading -> column of the frame, in how many of the column's unit it is, and decimals. Costs are means of a request.
NUMBERS: Mapping[str, tuple[str, float, int]] = {
    "ms": ("T_total_mean_ms", 1.0, 1),
    "% of reference": ("T_total_share_of_reference", 0.01, 0),
    "P95 ms": ("T_total_p95_ms", 1.0, 1),
    "vision ms": ("T_vision_total_mean_ms", 1.0, 1),
    "prefill ms": ("T_LLM_prefill_mean_ms", 1.0, 1),
    "decode ms": ("T_LLM_decode_mean_ms", 1.0, 1),
    "GFLOP": (FLOPS, 1e9, 2),
    "MB counted": ("counted_memory_bytes", 1e6, 1),
    "MB peak": ("peak_memory_bytes", 1e6, 1),
    "J": ("energy_passes_j_per_request", 1.0, 3),
    "J staged": ("energy_end_to_end_j", 1.0, 3),
}


def task_html(task: TaskAnalysis, sweep: Sweep, frame: pd.DataFrame) -> list[str]:
    """The parts of a task's output: conclusion, front, table.

    Args:
        task: the analysis by mean latency.
        frame: the settings of all tasks, as `Results.frame`.
    """
    conclusion, front = conclude(task, sweep.settings), mean_latency_front(task)
    words = front_words(task) if conclusion.why is None else {}
    picture = []
    if front is not None and len(front.front.points) > 1:
        picture = [front_svg(front, words), paragraph(LEGEND if words else LEGEND_WITHOUT_WORDS, is_quiet=True)]
        picture += [paragraph(each, is_quiet=True) for each in (VERDICT_LEGEND, FRONT_OPPOSITE) if words]
    own = frame[frame["task"] == task.grid.task]
    return [conclusion._repr_html_(), *picture, settings_table_html(own, task.grid, words)]


def settings_table_html(frame: pd.DataFrame, grid: TaskGrid, words: Mapping[str, str]) -> str:
    """A row each setting; columns that have no value are left out, the reference is bold.

    Args:
        words: how sure it is that each setting is on the front of accuracy and mean latency; empty where nothing is
            concluded.
    """
    with warnings.catch_warnings():
        # Of settings without any number of operations.
        warnings.simplefilter("ignore", RuntimeWarning)
        flops = np.nanmean(grid.flops, axis=1)
    by_key = dict(zip((each.key for each in grid.points), flops, strict=True))
    frame = frame.assign(**{FLOPS: frame["setting"].map(by_key)})
    numbers = {name: of for name, of in NUMBERS.items() if frame[of[0]].notna().any()}
    rows = frame.to_dict("records")
    cells = [
        [
            str(row["setting"]),
            *([words.get(str(row["setting"]), ABSENT)] if words else []),
            _accuracy(row),
            *(_number(row[column], unit, decimals) for column, unit, decimals in numbers.values()),
        ]
        for row in rows
    ]
    columns = {"setting": True} | ({"on the front": True} if words else {})
    columns |= dict.fromkeys((f"{grid.score_name} [95 %]", *numbers), False)
    return table(columns, cells, [bool(row["is_reference"]) for row in rows])


def _accuracy(row: Mapping[Any, Any]) -> str:
    if pd.isna(row["accuracy"]):
        return ABSENT
    return f"{row['accuracy']:.3f} [{row['accuracy_ci95_low']:.2f}, {row['accuracy_ci95_high']:.2f}]"


def _number(value: float, unit: float, decimals: int) -> str:
    return ABSENT if pd.isna(value) else f"{value / unit:.{decimals}f}"
