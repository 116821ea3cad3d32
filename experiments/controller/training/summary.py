"""The summary of a finished training: the networks' choices against tables and the best of each sample."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from experiment_core_utils.meters.host_facts import command_line
from experiment_core_utils.primitives.csv_tables import csv_of_rows
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import write_text_atomically
from experiments.analyses.charts.chart import Axis, Chart, Line, Panel
from experiments.analyses.charts.matplotlib_charts import save_chart
from experiments.analyses.charts.style import BLUE, LIGHT_GREY
from experiments.controller.training.jobs import TrainingJob
from experiments.controller.training.replay_environment import (
    BudgetedRequests,
    ReplayEnvironment,
    RewardRecipe,
    rewards,
)
from experiments.controller.training.run import TrainingRun


def summary_of(job: TrainingJob, run: TrainingRun, spent: Mapping[str, float]) -> dict[str, Any]:
    """The content of training.json."""
    parts = []
    environment, recipe = job.environment, run.plan.reward
    for name, replayed in (("trained", environment), ("held_out", job.held_out)):
        parts += [{"part": name, **row} for row in policies_on(replayed, environment, run, recipe)]
    return {
        "schema_version": 1,
        "kind": "controller_training_summary",
        "command": command_line(),
        "plan": asdict(run.plan),
        "environment": dict(environment.described),
        "space": asdict(environment.space),
        "num_parameters": sum(each.numel() for each in run.networks.parameters()),
        "spent": dict(spent),
        "left_out": dict(job.left_out),
        "parts": parts,
    }


def policies_on(
    replayed: ReplayEnvironment, trained_on: ReplayEnvironment, run: TrainingRun, recipe: RewardRecipe
) -> list[dict[str, Any]]:
    """The choices for every sample at every budget: the networks' likeliest ones, those of the table by budget of the
    samples trained on, and each sample's best, which no policy can know.
    """
    budgeted, tables = replayed.every_request(), replayed.tables
    tiers, pauses, top_ks, blocks = replayed.likeliest(run.networks, budgeted).unbind(dim=1)
    at = budgeted.samples, tiers, top_ks, blocks
    # The latency has the time of the pause, as the reward does: the other policies choose before the prefill.
    paused_s = tables.latency_s[at] + tables.pause_s[pauses, tiers, top_ks, blocks]
    results = {"two_stage": (tables.accuracy[at], paused_s)}
    chosen = {
        "per_budget": trained_on.best_per_budget(recipe)[budgeted.levels],
        "per_sample": replayed.best_per_sample(recipe)[budgeted.samples, budgeted.levels],
    }
    for name, choices in chosen.items():
        unpaused = (budgeted.samples, *choices.unbind(dim=1))
        results[name] = tables.accuracy[unpaused], tables.latency_s[unpaused]
    return [{"policy": name, **_figures(replayed, budgeted, *found, recipe)} for name, found in results.items()]


def _figures(
    replayed: ReplayEnvironment,
    budgeted: BudgetedRequests,
    accuracy: torch.Tensor,
    latency_s: torch.Tensor,
    recipe: RewardRecipe,
) -> dict[str, float]:
    """Means over the requests' results [B]; `violation_rate_possible` over those that some choice can meet."""
    over = (latency_s > budgeted.budgets_s).double()
    could = replayed.tables.latency_s[budgeted.samples].flatten(1).amin(dim=1) <= budgeted.budgets_s
    return {
        "reward": float(rewards(recipe, accuracy, latency_s, budgeted.budgets_s).mean()),
        "accuracy": float(accuracy.mean()),
        "accuracy_in_time": float((accuracy * (1 - over)).mean()),
        "latency_ms": 1000 * float(latency_s.mean()),
        "violation_rate": float(over.mean()),
        "violation_rate_possible": float(over[could].mean()),
    }


NAME = "learning_curves"
COLUMNS = (
    "update", "reward", "accuracy", "latency_ms", "violation_rate", "advantage_groups", "loss", "entropy", "kl",
    "grad_norm",
)  # fmt: skip
DRAWN = {"reward": "reward", "accuracy": "accuracy (fraction of best score)", "latency_ms": "latency (ms)",
         "violation_rate": "fraction over the budget"}  # fmt: skip
# Updates that a drawn mean is over.
WINDOW = 20
Rows = Sequence[Mapping[str, float]]


def write_curves(rows: Rows, folder: Path, caption: str) -> None:
    """Write learning_curves.csv, .png and .svg into the folder; raises ResultsNotSaved where the disk refuses."""
    write_text_atomically(csv_of_rows(rows, COLUMNS), folder / f"{NAME}.csv")
    updates = [row["update"] for row in rows]
    panels = []
    for name, label in DRAWN.items():
        values = [row[name] for row in rows]
        means = Line(updates, running_means(values, WINDOW), BLUE, f"mean of the last {WINDOW}")
        each = Line(updates, values, LIGHT_GREY, "an update", width=0.8)
        panels.append(Panel(label, Axis("update"), Axis(), [each, means]))
    save_chart(Chart(NAME, panels, 2, (4.0, 2.5)), caption, folder)


def running_means(values: Sequence[float], window: int) -> np.ndarray:
    """Mean of each value with the up to `window` - 1 ones before it."""
    return pd.Series(values).rolling(window, min_periods=1).mean().to_numpy()


def summary_writer() -> Any:
    """The class that writes for TensorBoard; raises ConfigurationError without the package."""
    try:
        # Optional: nothing else needs it.
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigurationError(
            "--tensorboard needs the package tensorboard; install it, or leave the flag out"
        ) from error
    return SummaryWriter


class TensorboardCurves:
    """Writes the columns of learning_curves.csv over the updates to `folder`/tensorboard.

    A resumed training removes what is there and writes all of its rows anew: what ran after its last checkpoint
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
        """Add the row of one update."""
        for name in COLUMNS[1:]:
            self._writer.add_scalar(name, row[name], int(row["update"]))

    def flush(self) -> None:
        """Write whatever was added to the file."""
        self._writer.flush()
