"""Graphs by name, with replays that run the work again in their place."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch

from experiment_core_utils.engines.cuda_graphs import CudaGraphPool, Reruns
from experiment_core_utils.primitives.errors import OutOfMemory

T = TypeVar("T")


class RecordsUpTo:
    """A recorder with memory for so many."""

    def __init__(self, most: int) -> None:
        self._left = most

    def capture(self, work: Callable[[], T], constants: Sequence[torch.Tensor] = ()) -> Callable[[], T]:
        if not self._left:
            raise OutOfMemory("CUDA out of memory")
        self._left -= 1
        return Reruns().capture(work)


def test_the_graph_that_was_not_used_for_longest_goes() -> None:
    graphs, counts = CudaGraphPool(2, Reruns()), torch.zeros(4)
    for name in range(2):
        graphs.capture(name, lambda name=name: counts[name].add_(1))  # type: ignore[misc]
    assert float(graphs.replay(0)) == 2
    graphs.capture(2, lambda: counts[2].add_(1))
    assert [name in graphs for name in range(3)] == [True, False, True]
    assert float(graphs.replay(0)) == 3
    assert (float(graphs.replay(2)), len(graphs)) == (2, 2)


def test_a_capture_without_memory_leaves_the_others() -> None:
    graphs = CudaGraphPool(1, RecordsUpTo(1))
    graphs.capture("first", lambda: torch.tensor(7))
    with pytest.raises(OutOfMemory):
        graphs.capture("second", lambda: torch.tensor(8))
    assert "second" not in graphs
    assert int(graphs.replay("first")) == 7
