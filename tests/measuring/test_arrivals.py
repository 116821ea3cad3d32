"""Arrivals as data, and what batches of hand-made requests come to."""

import math
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from experiment_core_utils.measuring.arrivals import ArrivalMarks, Batch, arrivals_s, arrive, batch_size, trace_of
from experiment_core_utils.primitives.device import Marks
from experiment_core_utils.primitives.errors import SampleError, SampleTimedOut, Stopped
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.records.settings import ArrivalsTrace
from tests.scripted.simulated_meters import ScriptedClock


def test_arrivals_are_exponential_gaps_scaled_to_the_rate() -> None:
    # numpy.random.RandomState([7, 0]).exponential(size=3), which adds up to 4.07136909; three gaps of 0.5 s on average.
    gaps = np.array([3.13818108, 0.38597313, 0.54721498]) * 1.5 / 4.07136919
    assert arrivals_s(4, 2.0, (7, 0)) == pytest.approx([0.0, *np.cumsum(gaps)], rel=1e-7)
    assert arrivals_s(1, 2.0, (7, 0)) == [0.0]
    assert arrivals_s(4, 2.0, (7, 0)) != arrivals_s(4, 2.0, (7, 1)) != arrivals_s(4, 2.0, (8, 1))


def test_gaps_are_those_of_a_poisson_process() -> None:
    """Moments of 10,000 draws: exponential gaps deviate by their mean, and a fraction of 1 / e is longer than it."""
    gaps = np.diff(arrivals_s(10_001, 4.0, (7, 0)))
    assert gaps.mean() == pytest.approx(0.25)
    # Four standard errors: of a deviation sqrt(8 / n) / 2 = 0.014 relative, of the fraction 0.0048.
    assert gaps.std() == pytest.approx(0.25, rel=0.057)
    assert (gaps > 0.25).mean() == pytest.approx(math.exp(-1), abs=0.02)


def test_batches_are_as_few_as_possible_and_alike() -> None:
    assert [batch_size(number) for number in (0, 1, 256, 257, 600)] == [1, 1, 256, 129, 200]


def begun_marks(now_s: float, after_s: float, limit_s: float | None = None) -> tuple[ArrivalMarks, ScriptedClock]:
    """Of a batch that began at 10 s."""
    clock = ScriptedClock(now_s)
    batch = Batch(clock, begin_s=10.0)
    batch.has_begun.set()
    return ArrivalMarks(batch, after_s, limit_s), clock


def test_times_count_from_when_a_request_was_due_however_late_it_was_sent() -> None:
    marks, clock = begun_marks(12.5, after_s=2.0)
    marks.mark()
    assert (marks.due_s, marks.sent_s) == (12.0, 12.5)
    for passing_s in (0.75, 0.25, 1.0):
        clock.sleep(passing_s)
        marks.mark()
    marks.unmark()
    assert marks.seconds() == [1.25, 0.25]


def test_a_time_limit_counts_from_then_too() -> None:
    marks, clock = begun_marks(12.5, after_s=2.0, limit_s=3.0)
    marks.mark()
    clock.sleep(2.5)
    marks.mark()
    clock.sleep(0.25)
    with pytest.raises(SampleTimedOut, match=r"not done after 3\.25 s"):
        marks.mark()


def test_what_a_batch_showed() -> None:
    """Four requests: the first is answered at 1.5 s, the second fails at 4, the third is answered at 3; the last was
    never sent. At 1 s, when the second is due, two are under way; at 2 s the second and the third. Answered are those
    that were due at 0 and 2 s, of which 80 % of the way are 1.6 s; of the answers 1.2 s.
    """
    marks, futures = [], []
    for after_s, late_s, ended_s in ((0.0, 0.0, 1.5), (1.0, 0.004, 4.0), (2.0, 0.25, 3.0), (3.0, None, 0.0)):
        own, _ = begun_marks(0.0, after_s)
        own.sent_s, own.ended_s = None if late_s is None else own.due_s + late_s, 10.0 + ended_s
        marks.append(own)
        futures.append(Future[int]())
    for at in (0, 2):
        futures[at].set_result(at)
    for at in (1, 3):
        futures[at].set_exception(SampleError("odd"))
    assert trace_of(futures, marks, 1.0, "0007", 0) == ArrivalsTrace(
        experiment_id="0007",
        rank=0,
        request_rate=1.0,
        num_requests=4,
        num_answered=2,
        due_span_s=pytest.approx(1.6),
        answered_span_s=pytest.approx(1.2),
        most_under_way=2,
        num_late=1,
        late_max_s=0.25,
    )


def test_a_request_waits_for_none_before_it() -> None:
    """Each is answered once the last has been sent, which would never be if they went one by one."""
    last_is_sent = threading.Event()

    def answer(marks: Marks, number: int) -> int:
        marks.mark()
        if number == 3:
            last_is_sent.set()
        assert last_is_sent.wait(60)
        if number == 1:
            raise SampleError("odd")
        return number

    works = [lambda marks, number=number: answer(marks, number) for number in range(4)]
    futures, marks = arrive(works, arrivals_s(4, 1000.0, (7, 0)), None, StopRequest())
    assert [each.result() for each in futures if not each.exception()] == [0, 2, 3]
    assert isinstance(futures[1].exception(), SampleError)
    assert trace_of(futures, marks, 1000.0, "0007", 0).most_under_way == 4


def test_requests_that_are_not_due_yet_are_given_up_at_a_stop() -> None:
    stop, sent = StopRequest(), []

    def answer(marks: Marks) -> None:
        stop.note(2, None)
        marks.mark()
        sent.append(1)

    with pytest.raises(Stopped):
        arrive([answer], [3600.0], None, stop)
    assert not sent


def test_a_request_without_an_answer_is_given_up_at_its_limit() -> None:
    """It makes no mark that could tell it the time; what it comes to later is of no effect."""
    going, came = threading.Event(), threading.Event()

    def answer(marks: Marks) -> int:
        marks.mark()
        assert going.wait(60)
        came.set()
        return 1

    futures, marks = arrive([answer], [0.0], 0.01, StopRequest())
    assert isinstance(futures[0].exception(), SampleTimedOut)
    going.set()
    assert came.wait(60) and isinstance(futures[0].exception(), SampleTimedOut)
    assert trace_of(futures, marks, 1.0, "0007", 0).num_answered == 0


def test_work_that_fails_before_it_is_ready_holds_nothing_up() -> None:
    def fail(marks: Marks) -> None:
        raise SampleError("no picture")

    futures, marks = arrive([fail, lambda own: own.mark()], [0.0, 0.001], None, StopRequest())
    assert isinstance(futures[0].exception(), SampleError) and futures[1].result() is None
    assert trace_of(futures, marks, 1000.0, "0007", 0).num_answered == 1
