"""In: keys of requests to prepare; out: the prepared requests, from processes that do nothing else.

The processes are forked from this one, so they have its task and its processor without loading them. No thread of this
process takes part: it looks into the pipes when it wants a request, and between two looks nothing here runs. Tensors
come through the pipes into ordinary memory, not through /dev/shm, which is 64 MB in many containers.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.primitives.interruption import time_limit
from experiment_core_utils.primitives.knobs import CropRange
from experiment_core_utils.primitives.records import PreparedRequest
from experiment_core_utils.tasks.interface import Sample

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
# A process whose own time limit is up says so within this time; one that hangs in a call does not.
_GRACE_S = 0.5


@dataclass(frozen=True)
class RequestKey:
    """What a prepared request depends on, of one task and model."""

    sample_id: int
    crops: CropRange


@dataclass(frozen=True)
class ReadyRequest:
    """A sample, without its picture, and the request made from it."""

    sample: Sample
    request: PreparedRequest


class WorkerGone(Exception):
    """A preparing process has ended; the request source goes on without it."""


class PreparationWorker:
    """One preparing process; it answers in the order in which it is asked.

    Args:
        prepare: called in the process; what it raises other than SampleError ends the process.
        sample_timeout_s: limit for each preparation.
        others: workers that exist already, whose pipes the new process must not hold open.
    """

    def __init__(
        self,
        prepare: Callable[[RequestKey], ReadyRequest],
        sample_timeout_s: float | None,
        others: Sequence["PreparationWorker"],
    ) -> None:
        context = multiprocessing.get_context("fork")
        child_reads, self._asks = context.Pipe(duplex=False)
        self._answers, child_writes = context.Pipe(duplex=False)
        foreign = [end for other in others for end in (other._asks, other._answers)]
        self._process = context.Process(
            target=_work,
            args=(prepare, sample_timeout_s, child_reads, child_writes, [*foreign, self._asks, self._answers]),
            daemon=True,
        )
        self._process.start()
        child_reads.close()
        child_writes.close()
        self.owed: deque[RequestKey] = deque()
        self._is_torn = False

    def ask(self, key: RequestKey) -> None:
        """Prepare this after what was asked before; raises WorkerGone."""
        try:
            self._asks.send(key)
        except OSError as error:
            raise WorkerGone from error
        self.owed.append(key)

    def has_answer(self) -> bool:
        """Whether the next answer can be had without waiting for its preparation."""
        return bool(self.owed) and self._answers.poll()

    def answer(self) -> tuple[RequestKey, ReadyRequest | SampleError]:
        """The first answer that is owed; waits for it.

        Raises:
            WorkerGone: it will not come.
        """
        try:
            self._answers.poll(None)
            self._is_torn = True
            outcome = _receive(self._answers)
        except (EOFError, OSError) as error:
            raise WorkerGone from error
        self._is_torn = False
        return self.owed.popleft(), outcome

    def can_go_on(self) -> bool:
        """Whether it is of use after an answer was not waited for: none is read in part, and the next one is coming."""
        return not self._is_torn and self._answers.poll(_GRACE_S)

    def end(self) -> None:
        """End the process at once, whatever it does."""
        self._process.kill()
        self._process.join()
        self._asks.close()
        self._answers.close()


def _work(
    prepare: Callable[[RequestKey], ReadyRequest],
    sample_timeout_s: float | None,
    asks: Connection,
    answers: Connection,
    foreign: Sequence[Connection],
) -> None:
    """The process: lives until it is ended, or the one that asks is gone, however that ended."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for connection in foreign:
        connection.close()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    while True:
        try:
            key = asks.recv()
        except EOFError:
            return
        try:
            with time_limit(sample_timeout_s):
                outcome: ReadyRequest | SampleError = prepare(key)
        except SampleError as error:
            outcome = error
        try:
            _send(answers, outcome)
        except BrokenPipeError:
            return


def _send(pipe: Connection, outcome: ReadyRequest | SampleError) -> None:
    """Tensors as they lie in memory, everything else pickled before them."""
    if isinstance(outcome, SampleError):
        pipe.send((outcome, {}))
        return
    inputs = outcome.request.inputs
    tensors = {name: value.contiguous() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    others = {name: value for name, value in inputs.items() if name not in tensors}
    layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    bare = replace(outcome, request=replace(outcome.request, inputs=others))
    pipe.send_bytes(pickle.dumps((bare, layout)))
    for tensor in tensors.values():
        content = _bytes_of(tensor)
        while content:
            content = content[os.write(pipe.fileno(), content) :]


def _receive(pipe: Connection) -> ReadyRequest | SampleError:
    outcome, layout = pickle.loads(pipe.recv_bytes())
    if isinstance(outcome, SampleError):
        return outcome
    inputs: dict[str, Any] = dict(outcome.request.inputs)
    for name, (shape, dtype) in layout.items():
        inputs[name] = torch.empty(shape, dtype=dtype)
        room = _bytes_of(inputs[name])
        while room:
            count = os.readv(pipe.fileno(), [room])
            if not count:
                raise EOFError
            room = room[count:]
    return replace(outcome, request=replace(outcome.request, inputs=inputs))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    content: Any = tensor.flatten().view(torch.uint8).numpy()
    return memoryview(content)
