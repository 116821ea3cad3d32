"""In: work on a GPU that always does the same on the same memory; out: a replay of it by one launch from the host.

What is captured must read its inputs from tensors that stay where they are, must not wait for the GPU, and must not ask
the host for a decision. Memory of the captured work comes from one pool: it is for work that never runs at the same
time, and what one replay leaves there the next replay of another may overwrite.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from experiment_core_utils.primitives.errors import ConfigurationError, first_line


class Recorder(Protocol):
    """Makes a replay of work."""

    def record(self, work: Callable[[], Any]) -> Callable[[], None]:
        """Runs the work at least once, and gives a function that does the same again on the same tensors.

        Raises:
            ConfigurationError: it cannot be replayed; its message is the reason.
        """
        ...


class CudaGraphs:
    """Replays by CUDA graphs of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Any]) -> Callable[[], None]:
        """See `Recorder.record`; the work runs once before it is captured, so that nothing is compiled inside."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigurationError(f"it cannot be captured ({first_line(error)})") from error
        return graph.replay


class Reruns:
    """Replays by running the work again: what is replayed is the same, the launches are not saved."""

    def record(self, work: Callable[[], Any]) -> Callable[[], None]:
        """See `Recorder.record`."""
        work()

        def again() -> None:
            work()

        return again
