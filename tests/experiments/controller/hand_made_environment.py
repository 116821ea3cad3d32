"""Made-up tables with a known best policy, and a checkpoint of a training on them that never ran."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiment_core_utils.knobs.block_choice import BlockChoice
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.networks.two_stage import TwoStageNetworks, action_space
from experiments.controller.training.expected import UpdateRecipe
from experiments.controller.training.replay_environment import ReplayEnvironment, RewardRecipe, Tables
from experiments.controller.training.run import CHECKPOINT, DRAWN, TrainingPlan, TrainingRun

HIDDEN_SIZE = 16
KNOBS = KnobSpace(("low", "medium", "high"), (4, 5, 6, 7, 8), (12, 13, 14, 15, 16), 16, 8)
# Seconds of a choice: a base for each tier, and some for each expert in each block.
TIER_S = (0.10, 0.20, 0.30)
EXPERT_BLOCK_S = 0.001
EASY, SEE, THINK = range(3)
NOISE = 0.3


def made_up_environment(num_samples: int, num_budgets: int, seed: int, fresh: int | None = None) -> ReplayEnvironment:
    """A third of the samples of each kind; budgets evenly from 0.12 s, which no choice meets, to 0.45 s.

    The kind shows in what both stages see, the budget in the budget token's state; both with noise.

    Args:
        seed: of how kinds and budgets show, and of the noise of these samples.
        fresh: seed of the noise of other samples, whose kinds and budgets show as they do by `seed` alone.
    """
    generator = torch.Generator().manual_seed(seed)
    space = action_space(KNOBS, BlockChoice())
    tiers, pauses, top_ks, counts = space.sizes
    kinds = torch.arange(num_samples) % 3
    directions = torch.randn(3, HIDDEN_SIZE, generator=generator)
    budget_direction = torch.randn(HIDDEN_SIZE, generator=generator)
    budgets_s = torch.linspace(0.12, 0.45, num_budgets, dtype=torch.float64)
    noise = generator if fresh is None else torch.Generator().manual_seed(fresh)

    def noisy(values: torch.Tensor) -> torch.Tensor:
        return values + NOISE * torch.randn(values.shape, generator=noise)

    shown = directions[kinds]
    heights = torch.linspace(-2.0, 2.0, num_budgets)[:, None] * budget_direction
    right = torch.zeros(3, tiers, top_ks, counts, dtype=torch.float64)
    right[EASY] = 1.0
    right[SEE, -1] = 1.0
    right[THINK, :, -1, -1] = 1.0
    work = torch.tensor(KNOBS.top_ks)[:, None] * torch.tensor(KNOBS.block_counts)[None]
    latency_s = torch.tensor(TIER_S, dtype=torch.float64)[:, None, None] + EXPERT_BLOCK_S * work
    tables = Tables(
        prompts=noisy(shown),
        last=noisy(shown[:, None, None].expand(-1, tiers, pauses, -1)),
        tokens=noisy(heights.expand(num_samples, tiers, pauses, -1, -1)),
        budgets_s=budgets_s,
        accuracy=right[kinds],
        latency_s=latency_s.expand(num_samples, -1, -1, -1),
        pause_s=torch.zeros(pauses, tiers, top_ks, counts, dtype=torch.float64),
    )
    return ReplayEnvironment(space, tables, {"num_samples": num_samples, "samples": {}, "splits": {}})


def checkpoint_of(folder: Path, described: Mapping[str, object], start: Mapping[str, Any] = DRAWN) -> Path:
    """A checkpoint before its first update, of a training on what is described."""
    environment = replace(made_up_environment(5, 2, seed=0), described=described)
    networks = TwoStageNetworks(environment.space, HIDDEN_SIZE, 1.0, 0)
    TrainingRun(networks, environment, TrainingPlan(UpdateRecipe(), RewardRecipe(), 1, 0), start).save(
        folder / CHECKPOINT
    )
    return folder / CHECKPOINT
