"""In: what a request scored and took, and its budget; out: the one reward that both stages share. Pure."""

from dataclasses import dataclass

import torch

from experiment_core_utils.primitives.units import check_at_least


@dataclass(frozen=True)
class RewardRecipe:
    """Within the budget: score - latency_weight * latency / budget. Over it, hard: the score counts for nothing.

    Over the budget it is -over_budget_penalty - latency_weight * latency / budget, so that among choices that are all
    over it the fastest is best.
    The latency's weight is small by default: within the budget accuracy counts, and of equally accurate choices the
    faster one is better.
    """

    latency_weight: float = 0.02
    over_budget_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_at_least("latency_weight", self.latency_weight, 0.0)
        check_at_least("over_budget_penalty", self.over_budget_penalty, 0.0)


def rewards(
    recipe: RewardRecipe, accuracy: torch.Tensor, latency_s: torch.Tensor, budgets_s: torch.Tensor
) -> torch.Tensor:
    """Rewards, for shapes that broadcast; `accuracy` is a fraction of the metric's best score."""
    fraction = latency_s / budgets_s
    gained = torch.where(fraction <= 1.0, accuracy, torch.full_like(accuracy, -recipe.over_budget_penalty))
    return gained - recipe.latency_weight * fraction
