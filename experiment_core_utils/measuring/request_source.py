"""Prepared requests: made ahead by worker processes or between samples, and kept for settings with the same crops.

Beside a GPU, processes prepare requests while the GPU is measured (`PreparationWorker`). On the CPU they would
take the cores that are measured, so requests are prepared between samples, in this process. Either way a request is
kept for the settings that follow with the same crops, as far as the memory that was granted reaches.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.interface import Runnable
from experiment_core_utils.primitives.device import available_memory_bytes
from experiment_core_utils.primitives.errors import DataChanged, SampleError, library_faults_named
from experiment_core_utils.primitives.interruption import time_limit
from experiment_core_utils.records.provenance import Preparation
from experiment_core_utils.records.requests import PreparedRequest
from experiment_core_utils.tasks.content import read_unchanged
from experiment_core_utils.tasks.interface import Sample, Task
from experiment_core_utils.tasks.prompt_forms import prompt_for, with_continuations

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
# A process whose own time limit is up says so within this time; one that hangs in a call does not.
_GRACE_S = 0.5


@dataclass(frozen=True)
class RequestKey:
    """What a prepared request depends on, of one task and model."""

    sample_id: int
    crops: CropRange | None


@dataclass(frozen=True)
class PrefetchedRequest:
    """A sample, without its picture, and the request made from it."""

    sample: Sample
    request: PreparedRequest


Outcome = PrefetchedRequest | SampleError | DataChanged


class WorkerExited(Exception):
    """A preparing process has ended; the request source continues without it."""


class PreparationWorker:
    """One preparing process; its results come in the order of the requests.

    Args:
        prepare: called in the process; what it raises other than SampleError and DataChanged ends the process.
        sample_timeout_s: limit for each preparation.
        others: workers that exist already, whose pipes the new process must not hold open.
    """

    def __init__(
        self,
        prepare: Callable[[RequestKey], PrefetchedRequest],
        sample_timeout_s: float | None,
        others: Sequence["PreparationWorker"],
    ) -> None:
        context = multiprocessing.get_context("fork")
        child_reads, self._requests = context.Pipe(duplex=False)
        self._results, child_writes = context.Pipe(duplex=False)
        inherited = [end for other in others for end in (other._requests, other._results)]
        self._process = context.Process(
            target=_work,
            args=(prepare, sample_timeout_s, child_reads, child_writes, [*inherited, self._requests, self._results]),
            daemon=True,
        )
        self._process.start()
        child_reads.close()
        child_writes.close()
        self.pending: deque[RequestKey] = deque()
        self._is_torn = False

    def submit(self, key: RequestKey) -> None:
        """Prepare this after what was submitted before; raises WorkerExited."""
        try:
            self._requests.send(key)
        except OSError as error:
            raise WorkerExited from error
        self.pending.append(key)

    def has_result(self) -> bool:
        """Whether the next result can be received without waiting for its preparation."""
        return bool(self.pending) and self._results.poll()

    def receive(self) -> tuple[RequestKey, Outcome]:
        """The first pending result; waits for it.

        Raises:
            WorkerExited: it will not come.
        """
        try:
            self._results.poll(None)
            self._is_torn = True
            outcome = _receive(self._results)
        except (EOFError, OSError) as error:
            raise WorkerExited from error
        self._is_torn = False
        return self.pending.popleft(), outcome

    def is_usable(self) -> bool:
        """Whether it can be used after an interrupted wait: no result is read in part, and the next one is coming."""
        return not self._is_torn and self._results.poll(_GRACE_S)

    def end(self) -> None:
        """End the process at once, whatever it does."""
        self._process.kill()
        self._process.join()
        self._requests.close()
        self._results.close()


def _work(
    prepare: Callable[[RequestKey], PrefetchedRequest],
    sample_timeout_s: float | None,
    requests: Connection,
    results: Connection,
    inherited: Sequence[Connection],
) -> None:
    """The process: lives until it is ended, or its parent is gone, however that ended."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for connection in inherited:
        connection.close()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    while True:
        try:
            key = requests.recv()
        except EOFError:
            return
        try:
            with time_limit(sample_timeout_s):
                outcome: Outcome = prepare(key)
        except (SampleError, DataChanged) as error:
            outcome = error
        try:
            _send(results, outcome)
        except BrokenPipeError:
            return


def _send(pipe: Connection, outcome: Outcome) -> None:
    """Tensors as they lie in memory, everything else pickled before them."""
    if not isinstance(outcome, PrefetchedRequest):
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


def _receive(pipe: Connection) -> Outcome:
    outcome, layout = pickle.loads(pipe.recv_bytes())
    if not isinstance(outcome, PrefetchedRequest):
        error: SampleError | DataChanged = outcome
        return error
    inputs: dict[str, Any] = dict(outcome.request.inputs)
    for name, (shape, dtype) in layout.items():
        inputs[name] = torch.empty(shape, dtype=dtype)
        rest = _bytes_of(inputs[name])
        while rest:
            count = os.readv(pipe.fileno(), [rest])
            if not count:
                raise EOFError
            rest = rest[count:]
    return replace(outcome, request=replace(outcome.request, inputs=inputs))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    content: Any = tensor.flatten().view(torch.uint8).numpy()
    return memoryview(content)


MAX_WORKERS = 4
# Of the memory granted, what is for pictures (2 to 3 MB each) that other crops are cut from later; the rest is for
# requests (4 to 18 MB each).
PICTURE_FRACTION = 0.2
# Requests that may be on their way or waiting for each process, beyond those that are kept.
_PREFETCHED_PER_WORKER = 2
BYTES_PER_GB = 10**9


def num_preparation_workers(device: torch.device, cores_of_process: int) -> int:
    """Processes that prepare beside a GPU: the cores that the measuring process leaves, at most 4; none on the CPU."""
    return 0 if device.type == "cpu" else max(min(MAX_WORKERS, cores_of_process - 1), 0)


def request_budget_bytes(cache_gb: float | None, processes_here: int) -> int:
    """Memory for the requests of one process: what was requested, or its part of a quarter of what is free."""
    return int(available_memory_bytes() / 4 / processes_here if cache_gb is None else cache_gb * BYTES_PER_GB)


@dataclass
class SamplePreparer:
    """Makes requests, and keeps the samples with their pictures for the other crops that they are cut into."""

    task: Task
    model: Runnable
    free_bytes: float  #: memory for pictures; what comes first stays
    #: content of the samples by id, from before the run or from their first reading
    digests: dict[int, str] = field(default_factory=dict)
    samples: dict[int, Sample] = field(default_factory=dict)  #: those that are kept, by id

    def prepare(self, key: RequestKey) -> PrefetchedRequest:
        """Raises SampleError for a sample that cannot be read or used, whatever was raised, and DataChanged for one
        that has changed.
        """
        with library_faults_named(f"sample {key.sample_id}"):
            sample, family = self._sample(key.sample_id), self.model.prompt_family
            prompt, sample = prompt_for(self.task, sample, family), with_continuations(self.task, sample, family)
            request = self.model.prepare(sample, prompt, key.crops)
            prompted = replace(sample, image=None, metadata={**sample.metadata, "prompt": prompt})
            return PrefetchedRequest(prompted, replace(request, inputs=dict(request.inputs)))

    def _sample(self, sample_id: int) -> Sample:
        if sample_id in self.samples:
            return self.samples[sample_id]
        sample = read_unchanged(self.task, sample_id, self.digests)
        needed = picture_bytes(sample)
        if needed <= self.free_bytes:
            self.free_bytes -= needed
            self.samples[sample_id] = sample
        return sample


class RequestSource:
    """Gives prepared requests; a context manager, for its processes.

    Args:
        own_ids: this process's samples, in the order in which they are taken.
        budget_bytes: memory for requests and pictures. Nothing is thrown out for what comes later (settings go through
            the samples in order, so that throwing out the oldest would throw out each one before its next use).
        num_workers: preparing processes; 0 to prepare in this one.
        digests: content of the samples before the run, by id (`content.digests_of`); a sample that is not among them
            has to be the same at each reading.
    """

    def __init__(
        self,
        task: Task,
        model: Runnable,
        own_ids: Sequence[int],
        budget_bytes: int,
        num_workers: int,
        sample_timeout_s: float | None,
        keep_pictures: bool,
        digests: Mapping[int, str] | None = None,
    ) -> None:
        self._own_ids = tuple(own_ids)
        self._budget_bytes = budget_bytes
        self._num_workers = num_workers
        self._timeout_s = sample_timeout_s
        for_pictures = PICTURE_FRACTION * budget_bytes if keep_pictures else 0.0
        self._preparer = SamplePreparer(task, model, for_pictures / max(num_workers, 1), dict(digests or {}))
        self._free_bytes = budget_bytes - for_pictures
        self._cached: dict[RequestKey, PrefetchedRequest] = {}
        # Arrived before they were taken, and there was no memory to cache them.
        self._arrived: dict[RequestKey, Outcome] = {}
        self._upcoming: list[RequestKey] = []
        self._workers: list[PreparationWorker] = []
        self._home = {sample_id: place for place, sample_id in enumerate(self._own_ids)}

    def __enter__(self) -> "RequestSource":
        for _ in range(self._num_workers):
            self._workers.append(PreparationWorker(self._preparer.prepare, self._timeout_s, self._workers))
        return self

    def __exit__(self, *_: object) -> None:
        while self._workers:
            self._workers.pop().end()

    def describe(self) -> Preparation:
        """How requests are prepared, and the memory that they may take and that they take now."""
        return Preparation(
            workers=self._num_workers, cache_budget_bytes=self._budget_bytes, cache_used_bytes=self.cached_bytes
        )

    @property
    def cached_bytes(self) -> int:
        """Memory of the requests that are kept in this process now."""
        return sum(request_bytes(ready) for ready in self._cached.values())

    def announce(self, coming: Iterable[RequestKey]) -> None:
        """What will be taken next, in that order; requests that are not among it are let go."""
        keys = dict.fromkeys(coming)
        self.let_go([key for key in self._cached if key not in keys])
        # Errors of an earlier attempt are not passed on to the next one.
        self._arrived = {
            key: found for key, found in self._arrived.items() if key in keys and isinstance(found, PrefetchedRequest)
        }
        self._upcoming = list(reversed(keys))
        self._prefetch()

    def let_go(self, keys: Iterable[RequestKey]) -> None:
        """Keep these requests no longer; taken again, they are made again."""
        for key in keys:
            found = self._cached.pop(key, None)
            if found is not None:
                self._free_bytes += request_bytes(found)

    def take(self, sample_id: int, crops: CropRange | None) -> tuple[Sample, PreparedRequest]:
        """The sample (without its picture) and its request; waits where it is not ready.

        Raises:
            SampleError: it cannot be read or used; taken again, it is tried again.
            DataChanged: it is another than when the run began.
        """
        key = RequestKey(sample_id, crops)
        for worker in list(self._workers):
            with self._dropped_if_it_ends(worker):
                while worker.has_result():
                    self._store(*worker.receive())
        if key not in self._cached and key not in self._arrived:
            self._await(key)
        found = self._arrived.pop(key) if key in self._arrived else self._cached[key]
        self._prefetch()
        if not isinstance(found, PrefetchedRequest):
            raise found
        return found.sample, found.request

    def _await(self, key: RequestKey) -> None:
        """Bring the request here, from the worker that has it or will have it, else made in this process."""
        while (worker := self._worker_of(key)) is not None:
            with self._dropped_if_it_ends(worker):
                if key not in worker.pending:
                    worker.submit(key)
                while key in worker.pending:
                    self._store(*worker.receive())
                return
        self._store(key, self._preparer.prepare(key))

    @contextmanager
    def _dropped_if_it_ends(self, worker: PreparationWorker) -> Iterator[None]:
        """A context in which a worker may exit; a worker that cannot continue is dropped."""
        try:
            yield
        except WorkerExited:
            self._drop(worker)
        except BaseException:
            # Out of time, or stopped.
            if not worker.is_usable():
                self._drop(worker)
            raise

    def _prefetch(self) -> None:
        """Keep the workers busy with what comes next, as far as there is a place for the results."""
        while self._upcoming and self._workers:
            in_flight = len(self._arrived) + sum(len(worker.pending) for worker in self._workers)
            if in_flight >= _PREFETCHED_PER_WORKER * len(self._workers):
                return
            key = self._upcoming.pop()
            worker = self._worker_of(key)
            if worker is None or key in self._cached or key in self._arrived or key in worker.pending:
                continue
            try:
                worker.submit(key)
            except WorkerExited:
                self._drop(worker)

    def _worker_of(self, key: RequestKey) -> PreparationWorker | None:
        """The one that prepares it, else the one that had the sample before, so that its picture is there."""
        if not self._workers:
            return None
        requested = next((worker for worker in self._workers if key in worker.pending), None)
        return requested or self._workers[self._home[key.sample_id] % len(self._workers)]

    def _store(self, key: RequestKey, outcome: Outcome) -> None:
        """Cache it where there is memory, else keep it until it is taken."""
        if key in self._cached:
            return
        if isinstance(outcome, PrefetchedRequest) and (needed := request_bytes(outcome)) <= self._free_bytes:
            self._free_bytes -= needed
            self._cached[key] = outcome
        else:
            self._arrived[key] = outcome

    def _drop(self, worker: PreparationWorker) -> None:
        """Drop a worker. No new one is started: it would hold this process's files and locks open."""
        self._workers.remove(worker)
        worker.end()


def request_bytes(ready: PrefetchedRequest) -> int:
    """Memory of a request's tensors."""
    inputs = ready.request.inputs.values()
    return sum(value.nbytes for value in inputs if isinstance(value, torch.Tensor))


def picture_bytes(sample: Sample) -> int:
    """Memory of a sample's decoded pictures."""
    return sum(each.width * each.height * len(each.getbands()) for each in sample.images)
