"""CUDA graphs of GPU work that does the same on the same memory each time, launched by one call of the host.

Captured work must read its inputs from tensors that stay where they are, must not wait for the GPU, and must not need a
decision of the host. Graphs share one memory pool, so they must never run at the same time, and a replay may overwrite
what an earlier replay of another graph left there.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

from experiment_core_utils.engines.pass_constants import PassConstants
from experiment_core_utils.primitives.device import out_of_memory_named
from experiment_core_utils.primitives.errors import ConfigurationError, EngineRefused, OutOfMemory, first_line
from experiment_core_utils.primitives.private_apis import end_allocation_to_pool, release_pool

NO_GRAPHS = "there are no CUDA graphs on the CPU"
ADVICE = "; run all settings with --execution eager"
T = TypeVar("T")


@contextmanager
def refused_without_memory(prompt_tokens: int, max_new_tokens: int) -> Iterator[None]:
    """Context in which running out of memory is a refusal of this request size, not a failure.

    Raises:
        ConfigurationError: in place of `OutOfMemory` and of torch's errors that say the same.
    """
    try:
        with out_of_memory_named():
            yield
    except OutOfMemory as error:
        raise ConfigurationError(
            f"the device has no memory left to make a prompt of {prompt_tokens} tokens and an answer of "
            f"{max_new_tokens} ready ({error})"
        ) from error


def refusal_of(run: Callable[[], object], prompt_tokens: int, max_new_tokens: int) -> str | None:
    """The reason why `run` refuses a request of this size, lack of memory included; None where it has run.

    What was half made is no longer held when this returns, as it is until the end of an error's handler.
    """
    try:
        with refused_without_memory(prompt_tokens, max_new_tokens):
            run()
    except ConfigurationError as error:
        return str(error)
    return None


def engine_refused(reason: str) -> EngineRefused:
    """The error of a setting that engines cannot run, with what to do."""
    return EngineRefused(reason + ADVICE)


class GraphCapturer(Protocol):
    """An interface that turns work into a function that repeats it."""

    def capture(self, work: Callable[[], T], constants: Sequence[torch.Tensor] = ()) -> Callable[[], T]:
        """Runs the work at least once, and returns a function that repeats it on the same tensors.

        What that function returns may be overwritten by its next call.

        Args:
            constants: tensors that the work reads and whose values will be the same at each call.

        Raises:
            ConfigurationError: it cannot be captured; its message is the reason.
            OutOfMemory: there is no memory left to run or to record it; nothing of it is kept.
        """


class CudaGraphs(GraphCapturer):
    """Captures work as CUDA graphs of one device; a graph lasts as long as the function that replays it.

    Args:
        warm_ups: runs before a capture, at least one, so that nothing is compiled or chosen inside.
    """

    def __init__(self, device: torch.device, warm_ups: int = 1) -> None:
        self._device = device
        self._warm_ups = warm_ups
        self._pool = torch.cuda.graph_pool_handle()
        # Nothing else may run on it: cuBLAS keeps working memory for each stream that it saw, and the memory that a
        # graph has recorded must come from the graph's pool. Memory from outside can be taken away under the graph,
        # as Inductor does whenever it captures. One for all captures, so that they find each other's free memory.
        self._capturing = torch.cuda.Stream(device)
        self._unfinished: list[torch.cuda.CUDAGraph] = []

    def capture(self, work: Callable[[], T], constants: Sequence[torch.Tensor] = ()) -> Callable[[], T]:
        """See `GraphCapturer.capture`; the work runs `warm_ups` times on the current stream and is captured on
        another. What cannot be captured as it is, is tried without what it computes from constants alone.
        """
        with out_of_memory_named():
            for _ in range(self._warm_ups):
                work()
            try:
                return self._graphed(work)
            except ConfigurationError:
                remembered = PassConstants(constants)
                return self._graphed(remembered.without(work), remembered)

    def _graphed(self, work: Callable[[], T], read: object = None) -> Callable[[], T]:
        """Args: read: what holds memory that the graph reads, and lasts as long."""
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                out_of_memory_named(),
                self._abandoned_if_broken(graph),
                torch.cuda.graph(graph, pool=self._pool, stream=self._capturing),
            ):
                recorded = work(), read
        except RuntimeError as error:
            if isinstance(error.__context__, torch.OutOfMemoryError):
                # After it the capture could not be ended either.
                raise error.__context__ from None
            raise ConfigurationError(f"it cannot be captured ({first_line(error)})") from error

        def replay() -> T:
            graph.replay()
            return recorded[0]

        return replay

    @contextmanager
    def _abandoned_if_broken(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        try:
            yield
        except BaseException:
            # torch leaves the stream of a capture that it cannot end in force.
            torch.cuda.set_stream(current)
            self._abandon(graph)
            raise

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Give back what a failed capture took.

        Where torch cannot end a capture, its allocator still believes that it is under way, and refuses the next one.
        """
        graph.reset()
        device = self._capturing.device_index
        try:
            end_allocation_to_pool(device, self._pool)
        except RuntimeError:
            pass  # The capture had ended, and its memory was released with the graph.
        else:
            release_pool(device, self._pool)
            # torch's allocator of host memory keeps asking it whether it is being captured.
            self._unfinished.append(graph)
        # A pool that no graph uses any more cannot be captured into again.
        self._pool = torch.cuda.graph_pool_handle()


class Reruns(GraphCapturer):
    """Repeats work by running it again: the results are those of a replay, the launches are not saved."""

    def capture(self, work: Callable[[], T], constants: Sequence[torch.Tensor] = ()) -> Callable[[], T]:
        work()
        return work


# Runs before a capture of a pool's own graphs: kernels are built, libraries choose their algorithms and allocate.
WARM_UPS = 2
# Graphs kept; each is a list of launches and takes next to no memory of its own.
MOST_GRAPHS = 512


class CudaGraphPool:
    """CUDA graphs by name; above `limit` the one that was not used for the longest time is dropped.

    Only one graph may run at a time, and a graph's output may be overwritten by the next run of any of them.

    Args:
        graph_capturer: makes the graphs; None for CUDA graphs of the current device, after `WARM_UPS` runs each.
    """

    def __init__(self, limit: int = MOST_GRAPHS, graph_capturer: GraphCapturer | None = None) -> None:
        self._limit = limit
        self._graph_capturer = _of_current_device() if graph_capturer is None else graph_capturer
        self._replays: OrderedDict[Hashable, Callable[[], torch.Tensor]] = OrderedDict()

    def __contains__(self, name: Hashable) -> bool:
        return name in self._replays

    def __len__(self) -> int:
        return len(self._replays)

    def capture(self, name: Hashable, run: Callable[[], torch.Tensor]) -> None:
        """Run `run` as often as the capturer does before it captures it; it must not wait for the host and must read
        tensors that stay in place.

        Raises:
            ConfigurationError, OutOfMemory: see `GraphCapturer.capture`; the graphs there are stay.
        """
        replay = self._graph_capturer.capture(run)
        while len(self._replays) >= self._limit:
            self._replays.popitem(last=False)
        self._replays[name] = replay

    def replay(self, name: Hashable) -> torch.Tensor:
        """Launch a captured graph on the current stream; its output is in the same memory each time."""
        self._replays.move_to_end(name)
        return self._replays[name]()


def _of_current_device() -> CudaGraphs:
    return CudaGraphs(torch.device("cuda", torch.cuda.current_device()), WARM_UPS)
