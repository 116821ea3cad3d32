"""Interruption of a sample or a run from outside: a time limit, Ctrl-C, a signal to terminate.

Python looks at signals between two of its own instructions. A call that does not come back (a kernel that hangs, a read
from a dead file system) is not interrupted before it returns.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from experiment_core_utils.primitives.errors import ConfigurationError, SampleTimedOut, Stopped

_POLL_S = 0.1
# An exception that Python cannot deliver (it lands in a destructor) is raised again after this time.
_AGAIN_S = 1.0
# An interval of 0 would switch the timer off.
_SOON_S = 1e-3
# A launcher passes on the Ctrl-C that its processes got from the terminal already: that is not a second one.
_SAME_PRESS_S = 1.0


@contextmanager
def time_limit(seconds: float | None, name: str = "--sample_timeout") -> Iterator[None]:
    """Raises SampleTimedOut inside its block after that time; None sets no limit.

    Inside another limit that ends sooner, that one alone counts; what is left of one that ends later counts on
    afterwards.

    Args:
        name: what the caller calls the limit, for messages.

    Raises:
        ConfigurationError: outside the main thread, where Python delivers no signals.
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(f"a time limit works in the main thread only; drop it ({name}) or run from there")

    outer_s, _ = signal.getitimer(signal.ITIMER_REAL)
    if 0.0 < outer_s <= seconds:
        yield
        return
    started = time.monotonic()

    def expire(_number: int, _frame: FrameType | None) -> None:
        raise SampleTimedOut(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    finally:
        # Again: the limit may have run out just before the line above. The next alarm is far from here.
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if outer_s:
            left_s = max(outer_s - (time.monotonic() - started), _SOON_S)
            signal.setitimer(signal.ITIMER_REAL, left_s, _AGAIN_S)


class StopRequest:
    """Whether a stop of the run was requested."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._signal: signal.Signals | None = None
        self._came = 0.0
        self._checks: list[Callable[[], None]] = []

    @contextmanager
    def watching(self, check: Callable[[], None]) -> Iterator[None]:
        """Inside, this is called as well whenever a stop is asked about; it raises where the run must not go on."""
        self._checks.append(check)
        try:
            yield
        finally:
            self._checks.remove(check)

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler: remember the first; a second does not wait for the sample, it raises KeyboardInterrupt."""
        if self._signal is None:
            self._signal, self._came = signal.Signals(number), self._clock()
        elif self._clock() - self._came >= _SAME_PRESS_S:
            raise KeyboardInterrupt

    def raise_if_requested(self, doing: str = "between two samples") -> None:
        """Raises Stopped once a signal has come, else what a check raises."""
        if self._signal is not None:
            raise Stopped(
                f"stopped by {self._signal.name} {doing}; finished samples are saved: run the same command again to "
                f"resume"
            )
        for check in self._checks:
            check()

    def sleep(self, seconds: float) -> None:
        """Wait, but not longer than until a stop is requested."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.raise_if_requested()
            time.sleep(min(left, _POLL_S))


@contextmanager
def signals_stop(request: StopRequest) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM ask for a stop instead of ending the process; no change outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, request.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
