"""In: nothing; out: the host's monotonic seconds, and calls that are made again and again beside the running code."""

import threading
import time
from collections.abc import Callable
from typing import Protocol


class Repeating(Protocol):
    """Calls that go on until they are stopped."""

    def stop(self) -> None:
        """Waits for a call that is under way; none begins after it."""
        ...


class Clock(Protocol):
    """What meters ask of time, so that a scripted clock can stand in for the host's."""

    def now_s(self) -> float:
        """Monotonic seconds from an arbitrary beginning."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let this much time pass."""
        ...

    def every(self, interval_s: float, call: Callable[[], None]) -> Repeating:
        """Make `call` beside the running code, each time `interval_s` after the last one ended; it must not raise."""
        ...


class HostClock:
    """The clock that `time.perf_counter` reads; repeated calls are made by a thread."""

    def now_s(self) -> float:
        """See `Clock.now_s`."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        time.sleep(seconds)

    def every(self, interval_s: float, call: Callable[[], None]) -> Repeating:
        """See `Clock.every`; the thread does not keep the process alive."""
        return _RepeatingThread(interval_s, call)


class _RepeatingThread:
    def __init__(self, interval_s: float, call: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._call = call
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._call()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
