"""A monotonic clock and a repeating timer."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol


class Repeating(Protocol):
    """Calls that are repeated until they are stopped, or one of them raises."""

    @property
    def has_failed(self) -> bool:
        """Whether one of them raised, which ended them."""

    def stop(self) -> None:
        """Waits for a call that is under way; none begins after it. Raises what a call raised, once."""


class Clock(Protocol):
    """What meters need of a clock, so that a scripted one can replace the host's."""

    def now_s(self) -> float:
        """Monotonic seconds from an arbitrary beginning."""

    def sleep(self, seconds: float) -> None:
        """Let this much time pass."""

    def every(self, interval_s: float | Iterator[float], call: Callable[[], None]) -> Repeating:
        """Make `call` beside the running code, each time `interval_s` after the last one ended.

        Args:
            interval_s: seconds; an endless iterator gives each interval in turn.
        """


class HostClock:
    """The clock that `time.perf_counter` reads; repeated calls are made by a thread."""

    def now_s(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def every(self, interval_s: float | Iterator[float], call: Callable[[], None]) -> Repeating:
        """The thread does not keep the process alive."""
        return _RepeatingThread(intervals_of(interval_s), call)


def intervals_of(interval_s: float | Iterator[float]) -> Iterator[float]:
    """Intervals in seconds: one number for ever, or each of an iterator as it comes."""
    return itertools.repeat(interval_s) if isinstance(interval_s, int | float) else interval_s


class _RepeatingThread:
    def __init__(self, intervals: Iterator[float], call: Callable[[], None]) -> None:
        self._intervals = intervals
        self._call = call
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        return self._has_failed

    def _run(self) -> None:
        try:
            while not self._ended.wait(next(self._intervals)):
                self._call()
        # Whatever it is: at the top of a thread it would go unseen.
        except BaseException as error:
            self._error, self._has_failed = error, True

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
