"""In: a training's rows; out: its learning curves as CSV, as a picture and, where it is requested, for TensorBoard."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiment_core_utils.primitives.csv_tables import csv_of_rows
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import write_text_atomically
from experiments.core_exp.figures import BLUE, LIGHT_GREY, new_figure, save_figure, styled

NAME = "learning_curves"
COLUMNS = (
    "update",
    "reward",
    "accuracy",
    "latency_ms",
    "violation_rate",
    "advantage_groups",
    "loss",
    "entropy",
    "kl",
    "clipped_share",
    "grad_norm",
)
DRAWN = {"reward": "reward", "accuracy": "accuracy (fraction of best)", "latency_ms": "latency in ms",
         "violation_rate": "fraction over the budget"}  # fmt: skip
# Updates that a drawn mean is over.
WINDOW = 20

Rows = Sequence[Mapping[str, float]]


def write_curves(rows: Rows, folder: Path, caption: str) -> None:
    """Write learning_curves.csv, .png and .svg into the folder; raises ResultsNotSaved where the disk refuses."""
    write_text_atomically(csv_of_rows(rows, COLUMNS), folder / f"{NAME}.csv")
    save_figure(draw_curves(rows, caption), folder, NAME)


def draw_curves(rows: Rows, caption: str) -> Figure:
    """Reward, accuracy, latency and violations over the updates: each update, and the mean of the last WINDOW ones."""
    figure = new_figure(8.0, 5.2, caption)
    updates = [row["update"] for row in rows]
    with styled():
        axes = figure.subplots(2, 2, sharex=True)
        for place, (axis, (name, label)) in enumerate(zip(axes.flat, DRAWN.items(), strict=True)):
            values = [row[name] for row in rows]
            axis.plot(updates, values, color=LIGHT_GREY, linewidth=0.8, label="an update")
            axis.plot(updates, running_means(values, WINDOW), color=BLUE, label=f"mean of the last {WINDOW}")
            axis.set_title(label)
            if place >= 2:
                axis.set_xlabel("update")
        axes[0, 0].legend()
    return figure


def running_means(values: Sequence[float], window: int) -> np.ndarray:
    """Mean of each value with the up to `window` - 1 ones before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def summary_writer() -> Any:
    """The class that writes for TensorBoard; raises ConfigurationError without the package."""
    try:
        # Optional: nobody else needs it.
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigurationError(
            "--tensorboard needs the package tensorboard; install it, or leave the flag out"
        ) from error
    return SummaryWriter


class TensorboardCurves:
    """The columns of learning_curves.csv over the updates, in `folder`/tensorboard.

    A training that goes on takes back what is there and writes all of its rows anew: what ran after its last checkpoint
    is not in them, and some may have been trained without TensorBoard.

    Args:
        writer: what `summary_writer` gave.
    """

    def __init__(self, writer: Any, folder: Path, rows: Rows) -> None:
        self._writer = writer(str(folder / "tensorboard"), purge_step=1)
        for row in rows:
            self.add(row)
        self.flush()

    def add(self, row: Mapping[str, float]) -> None:
        """One update."""
        for name in COLUMNS[1:]:
            self._writer.add_scalar(name, row[name], int(row["update"]))

    def flush(self) -> None:
        """Whatever was added is in the file."""
        self._writer.flush()
