"""The rows of training.json: what the networks' choices take with their pause, beside those of tables."""

import pytest
import torch

from experiments.controller.knob_choices import KnobSpace
from experiments.controller.networks.two_stage import ActionSpace, TwoStageNetworks
from experiments.controller.training.expected import UpdateRecipe
from experiments.controller.training.jobs import TrainingJob
from experiments.controller.training.replay_environment import ReplayEnvironment, RewardRecipe, Tables
from experiments.controller.training.run import TrainingPlan, TrainingRun
from experiments.controller.training.summary import summary_of

SPACE = ActionSpace(KnobSpace(("low",), (4,), (4,), 4, 8), (1, 3), ((True,), (True,)))
REWARD = RewardRecipe(latency_weight=0.1, over_budget_penalty=0.0)


def environment() -> ReplayEnvironment:
    """One choice of knobs: two samples are right and wrong, in 0.2 and 0.3 s; a pause after 3 blocks adds 0.15 s."""
    tables = Tables(
        prompts=torch.zeros(2, 4),
        last=torch.zeros(2, 1, 2, 4),
        tokens=torch.zeros(2, 1, 2, 1, 4),
        budgets_s=torch.tensor([0.4], dtype=torch.float64),
        accuracy=torch.tensor([0.0, 1.0], dtype=torch.float64).reshape(2, 1, 1, 1),
        latency_s=torch.tensor([0.2, 0.3], dtype=torch.float64).reshape(2, 1, 1, 1),
        pause_s=torch.tensor([0.0, 0.15], dtype=torch.float64).reshape(2, 1, 1, 1),
    )
    return ReplayEnvironment(SPACE, tables, {})


@pytest.mark.parametrize(("pause", "latency_ms", "reward", "in_time"), [
    # (0 + 1) / 2 minus a tenth of (0.2 + 0.3) / 2 / 0.4.
    (0, 250.0, 0.4375, 0.5),
    # The right answer takes 0.45 s, more than the budget: nothing minus a tenth of (0.35 + 0.45) / 2 / 0.4.
    (1, 400.0, -0.1, 0.0),
])  # fmt: skip
def test_the_time_of_the_pause_is_in_the_networks_row_alone(
    pause: int, latency_ms: float, reward: float, in_time: float
) -> None:
    tabled = environment()
    networks = TwoStageNetworks(SPACE, 4, 1.0, 0)
    # The outputs are those of one tier, then of the two pauses.
    networks.first_out.bias.data[1 + pause] = 100.0
    run = TrainingRun(networks, tabled, TrainingPlan(UpdateRecipe(), REWARD, 1, 0))
    parts = summary_of(TrainingJob(networks, tabled, tabled, ""), run, {})["parts"]
    rows = {each["policy"]: each for each in parts}
    assert list(rows) == ["two_stage", "per_budget", "per_sample"]
    own = rows["two_stage"]
    assert own["latency_ms"] == pytest.approx(latency_ms)
    assert own["reward"] == pytest.approx(reward)
    assert (own["accuracy"], own["accuracy_in_time"], own["violation_rate"]) == (0.5, in_time, 0.5 - in_time)
    for name in ("per_budget", "per_sample"):
        assert rows[name]["latency_ms"] == pytest.approx(250.0)
        assert rows[name]["violation_rate"] == 0.0
