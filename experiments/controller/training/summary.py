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
from experiments.controller.training.environment import BudgetedRequests, RewardRecipe, rewards
from experiments.controller.training.jobs import TrainingJob
from experiments.controller.training.run import TrainingRun
from experiments.controller.training.tabled_environment import TabledEnvironment


def summary_of(job: TrainingJob, run: TrainingRun, spent: Mapping[str, float]) -> dict[str, Any]:
    """The content of training.json."""
    parts = []
    environment, recipe = job.environment, run.plan.reward
    for name, tabled in (("trained", environment), ("held_out", job.held_out)):
        if tabled is not None:
            parts += [{"part": name, **row} for row in policies_on(tabled, environment, run, recipe)]
    return {
        "schema_version": 1,
        "kind": "controller_training_summary",
        "command": command_line(),
        "plan": asdict(run.plan),
        "environment": environment.describe(),
        "space": asdict(environment.space),
        "num_parameters": sum(each.numel() for each in run.networks.parameters()),
        "budget_token_is_fixed": environment.budget_token_is_fixed,
        "spent": dict(spent),
        "left_out": dict(job.left_out),
        "parts": parts,
    }


def policies_on(
    tabled: TabledEnvironment, trained_on: TabledEnvironment, run: TrainingRun, recipe: RewardRecipe
) -> list[dict[str, Any]]:
    """The choices for every sample at every budget: the networks' likeliest ones, those of the table by budget and the
    best for similar prompts of the samples trained on, and each sample's best, which no policy can know.
    """
    budgeted = tabled.every_ask()
    # Its latencies have the time of its pause, as its rewards do: the other policies choose before the prefill.
    rolled = tabled.roll_out(run.networks, budgeted, None)
    chosen = {
        "per_budget": trained_on.trained_choices(recipe, "per_budget")[0, budgeted.levels],
        "per_neighbours": trained_on.best_for_prompts(tabled.tables.prompts, recipe)[budgeted.samples, budgeted.levels],
        "per_sample": tabled.trained_choices(recipe, "per_sample")[budgeted.samples, budgeted.levels],
    }
    results = {"two_stage": (rolled.accuracy, rolled.latency_s)}
    for name, choices in chosen.items():
        at = (budgeted.samples, *choices.unbind(dim=1))
        results[name] = tabled.tables.accuracy[at], tabled.tables.latency_s[at]
    return [{"policy": name, **_figures(tabled, budgeted, *found, recipe)} for name, found in results.items()]


def _figures(
    tabled: TabledEnvironment,
    budgeted: BudgetedRequests,
    accuracy: torch.Tensor,
    latency_s: torch.Tensor,
    recipe: RewardRecipe,
) -> dict[str, float]:
    """Means over the requests' results [B]; `violation_rate_possible` over those that some choice can meet."""
    over = (latency_s > budgeted.budgets_s).double()
    could = tabled.tables.latency_s[budgeted.samples].flatten(1).amin(dim=1) <= budgeted.budgets_s
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
    "clipped_share", "grad_norm",
)  # fmt: skip
DRAWN = {"reward": "reward", "accuracy": "accuracy (fraction of best score)", "latency_ms": "latency (ms)",
         "violation_rate": "fraction over the budget"}  # fmt: skip
# Updates that a drawn mean is over.
WINDOW = 20
Rows = Sequence[Mapping[str, float]]


def write_curves(rows: Rows, folder: Path, caption: str) -> None:
    """Write learning_curves.csv, .png and .svg into the folder; raises ResultsNotSaved where the disk refuses."""
    write_text_atomically(csv_of_rows(rows, COLUMNS), folder / f"{NAME}.csv")
    save_chart(curves_chart(rows), caption, folder)


def curves_chart(rows: Rows) -> Chart:
    """Reward, accuracy, latency and violations over the updates, and their means over the last WINDOW."""
    updates = [row["update"] for row in rows]
    panels = []
    for name, label in DRAWN.items():
        values = [row[name] for row in rows]
        means = Line(updates, running_means(values, WINDOW), BLUE, f"mean of the last {WINDOW}")
        each = Line(updates, values, LIGHT_GREY, "an update", width=0.8)
        panels.append(Panel(label, Axis("update"), Axis(), [each, means]))
    return Chart(NAME, panels, 2, (4.0, 2.5))


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
