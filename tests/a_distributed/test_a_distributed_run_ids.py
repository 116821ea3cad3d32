"""Which ids results carry, and a counter that never gives out one of them."""

import logging
import multiprocessing
import os
import shutil
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment_core_utils.primitives.errors import OutputRefused
from experiment_core_utils.records.run_ids import next_run_id, used_ids


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    path = tmp_path / "trackers" / "experiment_id.txt"
    path.parent.mkdir()
    return path


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Results of the runs 3 and 41."""
    folder = tmp_path / "results"
    for identifier in ("0003", "0041"):
        (folder / "raw_results" / identifier).mkdir(parents=True)
    return folder


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_ids_count_up_without_a_warning(counter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert [next_run_id(counter, tmp_path / "none") for _ in range(3)] == ["0001", "0002", "0003"]
    counter.write_text("9998\n")
    assert [next_run_id(counter, tmp_path / "none") for _ in range(3)] == ["9999", "10000", "10001"]
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("content", ["41", "0041\n", "77"])
def test_a_counter_that_is_not_behind_its_results_continues(
    counter: Path, results: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    counter.write_text(content)
    assert next_run_id(counter, results) == f"{int(content) + 1:04d}"
    assert warnings_in(caplog) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "was not found"),
        ("", "is empty"),
        ("\n", "is empty"),
        ("00", "contains 0000, less than"),
        ("40", "contains 0040, less than"),
        ("-3", "'-3' instead of a number"),
        ("1.5", "instead of a number"),
        ("0x10", "instead of a number"),
        ("41 # mine", "instead of a number"),
        ("٤٢", "instead of a number"),
        ("9" * 40, "instead of a number"),
        ("\udcff", "instead of a number"),
    ],
)
def test_a_damaged_counter_continues_after_the_results_with_one_line(
    counter: Path, results: Path, content: str | None, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    if content is not None:
        counter.write_bytes(content.encode(errors="surrogateescape"))
    assert next_run_id(counter, results) == "0042"
    (warning,) = warnings_in(caplog)
    assert says in warning and warning.endswith("continuing at 0042") and "\n" not in warning
    assert next_run_id(counter, results) == "0043"
    assert len(warnings_in(caplog)) == 1


@given(content=st.binary(max_size=12))
def test_whatever_the_counter_holds_the_id_is_new(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("wild")
    (folder / "results" / "raw_results" / "0041").mkdir(parents=True)
    (folder / "counter").write_bytes(content)
    assert int(next_run_id(folder / "counter", folder / "results")) > 41


def test_ids_are_those_of_the_folders_of_runs(tmp_path: Path) -> None:
    for name in ("raw_results/0007", "raw_results/notes", "core_exp/raw_results/12", "core_exp/13", "raw_results/8/9"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "raw_results" / "0011").touch()
    assert sorted(used_ids(tmp_path)) == [7, 8, 12]
    assert list(used_ids(tmp_path / "nowhere")) == []


def _take(counter: Path, results: Path, start: Barrier, folder: Path, number: int) -> None:
    start.wait()
    taken = []
    for _ in range(8):
        taken.append(next_run_id(counter, results))
        if number == 0:
            counter.unlink(missing_ok=True)
    (folder / str(number)).write_text(" ".join(taken))


def test_a_missing_counter_continues_where_it_was_without_results_too(
    counter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counter.write_text("77")
    assert next_run_id(counter, tmp_path / "none") == "0078"
    counter.unlink()
    assert next_run_id(counter, tmp_path / "none") == "0079"
    assert [each.endswith("was not found; continuing at 0079") for each in warnings_in(caplog)] == [True]
    counter.write_text("5")
    assert next_run_id(counter, tmp_path / "none") == "0080"
    assert "contains 0005, less than an id that was already used" in warnings_in(caplog)[1]


def test_ten_processes_that_find_a_damaged_counter_get_different_ids(
    counter: Path, results: Path, tmp_path: Path
) -> None:
    counter.write_text("tor")
    context = multiprocessing.get_context("fork")
    start, taken = context.Barrier(10), tmp_path / "taken"
    taken.mkdir()
    workers = [context.Process(target=_take, args=(counter, results, start, taken, number)) for number in range(10)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=30)
    assert [worker.exitcode for worker in workers] == [0] * 10
    ids = sorted(int(identifier) for file in taken.iterdir() for identifier in file.read_text().split())
    assert ids == list(range(42, 42 + 80))
    shutil.rmtree(taken)


def test_a_pipe_in_the_place_of_the_counter_is_refused(counter: Path, tmp_path: Path) -> None:
    counter.unlink(missing_ok=True)
    counter.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(counter)
    with pytest.raises(OutputRefused, match="is a device or a pipe"):
        next_run_id(counter, tmp_path / "none")
