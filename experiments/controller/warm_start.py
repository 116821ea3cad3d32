"""In: tables of measured choices; out: networks that already choose what the tables say is best, by supervision."""

import torch
from torch import nn

from experiments.controller.environment import drawn
from experiments.controller.rewards import RewardRecipe
from experiments.controller.tabled_environment import TabledEnvironment, Teacher
from experiments.controller.two_stage_networks import TwoStageNetworks

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
    """Cross-entropy of tier, top-k and blocks with the teacher's best choice; returns the loss of each step.

    Pauses are drawn evenly among those behind which the best number of blocks is still possible, and are not taught.
    """
    optimiser = torch.optim.Adam([each for each in networks.parameters() if each.requires_grad], lr=learning_rate)
    trained = environment.trained_choices(recipe, teacher)
    losses = []
    for _ in range(steps):
        budgeted = environment.draw(BATCH, generator)
        tiers, top_ks, blocks = trained[budgeted.samples, budgeted.levels].unbind(dim=1)
        pauses = drawn(networks.possible[:, blocks].T.float().log(), generator)
        states = environment.states(budgeted, tiers, pauses)
        tier_odds, _, top_k_odds, block_odds = networks.log_odds(
            environment.tables.prompts[budgeted.samples],
            budgeted.budgets_s,
            states,
            torch.stack([tiers, pauses], dim=1),
        )
        pairs = ((tier_odds, tiers), (top_k_odds, top_ks), (block_odds, blocks))
        loss = torch.stack([nn.functional.nll_loss(odds, wanted) for odds, wanted in pairs]).sum()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses
