"""One holder at a time, also after a process was killed, and what is refused."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from experiment_core_utils.primitives.errors import OutputRefused, ResultsNotSaved, ResultsRefused, WorkerLost
from experiment_core_utils.records import locks
from experiment_core_utils.records.locks import MainProcessWatch, RunLock, locked, locked_file


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


@pytest.mark.parametrize("how", ["removed", "moved", "replaced", "with its folder"])
def test_an_open_file_that_has_its_name_no_more_is_noticed(tmp_path: Path, how: str) -> None:
    path = tmp_path / "folder" / "lock"
    with locked_file(path, waits=False) as descriptor:
        lock = RunLock(path, descriptor)
        lock.refresh()
        if how == "with its folder":
            path.parent.rename(tmp_path / "elsewhere")
        else:
            path.rename(path.with_name("other")) if how == "moved" else path.unlink()
        if how == "replaced":
            path.write_bytes(b"")
        for call in (lock.refresh, lambda: lock.announce_end("0001")):
            with pytest.raises(ResultsNotSaved, match=r"lock was removed or moved while this run writes it; "):
                call()


def test_the_holder_of_a_runs_lock_is_seen_to_live_end_and_die(tmp_path: Path) -> None:
    path, now_s = tmp_path / "lock", [100.0]

    def later(seconds: float) -> None:
        now_s[0] += seconds

    with locked_file(path, waits=False) as descriptor:
        os.write(descriptor, b"of an earlier run")
        lock = RunLock(path, descriptor, lambda: now_s[0])
        watch = MainProcessWatch(path, 10.0, lambda: now_s[0])
        assert not watch.is_over("of an earlier run")
        # The time of a file is the system's; it is told here, so that none of two is the same by chance.
        for number in range(5):
            os.utime(path, (number, number))
            watch.check()
            later(4.9)
        for _ in range(2):
            watch.check()
            later(4.9)
        with pytest.raises(
            WorkerLost, match=r"^process 0 of the run has shown no sign of life for 10 s \(the time of "
        ):
            watch.check()
        before = path.stat().st_mtime_ns
        lock.refresh()
        assert path.stat().st_mtime_ns > before
        watch.check()
        # Both were stopped together: that is no sign of death.
        later(1000.0)
        watch.check()
        lock.announce_end("0007")
        assert watch.is_over("0007") and not watch.is_over("0006")
    with pytest.raises(WorkerLost, match=r"lock is not locked any more: process 0 of the run has ended; "):
        watch.check()


def test_where_locks_are_not_seen_only_the_time_counts(tmp_path: Path) -> None:
    path, now_s = tmp_path / "lock", [0.0]
    path.write_bytes(b"")
    watch = MainProcessWatch(path, 10.0, lambda: now_s[0])
    watch.check()
    for now_s[0] in (4.0, 8.0):
        watch.check()
    now_s[0] = 12.0
    with pytest.raises(WorkerLost, match="no sign of life"):
        watch.check()


def test_no_locks_and_no_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputRefused, match="is a link"):
        locked_file(tmp_path / "link", waits=True).__enter__()

    def without_locks(descriptor: int, *, blocking: bool) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks, "lock_descriptor", without_locks)
    with pytest.raises(ResultsRefused, match="cannot be locked .* file system that has locks"):
        locked_file(tmp_path / "lock", waits=True).__enter__()
