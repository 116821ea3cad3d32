"""In: work on a GPU and a name for it; out: the same work launched as one CUDA graph, as often as wanted.

All graphs of one object share a memory pool: what a graph needs between its kernels is free again for the next one,
so that hundreds of them need little more than the largest.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

# Runs before a capture: kernels are built, libraries choose their algorithms and allocate.
WARM_UPS = 2


class CapturedGraphs:
    """Graphs by name; beyond `limit` the one that was not used for the longest time is dropped.

    Only one graph may run at a time, and a graph's output may be overwritten by the next run of any of them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pool: Any = torch.cuda.graph_pool_handle()
        # One for all warm-ups: libraries keep tens of megabytes of working memory for each stream that they saw.
        self._side = torch.cuda.Stream()
        self._graphs: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = OrderedDict()

    def __contains__(self, name: Hashable) -> bool:
        return name in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, name: Hashable, run: Callable[[], torch.Tensor]) -> None:
        """Run `run` a few times, then once more recorded; it must not ask the host and must read what stays put."""
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()
        while len(self._graphs) >= self._limit:
            dropped, _ = self._graphs.popitem(last=False)[1]
            dropped.reset()
        self._graphs[name] = (graph, output)

    def replay(self, name: Hashable) -> torch.Tensor:
        """Launch a captured graph on the current stream; its output, which stands where it stood before."""
        self._graphs.move_to_end(name)
        graph, output = self._graphs[name]
        graph.replay()
        return output
