"""One holder at a time, also after a process was killed, and what is refused."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from experiment_core_utils.primitives.errors import OutputRefused, ResultsRefused
from experiment_core_utils.records import locks
from experiment_core_utils.records.locks import locked, locked_file


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


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holds = (
        "from pathlib import Path; from experiment_core_utils.records.locks import locked_file\n"
        f"with locked_file(Path({str(path)!r}), waits=False): print('held', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with pytest.raises(ResultsRefused, match="lock is being written by another process"):
            locked_file(path, waits=False).__enter__()
        process.send_signal(signal.SIGKILL)
    with locked_file(path, waits=False) as descriptor:
        os.write(descriptor, b"kept")
    assert path.read_bytes() == b"kept"


def test_a_file_that_was_removed_meanwhile_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "lock", locks.lock_descriptor
    attempts: list[int] = []

    def removed_first(descriptor: int, *, blocking: bool) -> bool:
        if not attempts:
            path.unlink()
        attempts.append(descriptor)
        return real(descriptor, blocking=blocking)

    monkeypatch.setattr(locks, "lock_descriptor", removed_first)
    with locked_file(path, waits=True):
        assert path.exists() and len(attempts) == 2


def test_no_locks_and_no_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputRefused, match="is a link"):
        locked_file(tmp_path / "link", waits=True).__enter__()

    def without_locks(descriptor: int, *, blocking: bool) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks, "lock_descriptor", without_locks)
    with pytest.raises(ResultsRefused, match="cannot be locked .* file system that has locks"):
        locked_file(tmp_path / "lock", waits=True).__enter__()
