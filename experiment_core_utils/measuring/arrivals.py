"""Requests that arrive at a rate, whatever the server manages: an open loop.

A request's time counts from when it was due, not from when the client came to send it. So a client or a server that is
late makes it longer, and slow answers hold back no later request (no coordinated omission).
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from experiment_core_utils.primitives.clock import Clock, HostClock
from experiment_core_utils.primitives.device import Marks
from experiment_core_utils.primitives.errors import SampleTimedOut
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.records.settings import ArrivalsTrace

T = TypeVar("T")
# Requests of a batch, each with a thread and a connection of its own, so that the client holds none back.
MOST_ARRIVALS = 256
# Behind its due time by more than this a request is late: an order more than a thread needs to wake up.
LATE_S = 0.005
# In which the threads of a batch hear when it begins.
_LEAD_S = 0.1
_POLL_S = 0.25


def arrivals_s(number: int, rate: float, seed: Sequence[int]) -> list[float]:
    """When each request of a batch is due, in seconds from the first: a Poisson process of `rate` a second.

    Gaps are exponential draws of `numpy.random.RandomState(seed)`, whose stream numpy keeps for ever, scaled so that
    their mean is 1 / rate; so does `vllm bench serve --request-rate` with its burstiness of 1.
    """
    gaps = np.random.RandomState(list(seed)).exponential(size=number - 1)
    return [0.0, *np.cumsum(gaps / gaps.sum() * len(gaps) / rate).tolist()]


def batch_size(number: int) -> int:
    """Requests of a batch where so many are to come: all, or as many in each of the fewest batches."""
    batches = -(-number // MOST_ARRIVALS)
    return -(-number // max(batches, 1)) or 1


@dataclass(eq=False)
class Batch:
    """When a batch begins, which its requests wait for, and whether it is given up."""

    clock: Clock
    begin_s: float = float("inf")
    has_begun: threading.Event = field(default_factory=threading.Event)
    is_over: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class ArrivalMarks:
    """Marks of one request of a batch. The first stands for when it is due: who sets it waits until then.

    Attributes:
        sent_s: when the wait was over; None before.
        ended_s: when the request had ended, well or not; None before.
    """

    batch: Batch
    after_s: float  #: when it is due, from the beginning of the batch
    limit_s: float | None = None  #: from then
    is_ready: threading.Event = field(default_factory=threading.Event)  #: whether it waits, or has ended
    sent_s: float | None = None
    ended_s: float | None = None
    _times_s: list[float] = field(default_factory=list)

    @property
    def due_s(self) -> float:
        """When it is due, by the clock of the batch; never before that begins."""
        return self.batch.begin_s + self.after_s

    def mark(self) -> None:
        """See `Marks.mark`; raises SampleTimedOut behind the limit."""
        if self.sent_s is None:
            self.is_ready.set()
            self.batch.has_begun.wait()
            if self.batch.is_over.wait(max(self.due_s - self.batch.clock.now_s(), 0.0)):
                raise SampleTimedOut("given up before it was due")
            self.sent_s = self.batch.clock.now_s()
            self._times_s.append(self.due_s)
            return
        now_s = self.batch.clock.now_s()
        if self.batch.is_over.is_set() or (self.limit_s is not None and now_s - self.due_s > self.limit_s):
            raise SampleTimedOut(f"not done after {now_s - self.due_s:g} s")
        self._times_s.append(now_s)

    def unmark(self) -> None:
        """See `Marks.unmark`."""
        self._times_s.pop()

    def seconds(self) -> list[float]:
        """See `Marks.seconds`."""
        return np.diff(self._times_s).tolist()


def arrive(
    works: Sequence[Callable[[Marks], T]],
    after_s: Sequence[float],
    limit_s: float | None,
    stop: StopRequest,
    clock: Clock | None = None,
) -> tuple[list[Future[T]], list[ArrivalMarks]]:
    """Let requests arrive, and wait until all have ended; what each came to, and its marks.

    All are prepared up to their first mark before the batch begins, so that no preparation is beside a measurement.

    Args:
        works: makes each request with the marks it is given.
        after_s: when each is due, in seconds from the beginning.
        limit_s: of the time of each, from when it is due; None for no limit.

    Raises:
        Stopped: a stop was requested; the requests are given up.
    """
    batch = Batch(clock or HostClock())
    marks = [ArrivalMarks(batch, each, limit_s) for each in after_s]
    futures = [_begun(work, own) for work, own in zip(works, marks, strict=True)]
    try:
        for each in marks:
            while not each.is_ready.wait(_POLL_S):
                stop.raise_if_requested("before a batch of requests")
        batch.begin_s = batch.clock.now_s() + _LEAD_S
        batch.has_begun.set()
        while wait(futures, _POLL_S).not_done:
            stop.raise_if_requested("between two requests")
            for future, own in zip(futures, marks, strict=True):
                _end_where_silent(future, own)
    finally:
        batch.is_over.set()
        batch.has_begun.set()
    return futures, marks


def _begun(work: Callable[[Marks], T], marks: ArrivalMarks) -> Future[T]:
    """What the work will come to, in a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work(marks)
        except BaseException as error:
            _end(marks, partial(future.set_exception, error))
        else:
            _end(marks, partial(future.set_result, result))

    threading.Thread(target=run, daemon=True).start()
    return future


def _end_where_silent(future: Future[T], marks: ArrivalMarks) -> None:
    """Give up a request behind its limit that makes no mark: a server may send signs of life and no answer for ever."""
    if marks.sent_s is None or marks.ended_s is not None or marks.limit_s is None:
        return
    spent_s = marks.batch.clock.now_s() - marks.due_s
    if spent_s > marks.limit_s + _POLL_S:
        error = SampleTimedOut(f"not done after {spent_s:g} s")
        _end(marks, partial(future.set_exception, error))


def _end(marks: ArrivalMarks, settle: Callable[[], None]) -> None:
    """Note how a request ended, unless it was given up before."""
    if marks.ended_s is None:
        marks.ended_s = marks.batch.clock.now_s()
    marks.is_ready.set()
    with suppress(InvalidStateError):
        settle()


def _middle_span(moments_s: Sequence[float]) -> float:
    """The time between the 10th and the 90th percentile: the first and the last answers are not of a full load."""
    if not moments_s:
        return 0.0
    low, high = np.quantile(moments_s, (0.1, 0.9))
    return float(high - low)


def trace_of(
    futures: Sequence[Future[T]], marks: Sequence[ArrivalMarks], rate: float, experiment_id: str, rank: int
) -> ArrivalsTrace:
    """What a batch that has ended showed; a request is under way from when it is due."""
    spans = [(each.due_s, each.ended_s) for each in marks if each.sent_s is not None and each.ended_s is not None]
    late_s = [max(each.sent_s - each.due_s, 0.0) for each in marks if each.sent_s is not None]
    answered = [
        (each.due_s, each.ended_s)
        for each, future in zip(marks, futures, strict=True)
        if each.ended_s is not None and not future.exception()
    ]
    due_s, ended_s = zip(*answered, strict=True) if answered else ((), ())
    return ArrivalsTrace(
        experiment_id=experiment_id,
        rank=rank,
        request_rate=rate,
        num_requests=len(futures),
        num_answered=len(answered),
        due_span_s=_middle_span(due_s),
        answered_span_s=_middle_span(ended_s),
        most_under_way=max((sum(a <= due_s < b for a, b in spans) for due_s, _ in spans), default=0),
        num_late=sum(each > LATE_S for each in late_s),
        late_max_s=max(late_s, default=None),
    )
