"""States of a replay with two tiers, two budgets and a model of width 8, for tests of what is trained on them."""

import torch

from experiment_core_utils.knobs.block_choice import BlockChoice
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.networks.two_stage import TwoStageNetworks, action_space
from experiments.controller.training.recorded_states import RecordedStates

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
