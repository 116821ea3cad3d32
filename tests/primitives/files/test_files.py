"""Files written whole or not at all."""

import errno
import json
import os
from pathlib import Path

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError, OutputRefused, ResultsNotSaved
from experiment_core_utils.primitives.files import (
    check_file_name_part,
    check_writable,
    failed_writes_named,
    remove_leftovers,
    write_json_atomically,
    write_text_atomically,
)


def test_a_file_is_written_whole_in_a_folder_that_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    write_json_atomically({"a": [1, 2.5, None]}, path)
    assert json.loads(path.read_text()) == {"a": [1, 2.5, None]}
    assert path.read_text().endswith("}\n")
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("content", [{"bad": object()}, {"bad": float("nan")}, {"bad": float("inf")}])
def test_what_is_no_json_leaves_neither_file_nor_temporary_one(tmp_path: Path, content: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        write_json_atomically(content, tmp_path / "result.json")
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_neither_file_nor_temporary_one(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):  # half of a surrogate pair fails when the file is already open
        write_text_atomically("\ud800", tmp_path / "result.json")
    assert not list(tmp_path.iterdir())


def test_a_failure_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json_atomically({"old": 1}, path)
    with pytest.raises(TypeError):
        write_json_atomically({"new": object()}, path)
    assert json.loads(path.read_text()) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_that_is_taken_by_a_folder_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "result.json").mkdir()
    with pytest.raises(ResultsNotSaved, match="Is a directory"):
        write_json_atomically({}, tmp_path / "result.json")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("kind", ["pipe", "link", "link to a device", "gone"])
def test_only_a_regular_file_is_written_over(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "result.json", tmp_path / "other"
    other.write_text("mine")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"link": other, "link to a device": Path("/dev/null"), "gone": tmp_path / "none"}[kind])
    before = path.lstat()
    with pytest.raises(OutputRefused, match="and only a regular file is written over; give another name") as caught:
        write_json_atomically({}, path)
    assert caught.value.exit_code == 2 and path.lstat() == before and other.read_text() == "mine"


def test_a_device_stays_one() -> None:
    before = Path("/dev/null").stat()
    with pytest.raises(OutputRefused, match="/dev/null is a device or a pipe"):
        write_text_atomically("text", Path("/dev/null"))
    assert Path("/dev/null").stat().st_rdev == before.st_rdev


def test_a_link_beside_the_file_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("mine")
    (tmp_path / ".result.json.tmp").symlink_to(tmp_path / "other")
    write_json_atomically({}, tmp_path / "result.json")
    assert (tmp_path / "other").read_text() == "mine" and (tmp_path / "result.json").read_text() == "{}\n"


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (errno.ENOSPC, 1, "make room, then run the same command again to resume"),
        (errno.EDQUOT, 1, "make room"),
        (errno.EIO, 1, "see that the disk is there"),
        (errno.EACCES, 2, "give a place that you may write to"),
        (errno.EROFS, 2, "give a place that you may write to"),
        (errno.EISDIR, 2, "a folder has this name"),
        (errno.ENOTDIR, 2, "a file has the name of a folder"),
        (errno.ENAMETOOLONG, 2, "give a shorter name"),
    ],
)
def test_each_cause_has_its_own_advice(number: int, code: int, words: str) -> None:
    with pytest.raises(ResultsNotSaved) as caught, failed_writes_named(Path("r.json")):
        raise OSError(number, os.strerror(number))
    assert words in str(caught.value) and caught.value.exit_code == code
    assert ("make room" in str(caught.value)) == (number in (errno.ENOSPC, errno.EDQUOT))


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".drift.json.tmp", ".a_settings.csv.tmp", "drift.json", ".mine.tmp"):
        (tmp_path / name).write_text("")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.tmp", "drift.json"]


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a b", "a\n", "é", "a\0", "x" * 101])
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    check_file_name_part("text_generation-2", "the task type")
    with pytest.raises(ConfigurationError, match="the task type .* is part of file names; use letters"):
        check_file_name_part(name, "the task type")


def test_a_place_is_checked_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(tmp_path / "a" / "b" / "scores.json")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(OutputRefused, match=r"b/scores.json cannot be written \(Permission denied\); give a place"):
        check_writable(tmp_path / "a" / "b" / "scores.json")
