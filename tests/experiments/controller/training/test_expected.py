"""The expected reward against the sum over all actions one by one, and a training by it."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.networks.two_stage import ActionSpace, TwoStageNetworks
from experiments.controller.training.expected import (
    UpdateRecipe,
    descend,
    log_probs_of_all,
    mean_over_actions,
    probabilities_of_all,
    warm_start,
)
from experiments.controller.training.replay_environment import (
    BudgetedRequests,
    ReplayEnvironment,
    RewardRecipe,
    pause_s,
    rewards,
)
from experiments.controller.training.run import TrainingPlan, TrainingRun
from tests.experiments.controller.hand_made_environment import HIDDEN_SIZE, made_up_environment
from tests.experiments.controller.hand_made_requests import grid

REWARD = RewardRecipe(latency_weight=0.1)


def trained(environment: ReplayEnvironment, updates: int) -> TrainingRun:
    networks = TwoStageNetworks(environment.space, HIDDEN_SIZE, 1.0, 0)
    run = TrainingRun(networks, environment, TrainingPlan(UpdateRecipe(), REWARD, updates, 0))
    while not run.is_finished:
        run.step()
    return run


def reward_of_all(environment: ReplayEnvironment, budgeted: BudgetedRequests) -> torch.Tensor:
    return rewards(REWARD, *environment.outcomes_of_all(budgeted), budgeted.budgets_s[:, None, None, None, None])


def test_the_expected_reward_is_the_sum_over_all_actions() -> None:
    environment = made_up_environment(num_samples=2, num_budgets=2, seed=0)
    networks = TwoStageNetworks(environment.space, HIDDEN_SIZE, 1.0, 1)
    # Odds that differ between actions.
    networks.first_out.weight.data.mul_(10.0)
    budgeted = environment.every_request()
    with torch.no_grad():
        log_probs = log_probs_of_all(networks, environment, budgeted)
        found = (probabilities_of_all(log_probs) * reward_of_all(environment, budgeted)).flatten(1).sum(dim=1)
        expected = torch.zeros(len(budgeted.samples), dtype=torch.float64)
        spread = torch.zeros(len(budgeted.samples))
        for actions in product(*map(range, environment.space.sizes)):
            tier, _, top_k, blocks = actions
            rows = torch.tensor(actions).expand(len(budgeted.samples), -1)
            states = environment.states(budgeted, rows[:, 0], rows[:, 1])
            prompts = environment.tables.prompts[budgeted.samples]
            own = networks.log_probs(prompts, budgeted.budgets_s, states, rows[:, :2])
            of_actions = torch.stack([part[:, at].exp() for part, at in zip(own, actions, strict=True)])
            chance = of_actions.prod(dim=0)
            tables = environment.tables
            expected += chance * rewards(
                REWARD, tables.accuracy[budgeted.samples, tier, top_k, blocks],
                tables.latency_s[budgeted.samples, tier, top_k, blocks], budgeted.budgets_s,
            )  # fmt: skip
            spread -= chance * of_actions.log().sum(dim=0).masked_fill(chance == 0, 0.0)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert (-mean_over_actions(log_probs, log_probs)).tolist() == pytest.approx(spread.tolist(), abs=1e-4)


def test_a_training_by_the_expected_reward_finds_the_best_policy() -> None:
    environment = made_up_environment(num_samples=30, num_budgets=12, seed=0)
    fresh = made_up_environment(num_samples=300, num_budgets=12, seed=0, fresh=1)
    run = trained(environment, 200)
    for each in (environment, fresh):
        budgeted = each.every_request()
        table = each.reward_table(budgeted, REWARD).flatten(1)
        best = float(table.amax(dim=1).mean())
        lookup = float(table.unflatten(0, (-1, 12)).mean(dim=0).amax(dim=1).mean())
        actions = each.likeliest(run.networks, budgeted)
        after = float(reward_of_all(each, budgeted)[torch.arange(len(actions)), *actions.T].mean())
        assert (after - lookup) / (best - lookup) > 0.9


def test_a_pause_that_costs_time_is_not_taken() -> None:
    environment = made_up_environment(num_samples=6, num_budgets=4, seed=0)
    tiers, pauses, top_ks, counts = environment.space.sizes
    cost = torch.zeros(pauses, tiers, top_ks, counts, dtype=torch.float64)
    cost[1:] = 1.0
    environment = replace(environment, tables=replace(environment.tables, pause_s=cost))
    actions = environment.likeliest(trained(environment, 60).networks, environment.every_request())
    assert set(actions[:, 1].tolist()) == {0}


def test_a_pause_costs_the_experts_of_the_blocks_before_it() -> None:
    """Means 0.1 s with 4 experts and 0.4 s with 8 in 12 blocks: of 11 blocks after the first, a pause after 3 ran 2."""
    space = ActionSpace(KnobSpace(("low",), (4, 8), (12,), 16, 8), (1, 3), ((True,), (True,)))
    made: MeasuredGrid = replace(grid(), total_s=np.array([[0.1] * 4, [0.4] * 4]))
    found = pause_s(made, space)
    assert found.shape == (2, 1, 2, 1)
    assert found[:, 0, :, 0].flatten().tolist() == pytest.approx([0.0, 0.0, 0.3 * 2 / 11, 0.0])


def test_a_warm_start_chooses_as_the_table_by_budget() -> None:
    environment = made_up_environment(num_samples=30, num_budgets=12, seed=0)
    networks = TwoStageNetworks(environment.space, HIDDEN_SIZE, 1.0, 0)
    losses = warm_start(networks, environment, REWARD, 300, 3e-3, torch.Generator().manual_seed(0))
    budgeted = environment.every_request()
    wanted = environment.best_per_budget(REWARD)[budgeted.levels]
    same = (environment.likeliest(networks, budgeted)[:, [0, 2, 3]] == wanted).all(dim=1).double().mean()
    assert losses[-1] < 0.2 * losses[0]
    assert float(same) > 0.9


def test_impossible_recipes_are_refused() -> None:
    for changes in ({"asks_per_update": 0}, {"epochs": 0}, {"max_grad_norm": 0.0}, {"kl_weight": -1.0}):
        with pytest.raises(ConfigurationError):
            UpdateRecipe(**changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        RewardRecipe(latency_weight=-0.1)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused_by_name(number: float) -> None:
    for name in ("learning_rate", "max_grad_norm", "entropy_weight", "kl_weight"):
        with pytest.raises(ConfigurationError, match=f"^{name} {number:g} is not possible; give "):
            UpdateRecipe(**{name: number})  # type: ignore[arg-type]
    for name in ("latency_weight", "over_budget_penalty"):
        with pytest.raises(ConfigurationError, match=f"^{name} {number:g} is not possible; give "):
            RewardRecipe(**{name: number})


def test_a_step_along_a_gradient_that_is_not_finite_is_refused_before_it_is_taken() -> None:
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    optimiser = torch.optim.Adam([weight], lr=0.1)
    with pytest.raises(ConfigurationError, match="^the training diverged .its gradient is (nan|inf).; give a smaller"):
        descend(optimiser, (weight * torch.tensor([1.0, float("inf")])).sum())
    assert weight.tolist() == [2.0, 3.0]
