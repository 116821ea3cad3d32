"""The expected reward against the sum over all actions one by one, and a training by it."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from experiments.controller.knob_choices import KnobSpace
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.networks.two_stage import ActionSpace, TwoStageNetworks
from experiments.controller.training.environment import RewardRecipe, log_probabilities, rewards
from experiments.controller.training.expected import log_probs_of_all, mean_over_actions, probabilities_of_all
from experiments.controller.training.grpo import GrpoRecipe, entropy
from experiments.controller.training.replay_environment import pause_s
from experiments.controller.training.run import TrainingPlan, TrainingRun
from experiments.controller.training.tabled_environment import TabledEnvironment, synthetic_environment
from tests.experiments.controller.hand_made_requests import grid

REWARD = RewardRecipe(latency_weight=0.1)


def trained(environment: TabledEnvironment, updates: int) -> TrainingRun:
    networks = TwoStageNetworks(environment.space, environment.hidden_size, 1.0, 0)
    run = TrainingRun(networks, environment, TrainingPlan(GrpoRecipe(), REWARD, updates, 0, None, "expected"))
    while not run.is_finished:
        run.step()
    return run


def test_the_expected_reward_is_the_sum_over_all_actions() -> None:
    environment = synthetic_environment(num_samples=2, num_budgets=2, seed=0)
    networks = TwoStageNetworks(environment.space, environment.hidden_size, 1.0, 1)
    # Odds that differ between actions.
    networks.first_out.weight.data.mul_(10.0)
    budgeted = environment.every_ask()
    with torch.no_grad():
        log_probs = log_probs_of_all(networks, environment, budgeted)
        found = (probabilities_of_all(log_probs) * environment.reward_of_all(budgeted, REWARD)).flatten(1).sum(dim=1)
        expected = torch.zeros(len(budgeted.samples), dtype=torch.float64)
        spread = torch.zeros(len(budgeted.samples))
        for actions in product(*map(range, environment.space.sizes)):
            tier, _, top_k, blocks = actions
            rows = torch.tensor(actions).expand(len(budgeted.samples), -1)
            states = environment.states(budgeted, rows[:, 0], rows[:, 1])
            prompts = environment.tables.prompts[budgeted.samples]
            own = networks.log_probs(prompts, budgeted.budgets_s, states, rows[:, :2])
            chance = log_probabilities(own, rows).exp()
            tables = environment.tables
            expected += chance * rewards(
                REWARD, tables.accuracy[budgeted.samples, tier, top_k, blocks],
                tables.latency_s[budgeted.samples, tier, top_k, blocks], budgeted.budgets_s,
            )  # fmt: skip
            spread += chance * entropy(own)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert (-mean_over_actions(log_probs, log_probs)).tolist() == pytest.approx(spread.tolist(), abs=1e-4)


def test_a_training_by_the_expected_reward_finds_the_best_policy() -> None:
    environment = synthetic_environment(num_samples=30, num_budgets=12, seed=0)
    fresh = synthetic_environment(num_samples=300, num_budgets=12, seed=0, fresh=1)
    run = trained(environment, 200)
    for each in (environment, fresh):
        budgeted = each.every_ask()
        table = each.reward_table(budgeted, REWARD).flatten(1)
        best = float(table.amax(dim=1).mean())
        lookup = float(table.unflatten(0, (-1, 12)).mean(dim=0).amax(dim=1).mean())
        rolled = each.roll_out(run.networks, budgeted, None)
        after = float(rewards(REWARD, rolled.accuracy, rolled.latency_s, budgeted.budgets_s).mean())
        assert (after - lookup) / (best - lookup) > 0.9


def test_a_pause_that_costs_time_is_not_taken() -> None:
    environment = synthetic_environment(num_samples=6, num_budgets=4, seed=0)
    tiers, pauses, top_ks, counts = environment.space.sizes
    cost = torch.zeros(pauses, tiers, top_ks, counts, dtype=torch.float64)
    cost[1:] = 1.0
    environment.tables = replace(environment.tables, pause_s=cost)
    rolled = environment.roll_out(trained(environment, 60).networks, environment.every_ask(), None)
    assert set(rolled.actions[:, 1].tolist()) == {0}
    drawn = environment.roll_out(
        TwoStageNetworks(environment.space, environment.hidden_size, 1.0, 0), environment.every_ask(),
        torch.Generator().manual_seed(0),
    )  # fmt: skip
    # The slowest setting takes 0.3 + 0.128 s; a pause after more than one block a second on top.
    assert ((drawn.latency_s > 1.0) == (drawn.actions[:, 1] > 0)).all()


def test_a_pause_costs_the_experts_of_the_blocks_before_it() -> None:
    """Means 0.1 s with 4 experts and 0.4 s with 8 in 12 blocks: of 11 blocks after the first, a pause after 3 ran 2."""
    space = ActionSpace(KnobSpace(("low",), (4, 8), (12,), 16, 8), (1, 3), ((True,), (True,)))
    made: MeasuredGrid = replace(grid(), total_s=np.array([[0.1] * 4, [0.4] * 4]))
    found = pause_s(made, space)
    assert found.shape == (2, 1, 2, 1)
    assert found[:, 0, :, 0].flatten().tolist() == pytest.approx([0.0, 0.0, 0.3 * 2 / 11, 0.0])
