"""A replay's states are of the grid's model, split and knobs, or refused; what is left out, what captions count."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.caveats import Caveat
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.measured_grid import load_grid
from experiments.controller.networks.two_stage import TwoStageNetworks, action_space
from experiments.controller.train import build_parser, main, plan_of
from experiments.controller.training.expected import UpdateRecipe
from experiments.controller.training.jobs import TrainingJob, open_job
from experiments.controller.training.recorded_states import RecordedStates
from experiments.controller.training.replay_environment import RewardRecipe, replay_environment
from experiments.controller.training.run import CHECKPOINT, TrainingPlan, TrainingRun
from experiments.controller.training.summary import summary_of
from tests.experiments.controller.hand_made_states import KNOBS, grid_of, networks_with, states_of
from tests.experiments.hand_made_sweep import reference, result, setting, write
from tests.hand_made_records import measured_sample, staged_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight samples at two settings; half of the pictures are held out."""
    return grid_of(tmp_path / "run")


def opened(folder: Path, states: Path, *flags: str) -> TrainingJob:
    flags_of_job = [
        "--grid",
        str(folder),
        "--states",
        str(states),
        "--num_budgets",
        "2",
        *flags,
    ]
    given, rest = build_parser().parse_known_args([*flags_of_job, "--controller_dir", str(states.parent / "out")])
    return open_job(given, rest, plan_of(given))


def trained(folder: Path, networks: TwoStageNetworks, states: RecordedStates, grid: Path) -> Path:
    """A checkpoint before its first update."""
    environment = replay_environment(load_grid([grid]), states)
    TrainingRun(networks, environment, TrainingPlan(UpdateRecipe(), RewardRecipe(), 1, 0)).save(folder / CHECKPOINT)
    return folder / CHECKPOINT


def test_the_caption_counts_the_samples_that_are_trained_on(folder: Path, tmp_path: Path) -> None:
    """Eight samples at two settings; half of the pictures are held out, and one of the others has no states."""
    states = tmp_path / "states.pt"
    states_of(networks_with(0), range(8)).save(states)
    job = opened(folder, states)
    described = job.environment.described
    assert described["num_samples"] == 4
    assert job.caption.startswith("trained on a replay of:  Scripted GPU")
    assert "n = 4 requests, 2 settings" in job.caption
    states_of(networks_with(0), range(7)).save(states)
    job = opened(folder, states)
    assert f"n = {job.environment.described['num_samples']} requests, 2 settings" in job.caption


def test_training_on_an_invalid_run_says_so_first(folder: Path, tmp_path: Path, capsys) -> None:
    states, path = tmp_path / "states.pt", sorted(folder.glob("*.json"))[0]
    states_of(networks_with(0), range(8)).save(states)
    content = json.loads(path.read_text())
    content["provenance"]["caveat_records"] = [Caveat.of("foreign_load_cpu", cpu_fraction=0.9).model_dump()]
    path.write_text(json.dumps(content))
    opened(folder, states)
    assert capsys.readouterr().err.startswith("INVALID: background load: other processes used 90% of the CPUs")


def test_recorded_states_of_another_split_or_model_than_the_grids_are_refused(folder: Path, tmp_path: Path) -> None:
    path, states = tmp_path / "states.pt", states_of(networks_with(0), range(8))
    replace(states, splits={"signs": "train"}).save(path)
    with pytest.raises(ConfigurationError, match="of the split validation of signs, and train is in .*states.pt; give"):
        opened(folder, path)
    replace(states, model={"name": "folder/small"}).save(path)
    with pytest.raises(ConfigurationError, match="of the model folder/tiny, and the states of folder/small; give oth"):
        opened(folder, path)


def test_settings_beyond_the_controllers_knobs_are_left_out_with_a_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "states.pt"
    states_of(networks_with(0), range(8)).save(path)
    write(folder, reference([measured_sample(at, staged_run()) for at in range(8)]))
    assert "2 settings" in opened(folder, path).caption
    assert capsys.readouterr().err == (
        "caveat: two_stage chooses among tiers: the reference, the model as it is (own_topk4_blocks4), is none of its "
        "choices\n"
    )


def test_samples_without_states_are_counted_and_kept_with_why(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six of eight are recorded, one failed, the last was not requested."""
    path = tmp_path / "states.pt"
    replace(states_of(networks_with(0), range(6)), failed={"signs 6": "no picture"}).save(path)
    job = opened(folder, path)
    assert job.left_out == {
        "signs 6": "no picture",
        "signs 7": "it was not requested when the states were recorded",
    }
    assert "caveat: 2 of 8 samples have no states: no picture (1); it was not requested" in capsys.readouterr().err
    run = TrainingRun(job.networks, job.environment, TrainingPlan(UpdateRecipe(), RewardRecipe(), 1, 0))
    assert summary_of(job, run, {})["left_out"] == job.left_out


def test_states_of_other_knobs_or_networks_are_named_with_what_differs(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "states.pt"
    more = replace(KNOBS, tiers=("low", "medium", "high"))
    wider = TwoStageNetworks(action_space(more, BlockChoice(), (1, 2)), 8, 1.0, 0)
    replace(states_of(networks_with(0), range(8)), space=wider.space).save(path)
    with pytest.raises(
        ConfigurationError,
        match=r"states.pt contains states for other knobs than the grid's \(tiers low, medium, high in place of low, "
        r"high\); delete it",
    ):
        opened(folder, path)
    states_of(networks_with(0), range(8)).save(path)
    other = networks_with(1)
    init = trained(tmp_path, other, states_of(other, range(8)), folder)
    with pytest.raises(ConfigurationError, match=r"\(the budget token\); give the states of its training as --states"):
        opened(folder, path, "--init_from", str(init))
    replace(states_of(other, range(8)), model={"name": "folder/tiny", "weights_sha256": "two"}).save(path)
    with pytest.raises(ConfigurationError, match="was trained with other weights of the model than .*states.pt"):
        opened(folder, path, "--init_from", str(init))
    states_of(other, range(8)).save(path)
    assert opened(folder, path, "--init_from", str(init)).networks.space == other.space


def test_a_start_with_other_knobs_is_refused_before_anything_is_recorded(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The grid has tiers low and high with 2 experts and 3 blocks; the task `signs` cannot even be opened."""
    low, high = ([measured_sample(at, staged_run()) for at in range(8)] for _ in range(2))
    model = {"name": str(tiny_checkpoint)}
    made = [result(setting(tier, 2, 3), ran) for tier, ran in (("low", low), ("high", high))]
    for each in made:
        each["provenance"]["model"] |= model
    folder = write(tmp_path / "run", *made)
    of_grid = KnobSpace(("low", "high"), (2,), (3,), num_total_blocks=4, first_top_k=4)
    networks = TwoStageNetworks(action_space(replace(of_grid, top_ks=(2, 4)), BlockChoice(), (1, 2)), 32, 1.0, 0)
    states = replace(states_of(networks_with(0), range(8)), model=model)
    init = trained(tmp_path, networks, states, folder)
    flags = ["--init_from", str(init), "--model_path", str(tiny_checkpoint), "--device", "cpu"]
    path = tmp_path / "states.pt"
    # The environment is of the grid; a checkpoint says the space of its own.
    content = torch.load(init, weights_only=True)
    torch.save(content | {"space": asdict(networks.space)}, init)
    with pytest.raises(ConfigurationError, match=r"other knobs than the grid has \(top-k 2, 4 in place of 2\); give"):
        opened(folder, path, *flags)
    assert not path.exists()


def test_the_command_keeps_what_it_started_from(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "states.pt"
    states_of(networks_with(0), range(8)).save(path)
    flags = ["--grid", str(folder), "--states", str(path), "--num_budgets", "2"]
    for name, start in (("first", []), ("second", ["--init_from", str(tmp_path / "first" / CHECKPOINT)])):
        assert main([*flags, "--controller_dir", str(tmp_path / name), "--updates", "1", *start]) == 0
    first, second = (torch.load(tmp_path / name / CHECKPOINT, weights_only=True) for name in ("first", "second"))
    assert first["start"] == {"kind": "drawn"}
    assert second["start"] == {"kind": "checkpoint", "environment": first["environment"], "start": first["start"]}
