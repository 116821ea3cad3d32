"""Processes that share one model: the first one is the run, the others do what it says, in step with it.

Messages go through the hosts' memory, beside what the model's parts say to each other.
"""

import os
import platform
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from experiment_core_utils.primitives.collectives import lost_processes_named
from experiment_core_utils.primitives.errors import ConfigurationError

# Between two messages the first process prepares, scores and saves; one that ends closes its connections.
_LONGEST_SILENCE = timedelta(days=30)
# By these a launcher tells libraries that there are several processes.
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Crew:
    """The processes that share one model; calls of `tell`, `hear` and `meet` are collective."""

    rank: int  #: of this process; 0 is the first one
    size: int
    pids: tuple[int, ...]  #: of the others on this machine
    _group: Any

    def tell(self, message: object) -> None:
        """Say something to all others; of the first process alone."""
        with lost_processes_named():
            distributed.broadcast_object_list([message], src=0, group=self._group)

    def hear(self) -> Any:
        """What the first process says next; raises WorkerLost where it is gone."""
        heard: list[Any] = [None]
        with lost_processes_named():
            distributed.broadcast_object_list(heard, src=0, group=self._group)
        return heard[0]

    def meet(self) -> None:
        """Wait until all have come as far."""
        with lost_processes_named():
            distributed.barrier(group=self._group)


_CREWS: list[Crew] = []
# What the launcher said to the first process.
_taken: dict[str, str] = {}


@contextmanager
def as_launched() -> Iterator[None]:
    """A context in which libraries find what the launcher said: they need it to choose the GPU of a process."""
    os.environ.update(_taken)
    try:
        yield
    finally:
        for name in _taken:
            os.environ.pop(name, None)


def join_crew(size: int, device: torch.device, timeout_s: float, launcher: str) -> Crew:
    """Meet the others; from then on libraries take the first process for one that runs alone.

    Args:
        device: of this process.
        timeout_s: that the parts of the model wait for each other.
        launcher: how to launch so many processes, for messages.

    Raises:
        ConfigurationError: another number of processes was launched.
        WorkerLost: not all came.
    """
    if _CREWS:
        return _CREWS[0]
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != size:
        raise ConfigurationError(f"{size} processes are to share the model, and {launched} were launched; {launcher}")
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with lost_processes_named():
        distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        group = distributed.new_group(backend="gloo", timeout=_LONGEST_SILENCE)
        places: list[Any] = [None] * size
        distributed.all_gather_object(places, (platform.node(), os.getpid()), group=group)
    own = distributed.get_rank()
    pids = tuple(pid for rank, (host, pid) in enumerate(places) if rank != own and host == places[own][0])
    _CREWS.append(Crew(own, size, pids, group))
    if _CREWS[0].rank == 0:
        for name in _LAUNCHED:
            if name in os.environ:
                _taken[name] = os.environ.pop(name)
    else:
        # The first process ends the sample at work, and then says that it is over.
        for kind in (signal.SIGINT, signal.SIGTERM):
            signal.signal(kind, signal.SIG_IGN)
    return _CREWS[0]
