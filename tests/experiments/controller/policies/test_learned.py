"""A trained policy on a grid: which requests it is evaluated on, the caveats of its training, and the command."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiment_core_utils.knobs.vision_tokens import vision_of
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiments.controller.evaluate_controller import main
from experiments.controller.evaluation.replay import replay
from experiments.controller.measured_grid import MeasuredGrid, load_grid, split_by_picture
from experiments.controller.policies.learned import learned_replay
from experiments.controller.training.expected import UpdateRecipe
from experiments.controller.training.replay_environment import RewardRecipe, replay_environment
from experiments.controller.training.run import CHECKPOINT, TrainingPlan, TrainingRun, load_networks, start_of
from tests.experiments.controller.hand_made_states import BUDGETS, KNOBS, grid_of, networks_with, states_of
from tests.experiments.hand_made_sweep import reference, result, setting, write
from tests.hand_made_records import measured_sample, staged_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight samples at two settings of 0.5 s and 1 s."""
    return grid_of(tmp_path / "run")


@pytest.fixture
def parts(folder: Path) -> tuple[MeasuredGrid, MeasuredGrid]:
    return split_by_picture(load_grid([folder]), 0.5, 0)


def trained(folder: Path, part: MeasuredGrid, num_states: int = 8) -> Path:
    """A checkpoint of one update, and its states beside it."""
    networks = networks_with(0)
    states = states_of(networks, range(num_states))
    states.save(folder / "states.pt")
    run = TrainingRun(networks, replay_environment(part, states), TrainingPlan(UpdateRecipe(), RewardRecipe(), 1, 0))
    run.step()
    run.save(folder / CHECKPOINT)
    return folder / CHECKPOINT


def test_it_chooses_as_in_its_training(tmp_path: Path, parts):
    calibration, rest = parts
    found = learned_replay(trained(tmp_path, calibration), None, calibration, rest)
    outcomes = replay(found.policy, found.grid, BUDGETS.tolist())
    states = states_of(networks_with(0), range(8))
    environment = replay_environment(rest, states)
    budgeted = environment.every_request()
    run = TrainingRun(networks_with(0), environment, TrainingPlan(UpdateRecipe(), RewardRecipe(), 1, 0))
    run.networks.load_state_dict(torch.load(tmp_path / CHECKPOINT, weights_only=True)["networks"])
    tiers = environment.likeliest(run.networks, budgeted)[:, 0].reshape(len(rest), len(BUDGETS)).T
    assert [[KNOBS.tiers.index(vision_of(choice).tier) for choice in row] for row in outcomes.choices] == tiers.tolist()


def test_a_training_on_the_calibration_samples_is_no_caveat_another_is(tmp_path: Path, parts):
    calibration, rest = parts
    checkpoint = trained(tmp_path, calibration)
    assert len(learned_replay(checkpoint, None, calibration, rest).caveats) == 1
    caveats = learned_replay(checkpoint, None, rest, calibration).caveats
    assert len(caveats) == 2
    assert "two_stage was trained on other samples" in caveats[1].sentence


def test_requests_without_states_are_left_out(tmp_path: Path, parts):
    calibration, rest = parts
    last = max(rest.sample_ids)
    checkpoint = trained(tmp_path, calibration)
    states = states_of(networks_with(0), range(8))
    without = [place for place, (_, sample_id) in enumerate(states.keys) if sample_id != last]
    replace(
        states,
        keys=tuple(states.keys[place] for place in without),
        prompts=states.prompts[without],
        last=states.last[without],
        tokens=states.tokens[without],
    ).save(tmp_path / "fewer.pt")
    found = learned_replay(checkpoint, tmp_path / "fewer.pt", calibration, rest)
    assert found.grid.sample_ids == tuple(each for each in rest.sample_ids if each != last)


def test_states_of_other_networks_are_refused(tmp_path: Path, parts):
    calibration, rest = parts
    checkpoint = trained(tmp_path, calibration)
    states_of(networks_with(1), range(8)).save(tmp_path / "other.pt")
    with pytest.raises(ResultsError, match="another budget token"):
        learned_replay(checkpoint, tmp_path / "other.pt", calibration, rest)
    with pytest.raises(ResultsError, match="states.pt"):
        learned_replay(tmp_path / "states.pt", None, calibration, rest)


def test_the_command_puts_it_beside_the_others(folder: Path, tmp_path: Path, parts):
    checkpoint = trained(tmp_path, parts[0])
    flags = ["--budgets_ms", "600", "1100", "--learned", str(checkpoint), "--output_dir", str(tmp_path / "out")]
    assert main([str(folder), *flags]) == 0
    content = json.loads((tmp_path / "out" / "controller_evaluation.json").read_text())
    assert list(content["policies"])[-2:] == ["two_stage", "oracle"]
    assert ("two_stage", "lookup_few_knobs") in {(each["policy"], each["baseline"]) for each in content["paired"]}
    assert sum(content["policies"]["two_stage"]["at_budgets"][0]["choices"].values()) == content["num_requests"] == 4
    assert main([str(folder), *flags, "--evaluation_seed", "1", "--calibration_share", "0.25"]) == 0
    again = json.loads((tmp_path / "out" / "controller_evaluation.json").read_text())
    assert any("trained on other samples" in caveat for caveat in again["caveats"])


def test_the_command_says_what_it_cannot_choose(
    folder: Path, tmp_path: Path, parts, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = trained(tmp_path, parts[0])
    write(folder, reference([measured_sample(at, staged_run()) for at in range(8)]))
    write(folder, result(setting("own", 2, 3), [measured_sample(at, staged_run()) for at in range(8)]))
    sentences = (
        "two_stage chooses among tiers: the reference, the model as it is (own_topk4_blocks4), is none of its choices",
        "two_stage chooses tier, top-k and blocks alone: 1 of the 4 settings, such as own_topk2_blocks3, are none of "
        "its choices",
    )
    flags = ["--budgets_ms", "600", "--output_dir", str(tmp_path / "out")]
    assert main([str(folder), *flags, "--learned", str(checkpoint)]) == 0
    printed = capsys.readouterr().out
    assert all(f"caveat: {each}\n" in printed for each in sentences)
    caveats = json.loads((tmp_path / "out" / "controller_evaluation.json").read_text())["caveats"]
    assert caveats[:2] == list(sentences)
    # Tables choose it.
    assert main([str(folder), *flags]) == 0
    assert "two_stage" not in capsys.readouterr().out


def test_states_and_checkpoints_of_another_model_or_split_are_refused(tmp_path: Path, parts):
    calibration, rest = parts
    checkpoint, other = trained(tmp_path, calibration), tmp_path / "other.pt"
    states = states_of(networks_with(0), range(8))
    replace(states, splits={"signs": "train"}).save(other)
    with pytest.raises(ConfigurationError, match="of the split validation of signs, and train is in .*other.pt"):
        learned_replay(checkpoint, other, calibration, rest)
    replace(states, model={"name": "folder/small", "weights_sha256": "one"}).save(other)
    with pytest.raises(ConfigurationError, match="of the model folder/tiny, and the states of folder/small"):
        learned_replay(checkpoint, other, calibration, rest)
    replace(states, model={"name": "folder/tiny", "weights_sha256": "two"}).save(other)
    with pytest.raises(ConfigurationError, match="was trained with other weights of the model than .*other.pt"):
        learned_replay(checkpoint, other, calibration, rest)


def test_calibration_samples_without_states_are_a_caveat_alone(tmp_path: Path, parts):
    """Those that the lookup is built of may be of another grid, which nobody recorded."""
    calibration, rest = parts
    checkpoint = trained(tmp_path, calibration)
    elsewhere = replace(calibration, sample_ids=tuple(100 + each for each in calibration.sample_ids))
    found = learned_replay(checkpoint, None, elsewhere, rest)
    assert found.grid.sample_ids == rest.sample_ids
    assert found.caveats[1].sentence.startswith("two_stage was trained on other samples than the calibration ones")


def test_a_training_that_began_from_another_is_checked_against_both(tmp_path: Path, parts):
    calibration, rest = parts
    leaking = trained(tmp_path, rest)
    states = states_of(networks_with(0), range(8))
    run = TrainingRun(
        load_networks(leaking),
        replay_environment(calibration, states),
        TrainingPlan(UpdateRecipe(), RewardRecipe(), 1, 0),
        start_of(leaking),
    )
    run.save(tmp_path / CHECKPOINT)
    (caveat,) = learned_replay(tmp_path / CHECKPOINT, None, calibration, rest).caveats[1:]
    assert caveat.sentence.startswith(
        "two_stage was started from a training on other samples than the calibration ones"
    )


def test_requests_without_states_are_counted_apart_from_those_without_times(folder: Path, tmp_path: Path, parts):
    """All eight are evaluated by a lookup of another grid; one was never recorded, one has no score at the high
    tier.
    """
    checkpoint = trained(tmp_path, parts[0], num_states=7)
    high = [measured_sample(at, staged_run(vision_s=0.5)) for at in range(8) if at != 2]
    low = [measured_sample(at, staged_run()) for at in range(8)]
    holed = write(tmp_path / "holed", result(setting("low", 2, 3), low), result(setting("high", 2, 3), high))
    flags = ["--calibration", str(folder), "--learned", str(checkpoint), "--output_dir", str(tmp_path / "out")]
    assert main([str(holed), *flags, "--budgets_ms", "600"]) == 0
    content = json.loads((tmp_path / "out" / "controller_evaluation.json").read_text())
    assert (content["num_requests"], content["num_dropped"], content["num_without_states"]) == (6, 2, 1)
    assert any(
        caveat.startswith("1 of 7 samples have no states: it was not requested when the states were recorded (1); no")
        for caveat in content["caveats"]
    )
    assert main([str(holed), "--calibration", str(folder), "--budgets_ms", "600"]) == 0
    content = json.loads((holed / "analysis" / "controller_replay" / "controller_evaluation.json").read_text())
    assert (content["num_dropped"], content["num_without_states"]) == (1, 0)
