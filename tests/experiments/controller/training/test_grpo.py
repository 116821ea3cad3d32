"""The arithmetic of GRPO by hand, and a training that must find a policy that is known to be best."""

import math
from pathlib import Path

import pytest
import torch

from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiments.controller.networks.two_stage import TwoStageNetworks
from experiments.controller.training.environment import RewardRecipe, RollOut, log_probabilities, rewards
from experiments.controller.training.grpo import (
    GrpoRecipe,
    advantages,
    clipped_objective,
    descend,
    divergence,
    entropy,
    warm_start,
)
from experiments.controller.training.run import CHECKPOINT, TrainingPlan, TrainingRun
from experiments.controller.training.tabled_environment import KNOBS, TabledEnvironment, synthetic_environment
from tests.same_floats import assert_same_floats

REWARD = RewardRecipe(latency_weight=0.1, over_budget_penalty=1.0)


def networks_for(environment: TabledEnvironment, seed: int = 0) -> TwoStageNetworks:
    return TwoStageNetworks(environment.space, environment.hidden_size, 1.0, seed)


def plan(updates: int, seed: int = 0, **changes: float) -> TrainingPlan:
    return TrainingPlan(GrpoRecipe(**changes), REWARD, updates, seed)  # type: ignore[arg-type]


def mean_reward(environment: TabledEnvironment, rolled: RollOut) -> float:
    return float(rewards(REWARD, rolled.accuracy, rolled.latency_s, rolled.budgeted.budgets_s).mean())


def greedy(environment: TabledEnvironment, networks: TwoStageNetworks) -> RollOut:
    return environment.roll_out(networks, environment.every_ask(), None)


def test_rewards_by_hand() -> None:
    accuracy, latency_s = torch.tensor([1.0, 0.6, 1.0, 0.0]), torch.tensor([0.2, 0.1, 0.3, 0.4])
    found = rewards(REWARD, accuracy, latency_s, torch.tensor([0.2, 0.2, 0.2, 0.2]))
    # At the budget itself it is met. Over it the score counts for nothing: -1 - 0.1 x 1.5, -1 - 0.1 x 2.
    assert found.tolist() == pytest.approx([1.0 - 0.1, 0.6 - 0.05, -1.15, -1.2])


def test_advantages_are_within_their_group() -> None:
    # Means 2, 5 and 0; deviations 0, sqrt((1 + 0 + 1) / 3) and a hundredth of that, which the floor keeps small.
    found = advantages(torch.tensor([5.0, 5.0, 5.0, 1.0, 2.0, 3.0, -0.01, 0.0, 0.01]), 3, 0.1)
    spread = math.sqrt(2 / 3)
    large, small = 1 / (spread + 0.1), 0.01 / (0.01 * spread + 0.1)
    assert found.tolist() == pytest.approx([0.0, 0.0, 0.0, -large, 0.0, large, -small, 0.0, small])


def test_the_clip_stops_gains_and_not_losses() -> None:
    ratios, gains = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1]), torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    assert clipped_objective(ratios, gains, 0.2).tolist() == pytest.approx([1.2, -1.5, 0.5, -0.8, 2.2])


def test_divergence_and_entropy_by_hand() -> None:
    found = divergence(torch.tensor([math.log(0.5), math.log(0.5)]), torch.tensor([math.log(0.5), math.log(0.25)]))
    # Ratio of reference to policy 1 and 1/2: 0, and 1/2 + ln 2 - 1.
    assert found.tolist() == pytest.approx([0.0, math.log(2) - 0.5])
    log_probs = (torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1.0, 0.0]]).log())
    assert entropy(log_probs).tolist() == pytest.approx([math.log(2)])


def test_log_probabilities_are_of_all_actions_together() -> None:
    log_probs = tuple(torch.tensor([row]).log() for row in ([0.5, 0.5], [0.2, 0.8], [0.1, 0.9], [0.25, 0.75]))
    assert log_probabilities(log_probs, torch.tensor([[0, 1, 0, 1]])).item() == pytest.approx(
        math.log(0.5 * 0.8 * 0.1 * 0.75)
    )


def test_the_known_best_policy_is_what_the_tables_say() -> None:
    environment = synthetic_environment(num_samples=3, num_budgets=12, seed=0)
    found = [
        (KNOBS.tiers[tier], KNOBS.top_ks[top_k], KNOBS.block_counts[blocks])
        for tier, top_k, blocks in environment.trained_choices(REWARD, "per_sample").flatten(0, 1).tolist()
    ]
    # Budgets are 0.12, 0.15, … 0.45 s. The easy sample runs at the fastest choice, 0.1 + 0.001 x 4 x 12 = 0.148 s;
    # the others at the fastest that is right where the budget allows it: to see well takes 0.3 + 0.048 = 0.348 s (from
    # 0.36 s on), to think 0.1 + 0.001 x 8 x 16 = 0.228 s (from 0.24 s on). Both together would take 0.428 s.
    fastest = ("low", 4, 12)
    assert found[:12] == [fastest] * 12
    assert found[12:24] == [fastest] * 8 + [("high", 4, 12)] * 4
    assert found[24:] == [fastest] * 4 + [("low", 8, 16)] * 8


def test_fresh_samples_are_of_the_same_kinds_and_shown_by_other_noise() -> None:
    trained, fresh, other = (
        synthetic_environment(num_samples=600, num_budgets=2, seed=seed, fresh=fresh).tables
        for seed, fresh in ((0, None), (0, 1), (1, None))
    )
    assert_same_floats(trained.accuracy, fresh.accuracy)
    assert_same_floats(trained.budgets_s, fresh.budgets_s)
    # Of each kind's 200 samples the mean has noise of 0.3 / sqrt(200) = 0.02; between seeds directions are 1 apart.
    means = [tables.prompts.view(200, 3, -1).mean(dim=0) for tables in (trained, fresh, other)]
    assert (means[0] - means[1]).abs().max() < 0.15
    assert (means[0] - means[2]).abs().mean() > 0.5
    assert (trained.prompts - fresh.prompts).std().item() == pytest.approx(0.3 * math.sqrt(2), rel=0.05)


def test_grpo_finds_the_best_policy() -> None:
    environment = synthetic_environment(num_samples=30, num_budgets=12, seed=0)
    budgeted = environment.every_ask()
    table = environment.reward_table(budgeted, REWARD).flatten(1)
    best = float(table.amax(dim=1).mean())
    by_level = table.unflatten(0, (-1, 12)).mean(dim=0)
    lookup = float(by_level.amax(dim=1).mean())
    assert best - lookup == pytest.approx(0.093, abs=0.002)
    # The same tables, shown by other draws of the noise.
    fresh = synthetic_environment(num_samples=300, num_budgets=12, seed=0, fresh=1)
    after: list[float] = []
    on_others: list[float] = []
    for seed in range(3):
        run = TrainingRun(networks_for(environment, seed), environment, plan(500, seed))
        assert mean_reward(environment, greedy(environment, run.networks)) < lookup < best
        while not run.is_finished:
            run.step()
        for rewarded, found in ((environment, after), (fresh, on_others)):
            found.append((mean_reward(rewarded, greedy(rewarded, run.networks)) - lookup) / (best - lookup))
    # What is best for each sample, which no table by budget is: at least nine tenths of the way from this to that. One
    # training in eight or so stays below, another one on another processor, whose last bits decide which draws follow.
    assert sorted(after)[1] > 0.9
    assert sorted(on_others)[1] > 0.9


def test_a_stopped_training_resumes_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    environment = synthetic_environment(num_samples=8, num_budgets=4, seed=0)
    whole = TrainingRun(networks_for(environment), environment, plan(6))
    while not whole.is_finished:
        whole.step()
    first = TrainingRun(networks_for(environment), environment, plan(6))
    for _ in range(3):
        first.step()
    first.save(tmp_path / CHECKPOINT)
    # Other weights at first: all must come from the checkpoint.
    second = TrainingRun(networks_for(environment, seed=9), environment, plan(6))
    second.resume(tmp_path / CHECKPOINT)
    while not second.is_finished:
        second.step()
    for row, expected in zip(second.rows, whole.rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-4)
    for name, tensor in whole.networks.state_dict().items():
        assert_same_floats(second.networks.state_dict()[name], tensor)
    other = TrainingRun(networks_for(environment), environment, plan(6, seed=1))
    other.step()
    assert other.rows[0] != whole.rows[0]


def test_another_training_is_not_resumed(tmp_path: Path) -> None:
    environment = synthetic_environment(num_samples=8, num_budgets=4, seed=0)
    TrainingRun(networks_for(environment), environment, plan(6)).save(tmp_path / CHECKPOINT)
    with pytest.raises(ConfigurationError, match=r"another plan \(seed\)"):
        TrainingRun(networks_for(environment), environment, plan(6, seed=1)).resume(tmp_path / CHECKPOINT)
    elsewhere = synthetic_environment(num_samples=9, num_budgets=4, seed=0)
    with pytest.raises(ConfigurationError, match=r"another environment \(num_samples\)"):
        TrainingRun(networks_for(elsewhere), elsewhere, plan(6)).resume(tmp_path / CHECKPOINT)
    (tmp_path / "broken.pt").write_bytes(b"no checkpoint")
    with pytest.raises(
        ResultsError, match="broken.pt is not a controller_training, or not the whole of one; give the checkpoint.pt"
    ):
        TrainingRun(networks_for(environment), environment, plan(6)).resume(tmp_path / "broken.pt")


@pytest.mark.parametrize(("teacher", "at_least"), [("per_sample", 0.97), ("per_budget", 0.9), ("per_neighbours", 0.9)])
def test_a_warm_start_chooses_as_its_teacher(teacher: str, at_least: float) -> None:
    environment = synthetic_environment(num_samples=30, num_budgets=12, seed=0)
    networks = networks_for(environment)
    generator = torch.Generator().manual_seed(0)
    losses = warm_start(networks, environment, REWARD, teacher, 300, 3e-3, generator)  # type: ignore[arg-type]
    rolled = greedy(environment, networks)
    wanted = environment.trained_choices(REWARD, teacher).flatten(0, 1)  # type: ignore[arg-type]
    same = (rolled.actions[:, [0, 2, 3]] == wanted).all(dim=1).double().mean()
    assert losses[-1] < 0.2 * losses[0]
    assert float(same) > at_least


def test_impossible_recipes_are_refused() -> None:
    for changes in ({"group_size": 1}, {"epochs": 0}, {"clip": 0.0}, {"kl_weight": -1.0}):
        with pytest.raises(ConfigurationError):
            GrpoRecipe(**changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        RewardRecipe(latency_weight=-0.1)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused_by_name(number: float) -> None:
    for name in ("clip", "learning_rate", "max_grad_norm", "spread_floor", "entropy_weight", "kl_weight"):
        with pytest.raises(ConfigurationError, match=f"^{name} {number:g} is not possible; give "):
            GrpoRecipe(**{name: number})  # type: ignore[arg-type]
    for name in ("latency_weight", "over_budget_penalty"):
        with pytest.raises(ConfigurationError, match=f"^{name} {number:g} is not possible; give "):
            RewardRecipe(**{name: number})


def test_a_step_along_a_gradient_that_is_not_finite_is_refused_before_it_is_taken() -> None:
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    optimiser = torch.optim.Adam([weight], lr=0.1)
    with pytest.raises(ConfigurationError, match="^the training diverged .its gradient is (nan|inf).; give a smaller"):
        descend(optimiser, (weight * torch.tensor([1.0, float("inf")])).sum())
    assert weight.tolist() == [2.0, 3.0]
