"""Calls counted and failed by hand, each in a child: what is patched there stays there."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes.fault_injection import torn_files
from tests.processes.faults import FaultyCalls
from tests.processes.forked_runs import KILLED


def in_child(folder: Path, work: Callable[[Path], None], fail_at: int | None, fault: str) -> tuple[int, list[str]]:
    """Exit code, 7 for an error of the system; kinds and names of the calls in the folder, and the error."""
    log = folder.parent / "log"
    pid = os.fork()
    if not pid:
        code, error = 0, ""
        try:
            faults = FaultyCalls([str(folder)], fail_at, fault)
            faults.install()
            work(folder)
        except OSError as raised:
            code, error = 7, str(raised)
        finally:
            calls = [f"{kind} {Path(path).name}" for kind, path in faults.places]
            log.write_text(json.dumps([*calls, error]))
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, json.loads(log.read_text()) if code != KILLED else []


def replaced(folder: Path) -> None:
    """Read one file, write another beside it, and rename that over the first."""
    assert (folder / "a").read_text() == "old"
    with (folder / "b").open("w") as file:
        file.write("new text")
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / "b", folder / "a")
    descriptor = os.open(folder / "c", os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, b"12345678")
    os.ftruncate(descriptor, 2)
    os.close(descriptor)
    (folder / "c").unlink()
    (folder.parent / "elsewhere").write_text("not counted")


CALLS = ["open to read a", "open b", "write b", "fsync b", "rename b", "open c", "write c", "truncate c", "unlink c"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "a").write_text("old")
    return tmp_path / "f"


def test_calls_are_counted_through_files_descriptors_and_paths(folder: Path) -> None:
    assert in_child(folder, replaced, None, "kill") == (0, [*CALLS, ""])
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"a": "new text"}


@pytest.mark.parametrize(
    ("fail_at", "left"),
    [
        (0, {"a": "old"}),
        (1, {"a": "old"}),
        (2, {"a": "old", "b": "new "}),
        (4, {"a": "old", "b": "new text"}),
        (6, {"a": "new text", "c": "1234"}),
    ],
)
def test_the_nth_call_fails_and_half_of_a_write_is_done(folder: Path, fail_at: int, left: dict[str, str]) -> None:
    code, calls = in_child(folder, replaced, fail_at, "ENOSPC")
    # Closing the file, and then the file below it, tries to write once more each.
    again = ["write b"] * 2 if fail_at == 2 else []
    assert (code, calls[:-1]) == (7, [*CALLS[: fail_at + 1], *again])
    assert "No space left on device" in calls[-1]
    assert {path.name: path.read_text() for path in folder.iterdir()} == left


@pytest.mark.parametrize(
    ("fail_at", "left"),
    [
        (2, {"a": "old", "b": "new "}),
        # The fifth call, the renaming, is done; the eighth, the truncation, is not.
        (4, {"a": "new text"}),
        (7, {"a": "new text", "c": "12345678"}),
    ],
)
def test_a_kill_comes_before_the_call_or_after_it(folder: Path, fail_at: int, left: dict[str, str]) -> None:
    assert in_child(folder, replaced, fail_at, "kill")[0] == KILLED
    assert {path.name: path.read_text() for path in folder.iterdir()} == left


def test_files_that_are_not_whole_are_found(folder: Path) -> None:
    for name, text in {
        "whole.json": "{}", "torn.json": '{"a"', ".hidden.json": "{", "torn.csv": "a,b\n1,", "whole.csv": "a,b\n1,2\n",
        "torn.html": "<html>", "whole.html": "<html></html>\n", "torn.jsonl": "{",
    }.items():  # fmt: skip
        (folder / name).write_text(text)
    assert sorted(Path(each).name for each in torn_files(folder)) == ["torn.csv", "torn.html", "torn.json"]
