"""What may end a sample or a run from outside: a time limit, Ctrl-C, a signal to terminate.

Python looks at signals between two of its own instructions. A call that does not come back (a kernel that hangs, a read
from a dead file system) is not interrupted before it returns.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from experiment_core_utils.primitives.errors import ConfigurationError, SampleTimedOut, Stopped

_POLL_S = 0.1
# An exception that Python cannot deliver (it lands in a destructor) is raised again after this time.
_AGAIN_S = 1.0


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raises SampleTimedOut inside its block after that time; None sets no limit.

    Raises:
        ConfigurationError: outside the main thread, where Python delivers no signals.
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("--sample_timeout works in the main thread only; drop it or run from there")

    def expire(_number: int, _frame: FrameType | None) -> None:
        raise SampleTimedOut(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class StopRequest:
    """Whether someone wants the run to stop."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler: remember; a second Ctrl-C does not wait for the sample."""
        if self._signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = signal.Signals(number)

    def raise_if_asked(self, doing: str = "between two samples") -> None:
        """Raises Stopped once a signal has come."""
        if self._signal is not None:
            raise Stopped(
                f"stopped by {self._signal.name} {doing}; what is finished is saved, the same command goes on from here"
            )

    def sleep(self, seconds: float) -> None:
        """Wait, but not longer than until someone wants to stop."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.raise_if_asked()
            time.sleep(min(left, _POLL_S))


@contextmanager
def signals_stop() -> Iterator[StopRequest]:
    """Inside, SIGINT and SIGTERM ask for a stop instead of ending the process; no change outside the main thread."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
