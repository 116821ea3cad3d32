"""Run ids under concurrency, and launches that do not match what was asked for."""

import multiprocessing
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from experiment_core_utils.a_distributed import (
    generate_unique_id,
    of_all_processes,
    of_main_process,
    processes_on_this_machine,
    setup_distributed,
)
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError, WorkerLost


@dataclass(frozen=True)
class Wanted:
    num_processes: int | None = None
    device: str = "cpu"
    worker_timeout: float = 60.0


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return setup_distributed(Wanted())


def test_one_process_on_the_cpu(accelerator: Accelerator) -> None:
    assert (accelerator.num_processes, accelerator.process_index, accelerator.is_main_process) == (1, 0, True)
    assert accelerator.device.type == "cpu"


def test_more_processes_asked_for_than_launched() -> None:
    with pytest.raises(WorkerLost, match="3 processes were asked for and 1 launched, but accelerate found 1"):
        setup_distributed(Wanted(num_processes=3))


def test_one_process_is_alone_on_this_machine(accelerator: Accelerator) -> None:
    assert processes_on_this_machine(accelerator) == 1
    assert of_all_processes("mine", accelerator) == ["mine"]
    assert of_main_process(lambda: "mine", accelerator) == "mine"


def test_an_error_of_the_main_process_is_raised_there_too(accelerator: Accelerator) -> None:
    def fail() -> None:
        raise ResultsError("another run")

    with pytest.raises(ResultsError, match="another run"):
        of_main_process(fail, accelerator)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigurationError, match="3 processes were launched for 2 GPUs; .*launch 2, or"):
        setup_distributed(Wanted(device="auto"))


def test_ids_count_up_from_a_file_that_is_made(accelerator: Accelerator, tmp_path: Path) -> None:
    counter = tmp_path / "trackers" / "experiment_id.txt"
    assert [generate_unique_id(accelerator, counter) for _ in range(3)] == ["0001", "0002", "0003"]
    assert counter.read_text() == "0003\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "0001"),
        ("41", "0042"),
        ("000000041", "0042"),
        ("0041\n", "0042"),
        ("9999", "10000"),
        (" 7 \n\n", "0008"),
    ],
)
def test_ids_go_on_from_what_the_file_holds(
    accelerator: Accelerator, tmp_path: Path, content: str, expected: str
) -> None:
    counter = tmp_path / "experiment_id.txt"
    counter.write_text(content)
    assert generate_unique_id(accelerator, counter) == expected
    assert counter.read_text() == f"{expected}\n"


@pytest.mark.parametrize("content", ["twelve", "1 2", "-3", "0x10", "1.5"])
def test_a_file_without_a_number_is_an_error_and_left_alone(
    accelerator: Accelerator, tmp_path: Path, content: str
) -> None:
    counter = tmp_path / "experiment_id.txt"
    counter.write_text(content)
    with pytest.raises(WorkerLost, match="instead of a number"):
        generate_unique_id(accelerator, counter)
    assert counter.read_text() == content


def _take_ids(accelerator: Accelerator, counter: Path, start: Barrier, folder: Path, number: int) -> None:
    start.wait()
    ids = [generate_unique_id(accelerator, counter) for _ in range(20)]
    (folder / str(number)).write_text(" ".join(ids))


def test_ten_processes_at_once_get_different_ids(accelerator: Accelerator, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start = context.Barrier(10)
    counter, taken = tmp_path / "experiment_id.txt", tmp_path / "taken"
    taken.mkdir()
    workers = [
        context.Process(target=_take_ids, args=(accelerator, counter, start, taken, number)) for number in range(10)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=30)
    assert [worker.exitcode for worker in workers] == [0] * 10
    ids = [identifier for file in taken.iterdir() for identifier in file.read_text().split()]
    assert sorted(ids) == [f"{number:04d}" for number in range(1, 201)]
