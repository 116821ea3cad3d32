"""A limit for what must not wait for ever."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """Raises TimeoutError inside, also out of a system call that waits."""

    def give_up(*_: Any) -> None:
        raise TimeoutError(f"it did not end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
