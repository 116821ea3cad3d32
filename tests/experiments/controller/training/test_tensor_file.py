"""Checkpoints and states come back from their files; any other file is named in one line, whatever torch says of it."""

import pickle
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from experiment_core_utils.primitives.errors import ResultsError, ResultsNotSaved
from experiments.controller.evaluate_controller import main as evaluate
from experiments.controller.train import main as train
from experiments.controller.training.run import (
    CHECKPOINT,
    TRAINING,
    earlier_trainings,
    load_networks,
    start_of,
    stored_environment,
)
from experiments.controller.training.tensor_file import FileKind, read_tensor_file, write_tensor_file
from tests.experiments.controller.hand_made_states import grid_of, networks_with, states_of

STATES = FileKind("controller_states", 1, "states.pt")
ADVICE = "; give the states.pt that experiments.controller.train wrote"


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    write_tensor_file(tmp_path / "new" / "a.pt", STATES, {"rows": torch.arange(3), "name": "x"})
    with read_tensor_file(tmp_path / "new" / "a.pt", STATES) as found:
        pass
    assert found["rows"].tolist() == [0, 1, 2] and found["name"] == "x" and set(found) == {"rows", "name"}


def zipped(path: Path) -> None:
    with ZipFile(path, "w") as file:
        file.writestr("a", "b")


def cut(path: Path) -> None:
    torch.save([1], path)
    path.write_bytes(path.read_bytes()[:200])


NO_TENSORS = " is not a controller_states, or not the whole of one"
NO_PLAIN_VALUES = " is not a controller_states: it contains more than tensors and plain values, or is damaged"


@pytest.mark.parametrize(
    ("make", "output"),
    [
        (lambda path: path.write_text("{}"), NO_TENSORS),
        # Read as a pickle these words are a look-up of what was never stored.
        (lambda path: path.write_text("hello world"), NO_TENSORS),
        (lambda path: path.write_bytes(b""), NO_TENSORS),
        (lambda path: path.write_bytes(pickle.dumps({"a": Path("x")})), NO_TENSORS),
        (cut, NO_TENSORS),
        (zipped, NO_PLAIN_VALUES),
        (lambda path: torch.save(torch.nn.Linear(2, 2), path), NO_PLAIN_VALUES),
        (lambda path: torch.save([1], path), " is not a controller_states of version 1"),
        (lambda path: torch.save({1: 2}, path), " is not a controller_states of version 1"),
        (
            lambda path: torch.save({"kind": "controller_training", "version": 2}, path),
            " is not a controller_states of version 1, but a controller_training of version 2",
        ),
        (lambda path: path.mkdir(), " cannot be read as a controller_states (Is a directory)"),
        (lambda path: None, " cannot be read as a controller_states (No such file or directory)"),
    ],
)
def test_any_other_file_is_named_in_one_line(tmp_path: Path, make: Callable[[Path], object], output: str) -> None:
    path = tmp_path / "given"
    make(path)
    with pytest.raises(ResultsError) as caught, read_tensor_file(path, STATES):
        pass
    assert str(caught.value) == f"{path}{output}{ADVICE}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight samples at two settings."""
    return grid_of(tmp_path / "run")


def test_commands_name_the_file_that_they_were_given(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--learned` and `--states` of the evaluation, `--states` and `--init_from` of a training."""
    wrong = tmp_path / "notes.txt"
    wrong.write_text("hello world")
    states = tmp_path / "states.pt"
    states_of(networks_with(0), range(8)).save(states)
    flags = ["--grid", str(folder), "--controller_dir", str(tmp_path / "out")]
    trained = [*flags, "--states", str(states), "--num_budgets", "2", "--updates", "1"]
    assert train([*trained, "--asks_per_update", "1", "--warm_start", "none"]) == 0
    checkpoint = str(tmp_path / "out" / "checkpoint.pt")
    again = [*trained[:2], "--controller_dir", str(tmp_path / "again")]
    capsys.readouterr()
    for command, given, usual in (
        (evaluate, [str(folder), "--learned", str(wrong)], "checkpoint.pt"),
        (evaluate, [str(folder), "--learned", checkpoint, "--states", str(wrong)], "states.pt"),
        (train, [*again, "--states", str(wrong)], "states.pt"),
        (train, [*again, "--states", str(states), "--num_budgets", "2", "--init_from", str(wrong)], "checkpoint.pt"),
    ):
        assert command(given) == 1
        error = capsys.readouterr().err
        assert f"{wrong} is not a controller_" in error and f"give the {usual} that" in error
        assert error.count("\n") == 1 and "weights_only" not in error


@pytest.mark.parametrize("error", [KeyError("space"), TypeError("a"), RuntimeError("size mismatch"), ValueError("b")])
def test_content_that_lacks_something_is_named_with_its_file(tmp_path: Path, error: Exception) -> None:
    path = tmp_path / "given"
    write_tensor_file(path, STATES, {})
    with pytest.raises(ResultsError) as caught, read_tensor_file(path, STATES):
        raise error
    output = str(caught.value)
    assert output.startswith(f"{path} is a broken {STATES.kind} (") and output.endswith(STATES.advice)


@pytest.mark.parametrize("size", [10, 100, 100_000])
def test_a_full_disk_is_one_line_and_the_file_before_stays(tmp_path: Path, size: int) -> None:
    """A limit of file size stands for the disk; small, middle and large tensors are refused at different calls."""
    path = tmp_path / "states.pt"
    write_tensor_file(path, STATES, {"a": torch.zeros(1)})
    before = path.read_bytes()
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
        with pytest.raises(ResultsNotSaved, match=r"states\.pt cannot be written \(File too large\); make room, then"):
            write_tensor_file(path, STATES, {"a": torch.zeros(size)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [each.name for each in tmp_path.iterdir()] == ["states.pt"] and path.read_bytes() == before


def test_a_checkpoint_without_its_parts_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / CHECKPOINT
    write_tensor_file(path, TRAINING, {"plan": {}})
    for read in (load_networks, stored_environment, start_of, earlier_trainings):
        with pytest.raises(ResultsError, match=f"{path} is a broken {TRAINING.kind}"):
            read(path)
