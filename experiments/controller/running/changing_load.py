"""A load that comes and goes: processes that keep all CPU cores busy in every second period."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def changing_load(period_s: float | None) -> Iterator[None]:
    """One process for each core, idle in the first period of so many seconds, busy in the second, and so on.

    Args:
        period_s: None for no load.
    """
    number = 0 if period_s is None else os.cpu_count() or 1
    spawning = multiprocessing.get_context("spawn")
    arguments = time.monotonic(), period_s, os.getpid()
    processes = [spawning.Process(target=_load, args=arguments, daemon=True) for _ in range(number)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


def is_busy(started_s: float, now_s: float, period_s: float) -> bool:
    """Whether a load that started then is busy now."""
    return int((now_s - started_s) / period_s) % 2 == 1


def _load(started_s: float, period_s: float, parent: int) -> None:
    # A killed parent ends nobody.
    while os.getppid() == parent:
        if is_busy(started_s, time.monotonic(), period_s):
            sum(range(100_000))
        else:
            time.sleep(min(0.01, period_s / 10))
