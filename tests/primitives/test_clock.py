"""Calls beside the running code by the host's clock; the scripted clock is tested with the simulated devices."""

import itertools
import threading

import pytest

from experiment_core_utils.primitives.clock import HostClock


def test_calls_are_made_beside_the_running_code_until_they_are_stopped() -> None:
    clock, enough, others = HostClock(), threading.Event(), set[int]()
    calls = list[float]()

    def call() -> None:
        calls.append(clock.now_s())
        others.add(threading.get_ident())
        if len(calls) >= 3:
            enough.set()

    repeating = clock.every(0.001, call)
    assert enough.wait(30.0)
    repeating.stop()
    made = len(calls)
    clock.sleep(0.02)
    assert len(calls) == made
    assert others and threading.get_ident() not in others
    assert all(later - earlier >= 0.001 for earlier, later in itertools.pairwise(calls))


def test_the_first_call_comes_after_an_interval() -> None:
    calls = list[int]()
    repeating = HostClock().every(3600.0, lambda: calls.append(1))
    repeating.stop()
    assert calls == []


def test_what_a_call_raises_ends_the_calls_and_is_raised_once_when_they_are_stopped() -> None:
    clock, calls = HostClock(), list[int]()

    def call() -> None:
        calls.append(1)
        raise ZeroDivisionError("a slip")

    repeating = clock.every(0.001, call)
    while not repeating.has_failed:
        clock.sleep(0.001)
    clock.sleep(0.01)
    assert calls == [1]
    with pytest.raises(ZeroDivisionError, match="a slip"):
        repeating.stop()
    repeating.stop()
