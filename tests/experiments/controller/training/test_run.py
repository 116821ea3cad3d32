"""A training that was stopped resumes as if it had not been, and no other one."""

from pathlib import Path

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiments.controller.networks.two_stage import TwoStageNetworks
from experiments.controller.training.expected import UpdateRecipe
from experiments.controller.training.replay_environment import ReplayEnvironment, RewardRecipe
from experiments.controller.training.run import CHECKPOINT, TrainingPlan, TrainingRun
from tests.experiments.controller.hand_made_environment import HIDDEN_SIZE, made_up_environment
from tests.same_floats import assert_same_floats


def networks_for(environment: ReplayEnvironment, seed: int = 0) -> TwoStageNetworks:
    return TwoStageNetworks(environment.space, HIDDEN_SIZE, 1.0, seed)


def plan(updates: int, seed: int = 0) -> TrainingPlan:
    return TrainingPlan(UpdateRecipe(), RewardRecipe(latency_weight=0.1, over_budget_penalty=1.0), updates, seed)


def test_a_stopped_training_resumes_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    environment = made_up_environment(num_samples=8, num_budgets=4, seed=0)
    whole = TrainingRun(networks_for(environment), environment, plan(6))
    while not whole.is_finished:
        whole.step()
    first = TrainingRun(networks_for(environment), environment, plan(6))
    for _ in range(3):
        first.step()
    first.save(tmp_path / CHECKPOINT)
    # Other weights at first: all must come from the checkpoint.
    second = TrainingRun(networks_for(environment, 9), environment, plan(6))
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
    environment = made_up_environment(num_samples=8, num_budgets=4, seed=0)
    TrainingRun(networks_for(environment), environment, plan(6)).save(tmp_path / CHECKPOINT)
    with pytest.raises(ConfigurationError, match=r"another plan \(seed\)"):
        TrainingRun(networks_for(environment), environment, plan(6, seed=1)).resume(tmp_path / CHECKPOINT)
    elsewhere = made_up_environment(num_samples=9, num_budgets=4, seed=0)
    with pytest.raises(ConfigurationError, match=r"another environment \(num_samples\)"):
        TrainingRun(networks_for(elsewhere), elsewhere, plan(6)).resume(tmp_path / CHECKPOINT)
    (tmp_path / "broken.pt").write_bytes(b"no checkpoint")
    with pytest.raises(
        ResultsError, match="broken.pt is not a controller_training, or not the whole of one; give the checkpoint.pt"
    ):
        TrainingRun(networks_for(environment), environment, plan(6)).resume(tmp_path / "broken.pt")
