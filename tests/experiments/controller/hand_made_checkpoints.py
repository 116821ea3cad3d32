"""Checkpoints of trainings that never ran, for tests of what is refused by what a checkpoint says of itself."""

from pathlib import Path

from experiment_core_utils.knobs.block_choice import BlockChoice
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.networks.two_stage import TwoStageNetworks, action_space
from experiments.controller.training.expected import UpdateRecipe
from experiments.controller.training.replay_environment import ReplayEnvironment, RewardRecipe
from experiments.controller.training.run import CHECKPOINT, TrainingPlan, TrainingRun
from tests.experiments.controller.hand_made_environment import made_up_environment

# Of the tiny model: 4 blocks of width 32, 4 of 8 experts per token.
FITTING = KnobSpace(("low", "medium"), (2, 4), (3, 4), num_total_blocks=4, first_top_k=4)


def checkpoint(folder: Path, knobs: KnobSpace = FITTING, width: int = 32, **model: str) -> Path:
    """Of a training with a model of this name and digest; it is never run, so that its tables are another's."""
    tables = made_up_environment(5, 2, seed=0).tables
    space = action_space(knobs, BlockChoice(), (1, 2))
    environment = ReplayEnvironment(space, tables, {"kind": "replay", "samples": {}, "splits": {}, "model": model})
    networks = TwoStageNetworks(space, width, 1.0, 0)
    TrainingRun(networks, environment, TrainingPlan(UpdateRecipe(), RewardRecipe(), 1, 0)).save(folder / CHECKPOINT)
    return folder / CHECKPOINT
