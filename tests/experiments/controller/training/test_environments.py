"""Recorded states against a running model, a replay against its grid by hand, learned policies."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiment_core_utils.b_model_loader import find_model, load_staged_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError, SampleError
from experiment_core_utils.tasks.registry import load_task
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.networks.action_logits import ActionLogits
from experiments.controller.networks.two_stage import TwoStageNetworks, action_space
from experiments.controller.policies.interface import RequestFeatures
from experiments.controller.policies.learned import RecordedTwoStage, TwoStageController
from experiments.controller.running.adaptive_generation import AdaptiveModel, request_of
from experiments.controller.running.deciders import NetworkDecider
from experiments.controller.running.live import LiveRequest, prepare_requests
from experiments.controller.training.environment import BudgetedRequests, RewardRecipe
from experiments.controller.training.grpo import GrpoRecipe
from experiments.controller.training.recorded_states import RecordedStates, load_states, record_states
from experiments.controller.training.replay_environment import grid_space, replay_environment
from experiments.controller.training.run import TrainingPlan, TrainingRun, load_networks

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
    found = load_staged_model(config.model, find_model(str(tiny_checkpoint)), torch.device("cpu"))
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
    rolled = environment.roll_out(networks, budgeted, None)
    for row, (tier, pause, top_k, blocks) in enumerate(rolled.actions.tolist()):
        place = 4 * tier + 2 * top_k + blocks
        score = place / 10 + 0.1 * row
        # Half of the metric's best of 2; seconds are not halved. One of three blocks ran with 4 experts before a pause
        # after two blocks: 2 experts take 0.4 s less in all.
        paused_s = 0.4 / 3 * (pause == 1 and top_k == 0)
        assert rolled.accuracy[row].item() == pytest.approx(score / 2)
        assert rolled.latency_s[row].item() == pytest.approx(2 * score + 0.05 + paused_s)
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
    run = TrainingRun(networks, environment, TrainingPlan(GrpoRecipe(), RewardRecipe(), updates=2, seed=0))
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
