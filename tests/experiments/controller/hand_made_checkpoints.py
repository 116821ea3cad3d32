"""Checkpoints of trainings that never ran, for tests of what is refused by what a checkpoint says of itself."""

from pathlib import Path

from experiment_core_utils.knobs.block_choice import BlockChoice
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.networks.two_stage import TwoStageNetworks, action_space
from experiments.controller.training.environment import RewardRecipe
from experiments.controller.training.grpo import GrpoRecipe
from experiments.controller.training.run import CHECKPOINT, TrainingPlan, TrainingRun
from experiments.controller.training.tabled_environment import TabledEnvironment, synthetic_environment

# Of the tiny model: 4 blocks of width 32, 4 of 8 experts per token.
FITTING = KnobSpace(("low", "medium"), (2, 4), (3, 4), num_total_blocks=4, first_top_k=4)


def checkpoint(folder: Path, knobs: KnobSpace = FITTING, width: int = 32, **model: str) -> Path:
    """Of a training with a model of this name and digest; it is never run, so that its tables are another's."""
    tables = synthetic_environment(5, 2, seed=0)
    environment = TabledEnvironment(tables.space, tables.tables, {"kind": "replay", "model": model}, False)
    environment.space = action_space(knobs, BlockChoice(), (1, 2))
    networks = TwoStageNetworks(environment.space, width, 1.0, 0)
    TrainingRun(networks, environment, TrainingPlan(GrpoRecipe(), RewardRecipe(), 1, 0)).save(folder / CHECKPOINT)
    return folder / CHECKPOINT
