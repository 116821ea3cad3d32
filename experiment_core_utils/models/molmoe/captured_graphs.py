"""In: work on a GPU and a name for it; out: the same work launched as one CUDA graph, as often as wanted.

All graphs of one object share a memory pool: what a graph needs between its kernels is free again for the next one,
so that hundreds of them need little more than the largest.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

from experiment_core_utils.models.graph_capture import CudaGraphs, GraphCapturer

# Runs before a capture: kernels are built, libraries choose their algorithms and allocate.
WARM_UPS = 2


class CudaGraphPool:
    """Graphs by name; beyond `limit` the one that was not used for the longest time is dropped.

    Only one graph may run at a time, and a graph's output may be overwritten by the next run of any of them.

    Args:
        graph_capturer: makes the graphs, by `WARM_UPS` runs before; None for CUDA graphs of the current device.
    """

    def __init__(self, limit: int, graph_capturer: GraphCapturer | None = None) -> None:
        self._limit = limit
        self._graph_capturer = _of_current_device() if graph_capturer is None else graph_capturer
        self._replays: OrderedDict[Hashable, Callable[[], torch.Tensor]] = OrderedDict()

    def __contains__(self, name: Hashable) -> bool:
        return name in self._replays

    def __len__(self) -> int:
        return len(self._replays)

    def capture(self, name: Hashable, run: Callable[[], torch.Tensor]) -> None:
        """Run `run` a few times, then once more recorded; it must not ask the host and must read what stays put.

        Raises:
            ConfigurationError, OutOfMemory: see `GraphCapturer.record`; the graphs there are stay.
        """
        replay = self._graph_capturer.record(run)
        while len(self._replays) >= self._limit:
            self._replays.popitem(last=False)
        self._replays[name] = replay

    def replay(self, name: Hashable) -> torch.Tensor:
        """Launch a captured graph on the current stream; its output, which stands where it stood before."""
        self._replays.move_to_end(name)
        return self._replays[name]()


def _of_current_device() -> CudaGraphs:
    return CudaGraphs(torch.device("cuda", torch.cuda.current_device()), WARM_UPS)
