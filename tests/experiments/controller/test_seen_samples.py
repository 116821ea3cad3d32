"""Which samples a controller may have seen: of its last training, and of those that it was started from."""

from pathlib import Path

import pytest
import torch

from experiment_core_utils.c_prompt_processing import fingerprint_of_ids
from experiment_core_utils.records.caveats import sentences
from experiment_core_utils.tasks.registry import load_task
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.networks.two_stage import TwoStageNetworks
from experiments.controller.provenance import live_leaks, replay_leaks, training_caveats
from experiments.controller.training.expected import UpdateRecipe
from experiments.controller.training.replay_environment import ReplayEnvironment, RewardRecipe, fingerprints
from experiments.controller.training.run import TrainingPlan, TrainingRun, start_of
from tests.experiments.controller.hand_made_environment import checkpoint_of, made_up_environment
from tests.experiments.controller.hand_made_requests import grid

TASK = load_task("reference_vqa", "validation")
MAY_HAVE = "it may have seen those that it is evaluated on"


def replayed(sample_ids: list[int], split: str = "validation", task: str = TASK.name) -> dict[str, object]:
    return {"kind": "replay", "samples": {task: fingerprint_of_ids(sample_ids)}, "splits": {task: split}}


def trained(folder: Path, described: dict[str, object], init_from: Path | None = None) -> Path:
    """A checkpoint of a training on what is described."""
    return checkpoint_of(folder, described, start_of(init_from))


@pytest.mark.parametrize(
    ("trained_on", "output"),
    [
        (replayed([1, 5, 9], task="another"), None),
        (replayed([1, 5, 9]), "of the same ids"),
        (replayed([1, 5], "train"), None),
        (replayed([1, 5]), "only a digest is known"),
    ],
)
def test_samples_of_the_training_are_a_caveat_where_they_are_known_and_where_they_are_not(trained_on, output):
    caveats = sentences(training_caveats(trained_on, TASK, [9, 1, 5]))
    if output is None:
        assert caveats == []
    else:
        assert len(caveats) == 1
        assert output in caveats[0]


def test_a_live_evaluation_checks_all_trainings_of_the_checkpoint(tmp_path: Path):
    """A replay on 1 and 5, then trainings on another split: the evaluation is of 9, 1 and 5."""
    first = trained(tmp_path / "first", replayed([1, 5]))
    second = trained(tmp_path / "second", replayed([7], "train"), first)
    third = trained(tmp_path / "third", replayed([8], "train"), second)
    output = (
        f"two_stage was started from a training on a replay of {TASK.name}, of whose samples only a digest is known: "
        f"{MAY_HAVE}"
    )
    assert sentences(live_leaks(third, TASK, [9, 1, 5])) == sentences(live_leaks(second, TASK, [9, 1, 5])) == [output]
    assert sentences(live_leaks(trained(tmp_path / "other", replayed([8], "train")), TASK, [9, 1, 5])) == []


def test_a_training_that_resumes_keeps_its_start(tmp_path: Path):
    first = trained(tmp_path / "first", replayed([5]))
    second = trained(tmp_path / "second", replayed([7], "train"), first)
    tables = made_up_environment(5, 2, seed=0)
    environment = ReplayEnvironment(tables.space, tables.tables, replayed([7], "train"))
    networks = TwoStageNetworks(tables.space, tables.tables.prompts.shape[1], 1.0, 0)
    run = TrainingRun(networks, environment, TrainingPlan(UpdateRecipe(), RewardRecipe(), 1, 0))
    run.resume(second)
    run.save(second)
    assert len(sentences(live_leaks(second, TASK, [5]))) == 1


def parts() -> tuple[MeasuredGrid, MeasuredGrid]:
    """Requests 0 and 1 for calibration; 2 and 3 are evaluated."""
    whole = grid()
    return whole.take(torch.tensor([0, 1]).numpy()), whole.take(torch.tensor([2, 3]).numpy())


def test_a_replay_checks_all_trainings_of_the_checkpoint(tmp_path: Path):
    calibration, validated = parts()
    own = {"kind": "replay", "samples": fingerprints(calibration), "splits": {}}
    fair = trained(tmp_path / "fair", own)
    assert sentences(replay_leaks(fair, calibration)) == []
    assert sentences(replay_leaks(trained(tmp_path / "twice", own, fair), calibration)) == []
    others = trained(tmp_path / "others", own | {"samples": fingerprints(validated)})
    assert sentences(replay_leaks(trained(tmp_path / "hidden", own, others), calibration)) == [
        "two_stage was started from a training on other samples than the calibration ones, and may have seen those "
        "that it is evaluated on"
    ]


def test_without_calibration_samples_a_training_may_have_seen_anything(tmp_path: Path):
    calibration, _ = parts()
    fair = trained(tmp_path, {"kind": "replay", "samples": fingerprints(calibration)})
    nothing = calibration.take(torch.zeros(2, dtype=torch.bool).numpy())
    (caveat,) = sentences(replay_leaks(fair, nothing))
    assert caveat.startswith("two_stage was trained on other samples than the calibration ones")
