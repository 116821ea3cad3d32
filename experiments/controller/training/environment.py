"""Requests with budgets, what became of them, and what that is worth to a training."""

from dataclasses import dataclass

import torch

from experiment_core_utils.primitives.units import check_within
from experiments.controller.networks.two_stage import BLOCKS, PAUSE, TIER, TOP_K


@dataclass(frozen=True)
class BudgetedRequests:
    """The places of B requests, with a budget each."""

    samples: torch.Tensor  #: [B], places in the environment
    levels: torch.Tensor  #: [B], places among the budgets that the environment answers at
    budgets_s: torch.Tensor  #: [B], float64

    def repeated(self, times: int) -> "BudgetedRequests":
        """Each request repeated so many times in a row."""
        return BudgetedRequests(
            *(each.repeat_interleave(times) for each in (self.samples, self.levels, self.budgets_s))
        )


@dataclass(frozen=True)
class RollOut:
    """The results of B requests, all on the host."""

    budgeted: BudgetedRequests
    prompts: torch.Tensor  #: [B, H], what stage 1 saw beside the budget
    states: torch.Tensor  #: [B, 2, H], what stage 2 saw
    actions: torch.Tensor  #: [B, 4], columns TIER, PAUSE, TOP_K and BLOCKS: places in the action space
    accuracy: torch.Tensor  #: [B], fraction of the metric's best score
    latency_s: torch.Tensor  #: [B]


def drawn(log_probs: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Places [B] drawn by log-probabilities [B, values]; None takes the likeliest."""
    if generator is None:
        return log_probs.argmax(dim=-1)
    return torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]


def log_probabilities(log_probs: tuple[torch.Tensor, ...], actions: torch.Tensor) -> torch.Tensor:
    """The log-probability [B] of a row's four actions together."""
    columns = (TIER, PAUSE, TOP_K, BLOCKS)
    each = [part.gather(1, actions[:, at, None])[:, 0] for at, part in zip(columns, log_probs, strict=True)]
    return torch.stack(each).sum(dim=0)


# Of parts of a reward or an objective: beyond it single precision keeps nothing of the others.
MOST_WEIGHT = 1e6


@dataclass(frozen=True)
class RewardRecipe:
    """The reward: score - latency_weight * latency / budget within the budget; over it the score counts for nothing.

    Over the budget it is -over_budget_penalty - latency_weight * latency / budget, so that among choices that are all
    over it the fastest is best. Without a penalty lateness counts as in the reported accuracy in time.
    The latency's weight is small by default: within the budget accuracy counts, and of equally accurate choices the
    faster one is better.
    """

    latency_weight: float = 0.02
    over_budget_penalty: float = 0.0

    def __post_init__(self) -> None:
        check_within("latency_weight", self.latency_weight, 0.0, MOST_WEIGHT)
        check_within("over_budget_penalty", self.over_budget_penalty, 0.0, MOST_WEIGHT)


def rewards(
    recipe: RewardRecipe, accuracy: torch.Tensor, latency_s: torch.Tensor, budgets_s: torch.Tensor
) -> torch.Tensor:
    """Rewards, for shapes that broadcast; `accuracy` is a fraction of the metric's best score."""
    fraction = latency_s / budgets_s
    gained = torch.where(fraction <= 1.0, accuracy, torch.full_like(accuracy, -recipe.over_budget_penalty))
    return gained - recipe.latency_weight * fraction
