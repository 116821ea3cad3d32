"""Recorded states against a running model, a replay against its grid by hand, learned policies."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError, SampleError
from experiment_core_utils.tasks.registry import load_task
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.networks.action_logits import ActionLogits
from experiments.controller.networks.two_stage import ActionSpace, TwoStageNetworks, action_space
from experiments.controller.policies.interface import RequestFeatures
from experiments.controller.policies.learned import RecordedTwoStage, TwoStageController
from experiments.controller.running.adaptive_generation import AdaptiveModel, request_of
from experiments.controller.running.deciders import NetworkDecider
from experiments.controller.running.live import LiveRequest, prepare_requests
from experiments.controller.training.expected import UpdateRecipe
from experiments.controller.training.recorded_states import RecordedStates, load_states, record_states
from experiments.controller.training.replay_environment import (
    BudgetedRequests,
    ReplayEnvironment,
    RewardRecipe,
    Tables,
    grid_space,
    replay_environment,
    rewards,
)
from experiments.controller.training.run import TrainingPlan, TrainingRun, load_networks
from tests.experiments.controller.hand_made_environment import KNOBS as MADE_UP
from tests.experiments.controller.hand_made_environment import made_up_environment

TASK = load_task("reference_vqa", "validation")
KNOBS = KnobSpace(("low", "medium"), (2, 4), (3, 4), num_total_blocks=4, first_top_k=4)
# Block 1 is the least important: behind a pause of two blocks all four have to run.
BLOCKS = BlockChoice(scores={1: 0.1, 2: 0.2, 3: 0.3})
SPACE = action_space(KNOBS, BLOCKS, pauses=(1, 2))
BUDGETS_S = (0.1, 0.4)
LIMIT = 3
WIDTH = 32


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> MolmoeStagedModel:
    config = parse_config(["--model_path", str(tiny_checkpoint), "--device", "cpu"])
    found = find_model(str(tiny_checkpoint)).load(config.model, torch.device("cpu"))
    assert isinstance(found, MolmoeStagedModel)
    return found


@pytest.fixture(scope="module")
def networks() -> TwoStageNetworks:
    made = TwoStageNetworks(SPACE, WIDTH, embedding_rms=0.2, seed=2)
    for head in (made.first_out, made.second_out):
        head.weight.data.mul_(50)
    return made


@pytest.fixture(scope="module")
def requests(model: MolmoeStagedModel) -> list[LiveRequest]:
    made, failed = prepare_requests(model, TASK, [0, 5], KNOBS.tiers)
    assert failed == {}
    return made


@pytest.fixture(scope="module")
def states(model: MolmoeStagedModel, networks: TwoStageNetworks) -> RecordedStates:
    return record_states(model, [(TASK, 0), (TASK, 5), (TASK, len(TASK) - 1)], networks, BUDGETS_S, {"name": "tiny"})


def grid() -> MeasuredGrid:
    """Two samples at all eight choices: scores 0 to 7 tenths and the like of one more, seconds twice that."""
    choices = KNOBS.choices()
    scores = np.stack([np.arange(8) / 10, np.arange(8) / 10 + 0.1], axis=1)
    requests = tuple(RequestFeatures(TASK.name, sample_id, 10, {}, None) for sample_id in (5, 0))
    return MeasuredGrid(
        choices, (TASK.name,) * 2, (5, 0), ("a", "b"), scores, np.full(2, 2.0), 2 * scores + 0.05, requests,
        {TASK.name: "vqa_score"}, (), {}, ("hand-made",),
    )  # fmt: skip


def test_recorded_states_are_what_a_running_request_shows(
    model: MolmoeStagedModel, networks: TwoStageNetworks, requests: list[LiveRequest], states: RecordedStates
) -> None:
    assert states.prompts.shape == (3, WIDTH) and states.last.shape == (3, 2, 2, WIDTH)
    assert states.tokens.shape == (3, 2, 2, 2, WIDTH)
    decider = NetworkDecider(ActionLogits.for_model(model, networks), networks.space)
    for place, request in enumerate(requests):
        for level, budget_s in enumerate(BUDGETS_S):
            AdaptiveModel(model, decider, BLOCKS).adaptive_generate(request_of(request, LIMIT), budget_s)
            prompt, seen, (tier, pause, _, _) = decider.seen
            torch.testing.assert_close(states.prompts[place], prompt)
            torch.testing.assert_close(states.last[place, tier, pause], seen[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(states.tokens[place, tier, pause, level], seen[1], rtol=1e-4, atol=1e-4)


def test_states_come_back_from_their_file(states: RecordedStates, tmp_path: Path) -> None:
    states.save(tmp_path / "states.pt")
    found = load_states(tmp_path / "states.pt")
    assert (found.keys, found.space, found.model) == (states.keys, states.space, {"name": "tiny"})
    assert found.splits == {TASK.name: "validation"}
    assert torch.equal(found.tokens, states.tokens) and torch.equal(found.budgets_s, states.budgets_s)
    torch.save({"kind": "else"}, tmp_path / "other.pt")
    with pytest.raises(ResultsError, match="is not a controller_states of version 1"):
        load_states(tmp_path / "other.pt")


def test_samples_that_cannot_be_used_are_named(model: MolmoeStagedModel, networks: TwoStageNetworks) -> None:
    class Broken:
        name = "broken"
        split = "elsewhere"

        def __getitem__(self, index: int) -> Any:
            raise SampleError("no picture")

    found = record_states(model, [(TASK, 0), (Broken(), 3)], networks, BUDGETS_S, {})  # type: ignore[list-item]
    assert found.keys == ((TASK.name, 0),) and found.failed == {"broken 3": "no picture"}
    assert found.splits == {TASK.name: "validation", "broken": "elsewhere"}
    with pytest.raises(ResultsError, match="no picture"):
        record_states(model, [(Broken(), 3)], networks, BUDGETS_S, {})  # type: ignore[list-item]


def test_a_replay_gives_what_the_grid_measured(networks: TwoStageNetworks, states: RecordedStates) -> None:
    environment = replay_environment(grid(), states)
    # The grid's samples are 5 and 0, the second and the first that were recorded.
    assert torch.equal(environment.tables.prompts, states.prompts[[1, 0]])
    budgeted = BudgetedRequests(torch.tensor([0, 1]), torch.tensor([0, 1]), environment.tables.budgets_s)
    accuracy, latency_s = environment.outcomes_of_all(budgeted)
    for row, actions in enumerate(environment.likeliest(networks, budgeted).tolist()):
        tier, pause, top_k, blocks = actions
        place = 4 * tier + 2 * top_k + blocks
        score = place / 10 + 0.1 * row
        # Half of the metric's best of 2; seconds are not halved. One of three blocks ran with 4 experts before a pause
        # after two blocks: 2 experts take 0.4 s less in all.
        paused_s = 0.4 / 3 * (pause == 1 and top_k == 0)
        assert accuracy[row, *actions].item() == pytest.approx(score / 2)
        assert latency_s[row, *actions].item() == pytest.approx(2 * score + 0.05 + paused_s)
    # Sample 5 within 0.4 s: seconds 0.05, 0.25, 0.45, … so the second choice is the last that fits.
    at = BudgetedRequests(torch.tensor([0]), torch.tensor([1]), torch.tensor([0.4], dtype=torch.float64))
    assert environment.reward_table(at, RewardRecipe(0.01, 1.0)).flatten(1).argmax(dim=1).tolist() == [1]


def test_a_grid_with_holes_and_other_values_are_refused(states: RecordedStates) -> None:
    whole = grid()
    holed = replace(whole, choices=whole.choices[1:], scores=whole.scores[1:], total_s=whole.total_s[1:])
    with pytest.raises(ResultsError, match="lacks 1 combination of its own values, such as tier-low_topk2_blocks3"):
        grid_space(holed, 4, 4)
    few = replace(whole, choices=whole.choices[:4], scores=whole.scores[:4], total_s=whole.total_s[:4])
    with pytest.raises(ResultsError, match="record them again"):
        replay_environment(few, states)


def test_the_budget_token_of_a_replay_is_not_trained(states: RecordedStates, tmp_path: Path) -> None:
    environment = replay_environment(grid(), states)
    networks = TwoStageNetworks(SPACE, WIDTH, 0.2, seed=2)
    before = {name: tensor.clone() for name, tensor in networks.state_dict().items()}
    run = TrainingRun(networks, environment, TrainingPlan(UpdateRecipe(), RewardRecipe(), updates=2, seed=0))
    while not run.is_finished:
        run.step()
    for name, tensor in networks.state_dict().items():
        assert torch.equal(tensor, before[name]) == name.startswith("budget."), name
    run.save(tmp_path / "checkpoint.pt")
    loaded = load_networks(tmp_path / "checkpoint.pt")
    assert loaded.space == SPACE
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in networks.state_dict().items())


def test_learned_policies_choose_the_same_recorded_and_live(
    model: MolmoeStagedModel, networks: TwoStageNetworks, requests: list[LiveRequest], states: RecordedStates
) -> None:
    policy = RecordedTwoStage(networks, states)
    controller = TwoStageController(ActionLogits.for_model(model, networks), SPACE, model, BLOCKS, LIMIT)
    assert policy.name == controller.name == "two_stage"
    for request in requests:
        for budget_s in BUDGETS_S:
            answer = controller.answer(request, budget_s)
            assert policy.choose(request.features, budget_s) == answer.choice
            assert 0.0 < answer.overhead_s < answer.total_s == answer.latency_s
    with pytest.raises(ConfigurationError, match="has no recorded states"):
        policy.choose(RequestFeatures(TASK.name, 77, 10, {}, None), 0.1)
    with pytest.raises(ConfigurationError, match="give one above 0"):
        policy.choose(requests[0].features, 0.0)


TABLED_SPACE = ActionSpace(KnobSpace(("low", "high"), (4,), (3, 4), 4, 8), (1,), ((True, True),))
REWARD = RewardRecipe(latency_weight=0.0, over_budget_penalty=1.0)
TIMED = RewardRecipe(latency_weight=0.1, over_budget_penalty=1.0)
# Two kinds of prompt, two samples of each.
PROMPTS = torch.tensor([[4.0, 0.0, 0.0, 0.0], [4.0, 0.1, 0.0, 0.0], [0.0, 0.0, 0.0, 4.0], [0.0, 0.0, 0.1, 4.0]])
# Of (low, 3), (low, 4), (high, 3), (high, 4): the first kind needs the high tier, the second all blocks; the second
# sample of each was right at (low, 3) by luck.
ACCURACY = [[0.0, 0.0, 1.0, 1.0], [1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0]]
LATENCY_S = [0.1, 0.2, 0.3, 0.4]


def tabled() -> ReplayEnvironment:
    shape = (4, 2, 1, 2)
    tables = Tables(
        prompts=PROMPTS,
        last=torch.zeros(4, 2, 1, 4),
        tokens=torch.zeros(4, 2, 1, 3, 4),
        budgets_s=torch.tensor([0.15, 0.35, 0.45], dtype=torch.float64),
        accuracy=torch.tensor(ACCURACY).reshape(shape),
        latency_s=torch.tensor([LATENCY_S] * 4).reshape(shape),
        pause_s=torch.zeros(1, 2, 1, 2),
    )
    return ReplayEnvironment(TABLED_SPACE, tables, {})


def test_each_sample_has_its_own_best_choice_at_each_budget() -> None:
    # Of equal rewards the first: at 0.35 s the lucky samples take (low, 3).
    assert tabled().best_per_sample(REWARD).tolist() == [
        [[0, 0, 0], [1, 0, 0], [1, 0, 0]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
        [[0, 0, 0], [0, 0, 1], [0, 0, 1]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
    ]


def test_a_table_by_budget_has_the_highest_mean() -> None:
    # At 0.35 s (low, 3), (low, 4) and (high, 3) are right for half of the samples; at 0.45 s (high, 4) for all.
    expected = [[0, 0, 0], [0, 0, 0], [1, 0, 1]]
    assert tabled().best_per_budget(REWARD).tolist() == expected


def test_rewards_by_hand() -> None:
    accuracy, latency_s = torch.tensor([1.0, 0.6, 1.0, 0.0]), torch.tensor([0.2, 0.1, 0.3, 0.4])
    found = rewards(TIMED, accuracy, latency_s, torch.tensor([0.2, 0.2, 0.2, 0.2]))
    # At the budget itself it is met. Over it the score counts for nothing: -1 - 0.1 x 1.5, -1 - 0.1 x 2.
    assert found.tolist() == pytest.approx([1.0 - 0.1, 0.6 - 0.05, -1.15, -1.2])


def test_the_known_best_policy_is_what_the_tables_say() -> None:
    environment = made_up_environment(num_samples=3, num_budgets=12, seed=0)
    found = [
        (MADE_UP.tiers[tier], MADE_UP.top_ks[top_k], MADE_UP.block_counts[blocks])
        for tier, top_k, blocks in environment.best_per_sample(TIMED).flatten(0, 1).tolist()
    ]
    # Budgets are 0.12, 0.15, … 0.45 s. The easy sample runs at the fastest choice, 0.1 + 0.001 x 4 x 12 = 0.148 s;
    # the others at the fastest that is right where the budget allows it: to see well takes 0.3 + 0.048 = 0.348 s (from
    # 0.36 s on), to think 0.1 + 0.001 x 8 x 16 = 0.228 s (from 0.24 s on). Both together would take 0.428 s.
    fastest = ("low", 4, 12)
    assert found[:12] == [fastest] * 12
    assert found[12:24] == [fastest] * 8 + [("high", 4, 12)] * 4
    assert found[24:] == [fastest] * 4 + [("low", 8, 16)] * 8
