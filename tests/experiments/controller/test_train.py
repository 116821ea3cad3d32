"""The training command: a whole run, one that goes on, its files, and what it refuses."""

import csv
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.records.journal import only_run_in
from experiments.controller.train import build_parser, main, plan_of
from experiments.controller.training.jobs import open_job
from experiments.controller.training.run import TrainingRun
from experiments.controller.training.summary import COLUMNS, TensorboardCurves, running_means, summary_writer
from tests.experiments.controller.hand_made_states import flags_of

DOCUMENT = REPOSITORY / "docs" / "controller" / "training.md"
SMALL = ["--asks_per_update", "4", "--checkpoint_every", "2", "--warm_start_steps", "5"]


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """The flags of a small training on a hand-made grid."""
    return [*SMALL, *flags_of(tmp_path / "replay")]


def test_a_run_writes_checkpoint_curves_and_summary(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # As a script of before names the one environment and the one objective.
    flags = [*small, "--environment", "replay", "--objective", "expected"]
    assert main([*flags, "--controller_dir", str(tmp_path / "a"), "--updates", "3"]) == 0
    with (tmp_path / "a" / "learning_curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["update"] for row in rows] == ["1", "2", "3"] and tuple(rows[0]) == COLUMNS
    content = json.loads((tmp_path / "a" / "training.json").read_text())
    assert content["spent"]["updates"] == 3 and content["num_parameters"] < 250_000
    assert [(each["part"], each["policy"]) for each in content["parts"]] == [
        (part, policy) for part in ("trained", "held_out") for policy in ("two_stage", "per_budget", "per_sample")
    ]
    rewards = {each["policy"]: each["reward"] for each in content["parts"][:3]}
    assert rewards["per_sample"] >= rewards["per_budget"] >= rewards["two_stage"]
    assert (tmp_path / "a" / "learning_curves.png").stat().st_size > 1000
    assert "update 3/3: reward" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "steps", "kl_weight", "learning_rate"),
    [
        ([], 300, 0.1, 1e-3),
        (["--warm_start", "per_budget", "--warm_start_steps", "7"], 7, 0.1, 1e-3),
        (["--kl_weight", "0", "--learning_rate", "0.5"], 300, 0.0, 0.5),
        (["--warm_start", "none"], 0, 0.0, 3e-3),
        (["--init_from", "other.pt"], 0, 0.1, 1e-3),
    ],
)
def test_networks_that_were_taught_are_moved_carefully(
    flags: list[str], steps: int, kl_weight: float, learning_rate: float
) -> None:
    plan = plan_of(build_parser().parse_args([*flags, "--grid", "x", "--controller_dir", "anywhere"]))
    assert plan.warm_start_steps == steps
    assert (plan.recipe.kl_weight, plan.recipe.learning_rate) == (kl_weight, learning_rate)


def test_an_existing_run_is_not_overwritten_and_resumes_on_request(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*small, "--controller_dir", str(tmp_path), "--updates", "4"]
    assert main(flags) == 0
    assert main(flags) == 2
    assert "add --resume to resume" in capsys.readouterr().err
    before = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["rows"]
    assert main([*flags, "--resume"]) == 0
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["rows"] == before
    assert main([*flags, "--resume", "--training_seed", "1"]) == 2
    assert "another plan (seed)" in capsys.readouterr().err


def test_a_second_training_in_the_folder_is_refused_and_a_removed_folder_ends_the_first(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*small, "--controller_dir", str(tmp_path / "a"), "--updates", "3"]
    with only_run_in(tmp_path / "a" / ".parts"):
        assert main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}/a/.parts/lock is being written by another process; wait for that run")
    assert error.count("\n") == 1 and not (tmp_path / "a" / "checkpoint.pt").exists()
    whole = TrainingRun.step

    def removed_meanwhile(self: TrainingRun) -> dict[str, float]:
        shutil.rmtree(tmp_path / "a")
        return whole(self)

    monkeypatch.setattr(TrainingRun, "step", removed_meanwhile)
    assert main(flags) == 1
    assert "lock was removed or moved while this run writes it; " in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_missing_curves_of_a_finished_training_are_written_when_it_resumes(small: list[str], tmp_path: Path) -> None:
    """As after a stop between the last checkpoint and the curves."""
    flags = [*small, "--controller_dir", str(tmp_path), "--updates", "2"]
    assert main(flags) == 0
    before = (tmp_path / "learning_curves.csv").read_bytes()
    for path in tmp_path.glob("learning_curves.*"):
        path.unlink()
    assert main([*flags, "--resume"]) == 0
    assert (tmp_path / "learning_curves.csv").read_bytes() == before
    assert {path.suffix for path in tmp_path.glob("learning_curves.*")} == {".csv", ".png", ".svg"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--grid", "x", "--environment", "synthetic"], "invalid choice: 'synthetic' (choose from 'replay')"),
        (["--grid", "x", "--objective", "grpo"], "invalid choice: 'grpo' (choose from 'expected')"),
        (["--grid", "x", "--warm_start", "per_sample"], "invalid choice: 'per_sample'"),
        (["--grid", "x", "--resume"], "checkpoint.pt to resume from; drop --resume"),
        (["--grid", "x", "--split_seed", "-1"], "--split_seed -1 is not possible; give at least 0"),
        ([], "required: --grid"),
        (["--grid", "x", "--asks_per_update", "0"], "asks_per_update 0 is not possible; give at least 1"),
        (["--grid", "x", "--updates", "0"], "--updates 0 is not possible; give at least 1"),
        (["--grid", "x", "--checkpoint_every", "0"], "--checkpoint_every 0 is not possible; give at least 1"),
        (["--grid", "x", "--learning_rate", "nan"], "learning_rate nan is not possible; give a finite"),
        (
            ["--grid", "x", "--learning_rate", "1e30"],
            "learning_rate 1e+30 is not possible; give a finite number above 0 and at most 1",
        ),
        (["--grid", "x", "--kl_weight", "1e30"], "kl_weight 1e+30 is not possible; give at least 0 and at"),
        (["--grid", "x", "--latency_weight", "1e30"], "latency_weight 1e+30 is not possible"),
        (["--grid", "x", "--over_budget_penalty", "inf"], "over_budget_penalty inf is not possible"),
        (["--grid", "x", "--calibration_share", "-0.5"], "share -0.5 is not possible; give"),
        (["--grid", "x", "--calibration_share", "nan"], "give a fraction between 0 and 1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main([*flags, "--controller_dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def scalars_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Curve -> (update, value) of each of its points, as TensorBoard reads them."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(folder / "tensorboard")).Reload()
    return {name: [(each.step, each.value) for each in found.Scalars(name)] for name in found.Tags()["scalars"]}


def rows_in(folder: Path) -> list[dict[str, str]]:
    with (folder / "learning_curves.csv").open() as file:
        return list(csv.DictReader(file))


def test_tensorboard_shows_the_curves_also_of_a_training_that_was_broken_off(small: list[str], tmp_path: Path) -> None:
    """Of five updates the fifth was done after the last checkpoint; the first two were done without TensorBoard."""
    pytest.importorskip("tensorboard")
    flags = [*small, "--controller_dir", str(tmp_path), "--updates", "6"]
    stopped = build_parser().parse_args([*flags, "--tensorboard"])
    plan = plan_of(stopped)
    job = open_job(stopped, [], plan)
    job.run_warm_start(plan)
    run = TrainingRun(job.networks, job.environment, plan)
    for _ in range(2):
        run.step()
    run.save(tmp_path / "checkpoint.pt")
    curves = TensorboardCurves(summary_writer(), tmp_path, [])
    for update in (3, 4, 5):
        curves.add({**run.rows[-1], "update": update, "reward": -7.0})
    curves.flush()
    assert main([*flags, "--resume", "--tensorboard"]) == 0
    rows, found = rows_in(tmp_path), scalars_in(tmp_path)
    assert len(rows) == 6 and list(found) == list(COLUMNS[1:])
    for name, points in found.items():
        assert [step for step, _ in points] == [1, 2, 3, 4, 5, 6]
        # TensorBoard keeps float32.
        assert [value for _, value in points] == pytest.approx([float(row[name]) for row in rows], rel=1e-6)


@pytest.mark.skipif(find_spec("tensorboard") is not None, reason="tensorboard is there")
def test_without_tensorboard_it_says_so_before_anything_is_trained(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*small, "--controller_dir", str(tmp_path / "new"), "--updates", "1", "--tensorboard"]) == 2
    error = capsys.readouterr().err
    assert "--tensorboard needs the package tensorboard; install it" in error and error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_running_means_by_hand() -> None:
    assert running_means([1.0, 3.0, 5.0, 7.0], 2).tolist() == [1.0, 2.0, 4.0, 6.0]


def test_every_flag_column_and_key_is_documented(small: list[str], tmp_path: Path) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    flags = [
        flag for action in build_parser()._actions for flag in action.option_strings if flag not in ("-h", "--help")
    ]
    assert main([*small, "--controller_dir", str(tmp_path), "--updates", "1"]) == 0
    content = json.loads((tmp_path / "training.json").read_text())
    names = {*flags, *COLUMNS, *content, *content["spent"], *content["parts"][0]}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
