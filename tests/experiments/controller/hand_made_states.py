"""States of a replay with two tiers, two budgets and a model of width 8, for tests of what is trained on them."""

from pathlib import Path

import torch

from experiment_core_utils.knobs.block_choice import BlockChoice
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.networks.two_stage import TwoStageNetworks, action_space
from experiments.controller.training.recorded_states import RecordedStates
from tests.experiments.hand_made_sweep import result, setting, write
from tests.hand_made_records import measured_sample, staged_run

WIDTH = 8
KNOBS = KnobSpace(("low", "high"), (2,), (3,), 4, 2)
BUDGETS = torch.tensor([0.6, 1.1], dtype=torch.float64)


def networks_with(seed: int) -> TwoStageNetworks:
    return TwoStageNetworks(action_space(KNOBS, BlockChoice(), (1, 2)), WIDTH, 1.0, seed)


def states_of(networks: TwoStageNetworks, sample_ids: range) -> RecordedStates:
    """Random states: what is tested here does not depend on what they say."""
    generator = torch.Generator().manual_seed(3)
    size, tiers, pauses = len(sample_ids), 2, 2
    return RecordedStates(
        keys=tuple(("signs", each) for each in sample_ids),
        prompts=torch.randn(size, WIDTH, generator=generator),
        last=torch.randn(size, tiers, pauses, WIDTH, generator=generator),
        tokens=torch.randn(size, tiers, pauses, len(BUDGETS), WIDTH, generator=generator),
        budgets_s=BUDGETS,
        space=networks.space,
        budget=networks.budget.state_dict(),
        failed={},
        model={"name": "folder/tiny", "weights_sha256": "one"},
        splits={"signs": "validation"},
    )


def grid_of(folder: Path) -> Path:
    """The results of eight samples at the two settings, of 0.5 s and 1 s."""
    low, high = ([measured_sample(at, staged_run(vision_s=vision_s)) for at in range(8)] for vision_s in (0.0, 0.5))
    return write(folder, result(setting("low", 2, 3), low), result(setting("high", 2, 3), high))


def flags_of(folder: Path) -> list[str]:
    """The flags of a training on grid and states, which are made in the folder."""
    states = folder / "recorded.pt"
    states_of(networks_with(0), range(8)).save(states)
    return ["--grid", str(grid_of(folder / "grid")), "--states", str(states), "--num_budgets", "2"]
