"""One update of the networks towards a higher expected reward, which tables of all choices give exactly.

Nothing is drawn but the requests: every action's reward is known, so the gradient has no variance of its own.
"""

from collections.abc import Mapping

import torch

from experiments.controller.networks.two_stage import TwoStageNetworks
from experiments.controller.training.environment import BudgetedRequests, RewardRecipe
from experiments.controller.training.grpo import GrpoRecipe, descend
from experiments.controller.training.tabled_environment import TabledEnvironment

# Log-probabilities of tier [B, T], pause [B, P], top-k [B, T, P, K] and number of blocks [B, T, P, C].
LogProbs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def log_probs_of_all(
    networks: TwoStageNetworks, environment: TabledEnvironment, budgeted: BudgetedRequests
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
    environment: TabledEnvironment,
    budgeted: BudgetedRequests,
    reward: RewardRecipe,
    recipe: GrpoRecipe,
    entropy_weight: float,
) -> Mapping[str, float]:
    """Take `epochs` steps on the same requests; returns the figures of the last of them.

    The objective is the expected reward, plus `entropy_weight` times the entropy, minus `kl_weight` times the
    divergence from the reference. `reward`, `accuracy`, `latency_ms` and `violation_rate` are expected values,
    `advantage_groups` is the fraction of requests for which the choice matters; nothing is clipped.
    """
    accuracy, latency_s = environment.outcomes_of_all(budgeted)
    gained = environment.reward_of_all(budgeted, reward)
    late = (latency_s > budgeted.budgets_s[:, None, None, None, None]).double()
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
            "clipped_share": 0.0,
            "grad_norm": descend(optimiser, loss, recipe.max_grad_norm),
        }
    return found
