"""The one objective of a training: the expected reward, which tables of all choices give exactly; and its warm start.

Nothing is drawn but the requests: every action's reward is known, so the gradient has no variance of its own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.units import MOST_TIMES, check_above_to, check_within
from experiments.controller.networks.two_stage import TwoStageNetworks
from experiments.controller.training.replay_environment import (
    MOST_WEIGHT,
    BudgetedRequests,
    ReplayEnvironment,
    RewardRecipe,
    rewards,
)

MOST_TOGETHER = 100_000
# A step of Adam changes each weight by about this much.
MOST_LEARNING_RATE = 1.0
# Log-probabilities of tier [B, T], pause [B, P], top-k [B, T, P, K] and number of blocks [B, T, P, C].
LogProbs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class UpdateRecipe:
    """The hyperparameters of an update."""

    asks_per_update: int = 160  #: requests in an update
    epochs: int = 2  #: steps on the same requests
    #: of the entropy of the four actions in the objective; falls evenly to 0 at the last update
    entropy_weight: float = 0.1
    kl_weight: float = 0.0  #: of the divergence from the networks that the training started from; 0 leaves it out
    learning_rate: float = 3e-3
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        # An update keeps the outcomes of all its requests in memory.
        check_within("asks_per_update", self.asks_per_update, 1, MOST_TOGETHER)
        check_within("epochs", self.epochs, 1, MOST_TIMES)
        check_above_to("learning_rate", self.learning_rate, 0.0, MOST_LEARNING_RATE)
        check_above_to("max_grad_norm", self.max_grad_norm, 0.0, MOST_WEIGHT)
        for name in ("entropy_weight", "kl_weight"):
            check_within(name, getattr(self, name), 0.0, MOST_WEIGHT)


def log_probs_of_all(
    networks: TwoStageNetworks, environment: ReplayEnvironment, budgeted: BudgetedRequests
) -> LogProbs:
    """The log-probabilities of every action of both stages, those of stage 2 after every tier and pause."""
    tiers, pauses, _, _ = networks.space.sizes
    number = len(budgeted.samples)
    tables = environment.tables
    tier, pause = networks.split_first(
        networks.first(tables.prompts[budgeted.samples], networks.code_of(budgeted.budgets_s))
    )
    last = tables.last[budgeted.samples]
    tokens = tables.tokens[budgeted.samples, :, :, budgeted.levels]
    states = torch.stack([last, tokens], dim=-2).flatten(0, 2)
    chosen = torch.cartesian_prod(torch.arange(tiers), torch.arange(pauses)).repeat(number, 1)
    top_k, blocks = networks.split_second(networks.second(states, chosen))
    shape = number, tiers, pauses, -1
    return tier, pause, top_k.view(shape), blocks.view(shape)


def probabilities_of_all(log_probs: LogProbs) -> torch.Tensor:
    """The probabilities [B, T, P, K, C] of all actions together."""
    tier, pause, top_k, blocks = (each.exp() for each in log_probs)
    return torch.einsum("bt,bp,btpk,btpc->btpkc", tier, pause, top_k, blocks)


def mean_over_actions(log_probs: LogProbs, values: LogProbs) -> torch.Tensor:
    """The expected sum [B] of a value of each of the four actions, where stage 2's depend on tier and pause."""
    pairs = zip(log_probs, values, strict=True)
    parts = [(each.exp() * of.masked_fill(each.isneginf(), 0.0)).sum(dim=-1) for each, of in pairs]
    first = torch.einsum("bt,bp->btp", log_probs[0].exp(), log_probs[1].exp())
    return parts[0] + parts[1] + (first * (parts[2] + parts[3])).sum(dim=(1, 2))


def update_expected(
    networks: TwoStageNetworks,
    reference: TwoStageNetworks,
    optimiser: torch.optim.Optimizer,
    environment: ReplayEnvironment,
    budgeted: BudgetedRequests,
    reward: RewardRecipe,
    recipe: UpdateRecipe,
    entropy_weight: float,
) -> Mapping[str, float]:
    """Take `epochs` steps on the same requests; returns the figures of the last of them.

    The objective is the expected reward, plus `entropy_weight` times the entropy, minus `kl_weight` times the
    divergence from the reference. `reward`, `accuracy`, `latency_ms` and `violation_rate` are expected values,
    `advantage_groups` is the fraction of requests for which the choice matters.
    """
    accuracy, latency_s = environment.outcomes_of_all(budgeted)
    budgets_s = budgeted.budgets_s[:, None, None, None, None]
    gained, late = rewards(reward, accuracy, latency_s, budgets_s), (latency_s > budgets_s).double()
    with torch.no_grad():
        of_reference = log_probs_of_all(reference, environment, budgeted)
    found: Mapping[str, float] = {}
    for _ in range(recipe.epochs):
        log_probs = log_probs_of_all(networks, environment, budgeted)
        chances = probabilities_of_all(log_probs)

        def expected(values: torch.Tensor, chances: torch.Tensor = chances) -> torch.Tensor:
            return (chances * values).flatten(1).sum(dim=1).mean()

        spread = -mean_over_actions(log_probs, log_probs).mean()
        between = tuple(own - other for own, other in zip(log_probs, of_reference, strict=True))
        away = mean_over_actions(log_probs, between).mean()  # type: ignore[arg-type]
        loss = -expected(gained) - entropy_weight * spread + recipe.kl_weight * away
        found = {
            "reward": expected(gained).item(),
            "accuracy": expected(accuracy).item(),
            "latency_ms": 1000 * expected(latency_s).item(),
            "violation_rate": expected(late).item(),
            "advantage_groups": float((gained.flatten(1).amax(dim=1) > gained.flatten(1).amin(dim=1)).double().mean()),
            "loss": loss.item(),
            "entropy": spread.item(),
            "kl": away.item(),
            "grad_norm": descend(optimiser, loss, recipe.max_grad_norm),
        }
    return found


def descend(optimiser: torch.optim.Optimizer, loss: torch.Tensor, max_norm: float = math.inf) -> float:
    """Take a step against the loss's gradient, at most of this norm; returns the norm that it had.

    Raises:
        ConfigurationError: it is not finite.
    """
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(optimiser.param_groups[0]["params"], max_norm).item()
    if not math.isfinite(norm):
        raise ConfigurationError(
            f"the training diverged (its gradient is {norm}); give a smaller --learning_rate or smaller weights"
        )
    optimiser.step()
    return norm


BATCH = 128


def warm_start(
    networks: TwoStageNetworks,
    environment: ReplayEnvironment,
    recipe: RewardRecipe,
    steps: int,
    learning_rate: float,
    generator: torch.Generator,
) -> list[float]:
    """Train by cross-entropy of tier, top-k and blocks with the best choice by budget; returns the loss of each step.

    Pauses are drawn evenly among those after which the best number of blocks is still possible, and are not taught.
    """
    optimiser = torch.optim.Adam([each for each in networks.parameters() if each.requires_grad], lr=learning_rate)
    best = environment.best_per_budget(recipe)
    losses = []
    for _ in range(steps):
        budgeted = environment.draw(BATCH, generator)
        tiers, top_ks, blocks = best[budgeted.levels].unbind(dim=1)
        pauses = torch.multinomial(networks.possible[:, blocks].T.float(), 1, generator=generator)[:, 0]
        states = environment.states(budgeted, tiers, pauses)
        tier_log_probs, _, top_k_log_probs, block_log_probs = networks.log_probs(
            environment.tables.prompts[budgeted.samples],
            budgeted.budgets_s,
            states,
            torch.stack([tiers, pauses], dim=1),
        )
        pairs = ((tier_log_probs, tiers), (top_k_log_probs, top_ks), (block_log_probs, blocks))
        loss = torch.stack([nn.functional.nll_loss(part, wanted) for part, wanted in pairs]).sum()
        descend(optimiser, loss)
        losses.append(loss.item())
    return losses
