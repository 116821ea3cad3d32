"""What a process that is alone tells itself, and which processes share a local main process."""

import pytest
from accelerate import Accelerator

from experiment_core_utils.primitives.collectives import (
    local_group,
    of_all_processes,
    of_local_processes,
    of_main_process,
    processes_on_this_machine,
)
from experiment_core_utils.primitives.errors import ResultsError


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def test_one_process_is_alone_on_this_machine(accelerator: Accelerator) -> None:
    assert processes_on_this_machine(accelerator) == 1
    assert of_all_processes("mine", accelerator) == ["mine"]
    assert of_main_process(lambda: "mine", accelerator) == "mine"


def test_processes_that_share_a_local_main_process() -> None:
    """Two machines dealt out in turn; two containers with one kernel, one after the other."""
    in_turn = [("a", True), ("b", True), ("a", False), ("b", False)]
    assert [local_group(in_turn, rank) for rank in range(4)] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    containers = [("a", True), ("a", False), ("a", True), ("a", False)]
    assert [local_group(containers, rank) for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_alone_a_process_has_its_own(accelerator: Accelerator) -> None:
    assert of_local_processes("mine", accelerator) == ["mine"]


def test_an_error_of_the_main_process_is_raised_there_too(accelerator: Accelerator) -> None:
    def fail() -> None:
        raise ResultsError("another run")

    with pytest.raises(ResultsError, match="another run"):
        of_main_process(fail, accelerator)
