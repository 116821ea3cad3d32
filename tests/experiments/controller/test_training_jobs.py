"""States are recorded with what the grid was measured with, and anything else is refused; what captions count."""

from pathlib import Path

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.controller.train import build_parser, plan_of
from experiments.controller.training_jobs import open_job, refuse_other_source
from tests.experiments.controller.hand_made_states import networks_with, states_of
from tests.experiments.hand_made_sweep import result, setting, write
from tests.hand_made_records import measured_sample, staged_run


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    """Of the split `validation` of `signs`, with the model `folder/tiny`."""
    return write(tmp_path / "grid", result(setting()))


def test_the_same_split_and_model_in_another_place_are_taken(grid: Path) -> None:
    refuse_other_source([grid], {"signs": "validation", "elsewhere": "test"}, "/other/place/tiny")
    refuse_other_source([grid], {}, "tiny")


def test_another_split_is_refused(grid: Path) -> None:
    with pytest.raises(ConfigurationError, match="split validation of signs, and train is read now; give --split val"):
        refuse_other_source([grid], {"signs": "train"}, "folder/tiny")


def test_another_model_is_refused(grid: Path) -> None:
    with pytest.raises(ConfigurationError, match="model folder/tiny, and the states of folder/small; give the grid's"):
        refuse_other_source([grid], {"signs": "validation"}, "folder/small")


def test_the_caption_counts_the_samples_that_are_trained_on(tmp_path: Path) -> None:
    """Eight samples at two settings; half of the pictures are held out, and one of the others has no states."""
    low, high = ([measured_sample(at, staged_run(vision_s=vision_s)) for at in range(8)] for vision_s in (0.0, 0.5))
    folder = write(tmp_path / "run", result(setting("low", 2, 3), low), result(setting("high", 2, 3), high))
    states = tmp_path / "states.pt"
    flags = ["--environment", "replay", "--grid", str(folder), "--states", str(states), "--num_budgets", "2"]
    given = build_parser().parse_args([*flags, "--controller_dir", str(tmp_path / "out")])
    states_of(networks_with(0), range(8)).save(states)
    job = open_job(given, [], plan_of(given))
    described = job.environment.describe()
    assert described["num_samples"] == 4
    assert job.caption.startswith("trained on a replay of:  Scripted GPU")
    assert "n = 4 requests, 2 settings" in job.caption
    states_of(networks_with(0), range(7)).save(states)
    job = open_job(given, [], plan_of(given))
    assert f"n = {job.environment.describe()['num_samples']} requests, 2 settings" in job.caption


def test_a_synthetic_training_says_how_many_samples_it_has(tmp_path: Path) -> None:
    given = build_parser().parse_args(["--environment", "synthetic", "--controller_dir", str(tmp_path)])
    job = open_job(given, [], plan_of(given))
    assert job.environment.describe()["num_samples"] == 30
    assert job.caption == "synthetic environment  ·  trained on 30 samples"
