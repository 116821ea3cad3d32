"""Collective calls of a single process, and which processes share a local main process."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from accelerate import Accelerator

from experiment_core_utils.primitives.collectives import (
    _appears_with,
    all_gather,
    all_or_raise,
    broadcast_from_main,
    local_gather,
    local_group,
    other_pids,
    processes_on_this_machine,
)
from experiment_core_utils.primitives.errors import DeviceLost, ResultsError, UnforeseenError
from tests.measuring.measurer.every_error import every_error
from tests.processes.deadline import ends_within


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def test_one_process_is_alone_on_this_machine(accelerator: Accelerator) -> None:
    assert processes_on_this_machine(accelerator) == 1
    assert all_gather("mine", accelerator) == ["mine"]
    assert broadcast_from_main(lambda: "mine", accelerator) == "mine"


def test_one_process_has_no_others(accelerator: Accelerator) -> None:
    assert other_pids(accelerator) == ()


def test_processes_that_share_a_local_main_process() -> None:
    """Two machines dealt out in turn; two containers with one kernel, one after the other."""
    in_turn = [("a", True), ("b", True), ("a", False), ("b", False)]
    assert [local_group(in_turn, rank) for rank in range(4)] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    containers = [("a", True), ("a", False), ("a", True), ("a", False)]
    assert [local_group(containers, rank) for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_alone_a_process_has_its_own(accelerator: Accelerator) -> None:
    assert local_gather("mine", accelerator) == ["mine"]


def test_an_error_of_the_main_process_is_raised_there_too(accelerator: Accelerator) -> None:
    def fail() -> None:
        raise ResultsError("another run")

    with pytest.raises(ResultsError, match="another run"):
        broadcast_from_main(fail, accelerator)


@pytest.mark.parametrize("call", [broadcast_from_main, all_or_raise])
def test_an_error_of_a_library_reaches_the_other_processes_as_one_that_can_be_sent(
    accelerator: Accelerator, call: Callable[[Callable[[], None], Accelerator], None]
) -> None:
    for cause in every_error():

        def fail(cause: Exception = cause) -> None:
            raise cause

        with pytest.raises(UnforeseenError, match=rf"^{type(cause).__name__}\b") as found:
            call(fail, accelerator)
        assert found.value.__cause__ is cause and str(pickle.loads(pickle.dumps(found.value))).isprintable()

    def fail_on_gpu() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(DeviceLost):
        call(fail_on_gpu, accelerator)


@pytest.mark.parametrize("kind", ["file", "folder", "pipe", "other text", "no text"])
def test_only_a_file_that_holds_the_token_shows_that_the_folder_is_shared(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "seen_by_all"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes({"file": b"f00d", "other text": b"f00", "no text": b"\xff"}[kind])
    with ends_within(20):
        assert _appears_with(path, "f00d", 0.1) == (kind == "file")
