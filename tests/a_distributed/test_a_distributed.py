"""Run ids under concurrency, and launches that do not match what was requested."""

import atexit
import multiprocessing
import os
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import distributed

from experiment_core_utils.a_distributed import (
    generate_unique_id,
    leave_process_group,
    setup_distributed,
)
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.config.text import published_form, validated
from experiment_core_utils.primitives.errors import ConfigurationError, WorkerLost


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


@pytest.mark.parametrize("config", [{"device": "cpu"}, published_form(device="cpu"), validated({"device": "cpu"})])
def test_a_text_experiment_in_any_form(config: object) -> None:
    assert setup_distributed(config).mixed_precision == "no"


def test_a_configuration_of_the_profiler(tmp_path: Path) -> None:
    assert setup_distributed(parse_config(["--device", "cpu"]).machine).device.type == "cpu"


def test_mixed_precision_acts_on_a_prepared_model_and_can_be_changed() -> None:
    model = torch.nn.Linear(4, 4)
    for requested, dtype in (("bf16", torch.bfloat16), ("no", torch.float32), ("bf16", torch.bfloat16)):
        prepared = setup_distributed({"device": "cpu", "mixed_precision": requested}).prepare_model(
            torch.nn.Sequential(model), evaluation_mode=True
        )
        inside: list[torch.dtype] = []
        handle = model.register_forward_hook(lambda _module, _given, output, seen=inside: seen.append(output.dtype))
        prepared(torch.ones(1, 4))
        handle.remove()
        assert inside == [dtype]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"device": "cpu", "mixed_precision": "fp16"}, "mixed_precision fp16 needs a GPU"),
        ({"mixed_precision": "half"}, "mixed_precision: .*'half'"),
        ({"device": "cpu", "batchsize": 3}, "batchsize: there is no such key"),
    ],
)
def test_a_text_experiment_that_cannot_be_set_up(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        setup_distributed(config)
    assert "\n" not in str(caught.value)


def test_more_processes_requested_than_launched() -> None:
    with pytest.raises(WorkerLost, match="3 processes were requested and 1 launched, but accelerate found 1"):
        setup_distributed(Wanted(num_processes=3))


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
def test_a_file_without_a_number_continues_after_the_results_beside_its_folder(
    accelerator: Accelerator, tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    counter = tmp_path / "trackers" / "experiment_id.txt"
    counter.parent.mkdir()
    counter.write_text(content)
    (tmp_path / "results" / "raw_results" / "0041").mkdir(parents=True)
    assert generate_unique_id(accelerator, counter) == "0042"
    assert counter.read_text() == "0042\n"
    assert len(caplog.records) == 1


def test_another_results_folder_can_be_named(accelerator: Accelerator, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "raw_results" / "0007").mkdir(parents=True)
    assert generate_unique_id(accelerator, tmp_path / "id.txt", tmp_path / "elsewhere") == "0008"


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


def _end_with_an_error(found: "multiprocessing.Queue[object]") -> None:
    """A process of a group of one whose launch does not match what is requested, and its end."""
    atexit._clear()
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(place)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        setup_distributed(Wanted(num_processes=2))
    except WorkerLost as error:
        found.put(str(error))
    found.put(distributed.is_initialized())
    atexit._run_exitfuncs()
    found.put(distributed.is_initialized())


def test_a_process_that_ends_with_an_error_leaves_its_group() -> None:
    context = multiprocessing.get_context("fork")
    found: multiprocessing.Queue[object] = context.Queue()
    process = context.Process(target=_end_with_an_error, args=(found,))
    process.start()
    assert "2 processes were requested" in str(found.get(timeout=60))
    assert [found.get(timeout=60) for _ in range(2)] == [True, False]
    process.join()


def test_to_leave_where_there_is_no_group_does_nothing() -> None:
    leave_process_group()
