"""In: a finished training; out: what its networks choose on all asks, against tables and the best per sample."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from experiment_core_utils.meters.host_facts import command_line
from experiments.controller.environment import BudgetedRequests
from experiments.controller.rewards import RewardRecipe, rewards
from experiments.controller.tabled_environment import TabledEnvironment
from experiments.controller.training_jobs import TrainingJob
from experiments.controller.training_run import TrainingRun


def summary_of(job: TrainingJob, run: TrainingRun, spent: Mapping[str, float]) -> dict[str, Any]:
    """The content of training.json; `parts` is empty for an environment without tables."""
    parts = []
    environment, recipe = job.environment, run.plan.reward
    if isinstance(environment, TabledEnvironment):
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
    """Every sample at every budget: the networks' likeliest choices, the table by budget and the best for similar
    prompts of the samples trained on, and each sample's best, which no policy can know."""
    budgeted = tabled.every_ask()
    chosen = {
        "two_stage": tabled.roll_out(run.networks, budgeted, None).actions[:, [0, 2, 3]],
        "per_budget": trained_on.trained_choices(recipe, "per_budget")[0, budgeted.levels],
        "per_neighbours": trained_on.best_for_prompts(tabled.tables.prompts, recipe)[budgeted.samples, budgeted.levels],
        "per_sample": tabled.trained_choices(recipe, "per_sample")[budgeted.samples, budgeted.levels],
    }
    return [{"policy": name, **_figures(tabled, budgeted, choices, recipe)} for name, choices in chosen.items()]


def _figures(
    tabled: TabledEnvironment, budgeted: BudgetedRequests, choices: torch.Tensor, recipe: RewardRecipe
) -> dict[str, float]:
    """Means over the asks of the choices [B, 3]; `violation_rate_possible` over those that some choice can meet."""
    at = (budgeted.samples, *choices.unbind(dim=1))
    accuracy, latency_s = tabled.tables.accuracy[at], tabled.tables.latency_s[at]
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
