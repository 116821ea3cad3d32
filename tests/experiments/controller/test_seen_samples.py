"""Which samples a controller may have seen: of its last training, and of those that it was started from."""

from pathlib import Path

import pytest
import torch

from experiment_core_utils.c_prompt_processing import fingerprint_of_ids
from experiment_core_utils.records.caveats import sentences
from experiment_core_utils.tasks.registry import load_task
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.networks.two_stage import TwoStageNetworks
from experiments.controller.provenance import NOT_KNOWN, fingerprints, live_leaks, replay_leaks, training_caveats
from experiments.controller.training.environment import RewardRecipe
from experiments.controller.training.grpo import GrpoRecipe
from experiments.controller.training.run import CHECKPOINT, TrainingPlan, TrainingRun, start_of
from experiments.controller.training.tabled_environment import TabledEnvironment, synthetic_environment
from tests.experiments.controller.hand_made_requests import grid

TASK = load_task("reference_vqa", "validation")
MAY_HAVE = "it may have seen those that it is evaluated on"


def live(split: str, sample_ids: list[int], task: str = TASK.name) -> dict[str, object]:
    return {"kind": "live", "task": task, "split": split, "sample_ids": sample_ids}


def replayed(task: str, sample_ids: list[int]) -> dict[str, object]:
    return {"kind": "replay", "samples": {task: fingerprint_of_ids(sample_ids)}}


def trained(folder: Path, described: dict[str, object], init_from: Path | None = None) -> Path:
    """A checkpoint of a training on what is described."""
    tables = synthetic_environment(5, 2, seed=0)
    environment = TabledEnvironment(tables.space, tables.tables, described, budget_token_is_fixed=False)
    networks = TwoStageNetworks(tables.space, tables.hidden_size, 1.0, 0)
    plan = TrainingPlan(GrpoRecipe(), RewardRecipe(), 1, 0)
    TrainingRun(networks, environment, plan, start_of(init_from)).save(folder / CHECKPOINT)
    return folder / CHECKPOINT


def without_start(checkpoint: Path) -> Path:
    """The same file as it was before starts were kept."""
    content = torch.load(checkpoint, weights_only=True)
    del content["start"]
    torch.save(content, checkpoint)
    return checkpoint


@pytest.mark.parametrize(
    ("trained_on", "output"),
    [
        (live("validation", [7, 5, 9]), "two_stage was trained on 2 of the 3 requests"),
        (live("validation", [7, 8]), None),
        (live("train", [1, 5, 9]), None),
        ({"kind": "synthetic"}, None),
        (replayed("another", [1, 5, 9]), None),
        (replayed(TASK.name, [1, 5, 9]), "of the same ids"),
        (replayed(TASK.name, [1, 5]), "only a digest is known"),
        (replayed(TASK.name, [1, 5]) | {"splits": {TASK.name: "train"}}, None),
        (replayed(TASK.name, [1, 5]) | {"splits": {TASK.name: "validation"}}, "only a digest is known"),
        (None, "is not known"),
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
    """A replay on 1 and 5, then a live training on 7, then one on 8: the evaluation is of 9, 1 and 5."""
    first = trained(tmp_path / "first", replayed(TASK.name, [1, 5]))
    second = trained(tmp_path / "second", live("validation", [7]), first)
    third = trained(tmp_path / "third", live("validation", [8]), second)
    output = (
        f"two_stage was started from a training on a replay of {TASK.name}, of whose samples only a digest is known: "
        f"{MAY_HAVE}"
    )
    assert sentences(live_leaks(third, TASK, [9, 1, 5])) == sentences(live_leaks(second, TASK, [9, 1, 5])) == [output]
    assert sentences(live_leaks(trained(tmp_path / "other", live("validation", [8])), TASK, [9, 1, 5])) == []
    again = trained(tmp_path / "again", live("validation", [8]), trained(tmp_path / "a", live("validation", [5, 9])))
    assert sentences(live_leaks(again, TASK, [9, 1, 5])) == [
        "two_stage was started from a training on 2 of the 3 requests that it is evaluated on"
    ]


def test_what_an_old_checkpoint_was_started_from_is_not_known(tmp_path: Path):
    old = without_start(trained(tmp_path / "old", live("validation", [8])))
    assert sentences(live_leaks(old, TASK, [9, 1, 5])) == [NOT_KNOWN.sentence]
    # Nor is it of what is started from that.
    assert sentences(live_leaks(trained(tmp_path / "new", live("validation", [7]), old), TASK, [9, 1, 5])) == [
        NOT_KNOWN.sentence
    ]
    # A synthetic training is started from nothing.
    assert sentences(live_leaks(without_start(trained(tmp_path / "c", {"kind": "synthetic"})), TASK, [9])) == []


def test_a_training_that_resumes_keeps_its_start(tmp_path: Path):
    first = trained(tmp_path / "first", live("validation", [5]))
    second = trained(tmp_path / "second", {"kind": "synthetic"}, first)
    tables = synthetic_environment(5, 2, seed=0)
    environment = TabledEnvironment(tables.space, tables.tables, {"kind": "synthetic"}, False)
    networks = TwoStageNetworks(tables.space, tables.hidden_size, 1.0, 0)
    run = TrainingRun(networks, environment, TrainingPlan(GrpoRecipe(), RewardRecipe(), 1, 0))
    run.resume(second)
    run.save(second)
    assert len(sentences(live_leaks(second, TASK, [5]))) == 1


def parts() -> tuple[MeasuredGrid, MeasuredGrid]:
    """Requests 0 and 1 for calibration; 2 and 3 are evaluated."""
    whole = grid()
    return whole.take(torch.tensor([0, 1]).numpy()), whole.take(torch.tensor([2, 3]).numpy())


def test_a_replay_checks_all_trainings_of_the_checkpoint(tmp_path: Path):
    calibration, validated = parts()
    own = {"kind": "replay", "samples": fingerprints(calibration)}
    fair = trained(tmp_path / "fair", own)
    assert sentences(replay_leaks(fair, calibration, validated)) == []
    assert sentences(replay_leaks(trained(tmp_path / "twice", own, fair), calibration, validated)) == []
    others = trained(tmp_path / "others", {"kind": "replay", "samples": fingerprints(validated)})
    assert sentences(replay_leaks(trained(tmp_path / "hidden", own, others), calibration, validated)) == [
        "two_stage was started from a training on other samples than the calibration ones, and may have seen those "
        "that it is evaluated on"
    ]
    counted = trained(tmp_path / "counted", own, trained(tmp_path / "live", live("validation", [0, 3, 9], "signs")))
    assert sentences(replay_leaks(counted, calibration, validated)) == [
        "two_stage was started from a training on 1 of the 2 requests that it is evaluated on"
    ]
    assert sentences(replay_leaks(without_start(fair), calibration, validated)) == [NOT_KNOWN.sentence]


def test_without_calibration_samples_a_training_may_have_seen_anything(tmp_path: Path):
    calibration, validated = parts()
    fair = trained(tmp_path, {"kind": "replay", "samples": fingerprints(calibration)})
    nothing = calibration.take(torch.zeros(2, dtype=torch.bool).numpy())
    (caveat,) = sentences(replay_leaks(fair, nothing, validated))
    assert caveat.startswith("two_stage was trained on other samples than the calibration ones")
