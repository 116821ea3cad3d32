"""One update of the networks towards the better ones of a group of roll-outs of the same request (GRPO).

Group relative policy optimisation (Z. Shao et al., "DeepSeekMath", arXiv 2402.03300, section 4.1) over both stages at
once: the four actions of a roll-out have the same advantage, which is its reward within its group. There is no critic.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.units import MOST_TIMES, check_above_to, check_within
from experiments.controller.networks.two_stage import TwoStageNetworks
from experiments.controller.training.environment import MOST_WEIGHT, RewardRecipe, RollOut, drawn, log_probabilities
from experiments.controller.training.tabled_environment import TabledEnvironment, Teacher

MOST_TOGETHER = 100_000
# A step of Adam changes each weight by about this much.
MOST_LEARNING_RATE = 1.0


@dataclass(frozen=True)
class GrpoRecipe:
    """The hyperparameters of an update."""

    group_size: int = 5  #: roll-outs of each request, which are compared with each other alone
    #: added to a group's standard deviation where its advantages are normalised by it. Groups whose rewards differ by
    #: some milliseconds alone would else pull as hard as those that differ in being right, and all choices collapse to
    #: the fastest before what distinguishes requests is learned.
    spread_floor: float = 0.1
    asks_per_update: int = 32  #: groups in an update
    epochs: int = 2  #: steps on the same roll-outs; from the second on the ratios leave 1 and the clip acts
    clip: float = 0.2  #: ratios beyond 1 +- this gain nothing more
    #: of the entropy of the four actions in the objective; falls evenly to 0 at the last update
    entropy_weight: float = 0.1
    kl_weight: float = 0.0  #: of the divergence from the networks that the training started from; 0 leaves it out
    learning_rate: float = 3e-3
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        # A group of one has nothing to compare; an update keeps all its roll-outs in memory.
        check_within("group_size", self.group_size, 2, MOST_TOGETHER)
        check_within("asks_per_update", self.asks_per_update, 1, MOST_TOGETHER)
        check_within("epochs", self.epochs, 1, MOST_TIMES)
        check_above_to("learning_rate", self.learning_rate, 0.0, MOST_LEARNING_RATE)
        for name in ("clip", "max_grad_norm", "spread_floor"):
            check_above_to(name, getattr(self, name), 0.0, MOST_WEIGHT)
        for name in ("entropy_weight", "kl_weight"):
            check_within(name, getattr(self, name), 0.0, MOST_WEIGHT)


def advantages(rewards: torch.Tensor, group_size: int, spread_floor: float) -> torch.Tensor:
    """Advantages of rewards [B * G], G of a group in a row: (reward - mean) / (deviation + floor) of the group."""
    groups = rewards.view(-1, group_size)
    mean, spread = groups.mean(dim=1, keepdim=True), groups.std(dim=1, correction=0, keepdim=True)
    return ((groups - mean) / (spread + spread_floor)).flatten()


def clipped_objective(ratios: torch.Tensor, gains: torch.Tensor, clip: float) -> torch.Tensor:
    """The smaller of ratio x advantage with and without the ratio clipped, [B]."""
    return torch.minimum(ratios * gains, ratios.clamp(1 - clip, 1 + clip) * gains)


def divergence(log_probability: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """An unbiased estimate [B], at least 0, of the divergence from the reference (eq. 4 of the paper)."""
    log_ratio = reference - log_probability
    return log_ratio.exp() - log_ratio - 1


def entropy(log_probs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The entropy [B] of the four actions together, in nats; impossible actions add nothing."""
    parts = [-(part.exp() * part.masked_fill(part.isneginf(), 0.0)).sum(dim=1) for part in log_probs]
    return torch.stack(parts).sum(dim=0)


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


def update(
    networks: TwoStageNetworks,
    reference: TwoStageNetworks,
    optimiser: torch.optim.Optimizer,
    rolled: RollOut,
    rewards: torch.Tensor,
    recipe: GrpoRecipe,
    entropy_weight: float,
) -> Mapping[str, float]:
    """Take `epochs` steps; returns `loss`, `entropy`, `kl`, `clipped_share` and `grad_norm` of the last of them."""
    device = networks.first_out.weight.device
    gains = advantages(rewards, recipe.group_size, recipe.spread_floor).float().to(device)
    prompts, states, actions = (each.to(device) for each in (rolled.prompts, rolled.states, rolled.actions))
    seen = prompts, rolled.budgeted.budgets_s, states, actions[:, :2]
    with torch.no_grad():
        before = log_probabilities(networks.log_probs(*seen), actions)
        of_reference = log_probabilities(reference.log_probs(*seen), actions)
    found: dict[str, float] = {}
    for _ in range(recipe.epochs):
        log_probs = networks.log_probs(*seen)
        now = log_probabilities(log_probs, actions)
        ratios = (now - before).exp()
        spread, away = entropy(log_probs).mean(), divergence(now, of_reference).mean()
        gained = clipped_objective(ratios, gains, recipe.clip).mean()
        loss = -gained - entropy_weight * spread + recipe.kl_weight * away
        found = {
            "loss": loss.item(),
            "entropy": spread.item(),
            "kl": away.item(),
            "clipped_share": float(((ratios - 1).abs() > recipe.clip).float().mean()),
            "grad_norm": descend(optimiser, loss, recipe.max_grad_norm),
        }
    return found


BATCH = 128


def warm_start(
    networks: TwoStageNetworks,
    environment: TabledEnvironment,
    recipe: RewardRecipe,
    teacher: Teacher,
    steps: int,
    learning_rate: float,
    generator: torch.Generator,
) -> list[float]:
    """Train by cross-entropy of tier, top-k and blocks with the teacher's best choice; returns the loss of each step.

    Pauses are drawn evenly among those after which the best number of blocks is still possible, and are not taught.
    """
    optimiser = torch.optim.Adam([each for each in networks.parameters() if each.requires_grad], lr=learning_rate)
    trained = environment.trained_choices(recipe, teacher)
    losses = []
    for _ in range(steps):
        budgeted = environment.draw(BATCH, generator)
        tiers, top_ks, blocks = trained[budgeted.samples, budgeted.levels].unbind(dim=1)
        pauses = drawn(networks.possible[:, blocks].T.float().log(), generator)
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
