"""Files written whole or not at all."""

import json
import threading
from pathlib import Path

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError, ResultsNotSaved
from experiment_core_utils.primitives.files import (
    check_file_name_part,
    locked,
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


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".drift.json.tmp", ".a_settings.csv.tmp", "drift.json", ".mine.tmp"):
        (tmp_path / name).write_text("")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.tmp", "drift.json"]


def test_one_after_the_other_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.json"
    entered: list[str] = []

    def second() -> None:
        with locked(path):
            entered.append("second")

    thread = threading.Thread(target=second)
    with locked(path):
        thread.start()
        thread.join(timeout=0.2)
        entered.append("first")
    thread.join(timeout=10)
    assert entered == ["first", "second"]
    assert [each.name for each in path.parent.iterdir()] == [".r.json.lock"]


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a b", "a\n", "é"])
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    check_file_name_part("text_generation-2", "the task type")
    with pytest.raises(ConfigurationError, match="the task type .* is part of file names; use letters"):
        check_file_name_part(name, "the task type")
