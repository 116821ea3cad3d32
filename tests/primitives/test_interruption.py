"""Time limits and requests to stop."""

import os
import signal
import threading
import time

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError, SampleTimedOut, Stopped, WorkerLost
from experiment_core_utils.primitives.interruption import StopRequest, signals_stop, time_limit


def _count_for_ever() -> None:
    while True:
        pass


def test_what_takes_too_long_is_interrupted_where_python_runs_or_waits() -> None:
    started = time.monotonic()
    with pytest.raises(SampleTimedOut, match="not done after 0.1 s"), time_limit(0.1):
        time.sleep(20)
    with pytest.raises(SampleTimedOut), time_limit(0.1):
        _count_for_ever()
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("seconds", [None, 0.05])
def test_a_limit_that_was_kept_leaves_nothing_behind(seconds: float | None) -> None:
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(seconds):
        pass
    time.sleep(0.1)
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_of_a_limit_inside_another_the_sooner_one_counts_and_the_outer_one_goes_on() -> None:
    with pytest.raises(SampleTimedOut, match="after 0.1 s"), time_limit(20.0), time_limit(0.1):
        time.sleep(20)
    with pytest.raises(SampleTimedOut, match="after 0.1 s"), time_limit(0.1), time_limit(20.0):
        time.sleep(20)

    def after_an_inner_one_is_up() -> None:
        with pytest.raises(SampleTimedOut, match="after 0.1 s"), time_limit(0.1):
            time.sleep(20)
        time.sleep(20)

    def after_an_inner_one_was_kept() -> None:
        with time_limit(0.2):
            pass
        time.sleep(20)

    for program in (after_an_inner_one_is_up, after_an_inner_one_was_kept):
        with pytest.raises(SampleTimedOut, match="after 0.4 s"), time_limit(0.4):
            program()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_limit_that_cannot_work_is_refused() -> None:
    caught: list[ConfigurationError] = []

    def elsewhere() -> None:
        try:
            with time_limit(1.0):
                pass
        except ConfigurationError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_and_the_program_stops_where_it_looks(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    stop = StopRequest()
    with signals_stop(stop):
        stop.raise_if_requested()
        os.kill(os.getpid(), number)
        with pytest.raises(
            Stopped, match=f"stopped by {number.name} between two samples; .*same command again to resume"
        ) as caught:
            stop.raise_if_requested()
        assert caught.value.exit_code == 130
        with pytest.raises(Stopped):
            stop.sleep(60)
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_wait_unless_it_is_the_first_one_passed_on(number: signal.Signals) -> None:
    now = [100.0]
    stop = StopRequest(clock=lambda: now[0])
    stop.note(signal.SIGINT, None)
    now[0] = 100.9
    stop.note(number, None)
    with pytest.raises(Stopped, match="stopped by SIGINT"):
        stop.raise_if_requested()
    now[0] = 101.0
    with pytest.raises(KeyboardInterrupt):
        stop.note(number, None)


def test_whoever_asks_about_a_stop_hears_what_is_watched_after_a_signal() -> None:
    request = StopRequest()
    request.raise_if_requested()

    def is_gone() -> None:
        raise WorkerLost("process 0 has ended")

    with request.watching(is_gone):
        for ask in (request.raise_if_requested, lambda: request.sleep(60.0)):
            with pytest.raises(WorkerLost, match="process 0 has ended"):
                ask()
    request.raise_if_requested()
    request.note(signal.SIGINT, None)
    with pytest.raises(Stopped):
        request.raise_if_requested()


def test_a_pause_lasts_as_long_as_requested() -> None:
    started = time.monotonic()
    StopRequest().sleep(0.2)
    assert 0.2 <= time.monotonic() - started < 2
