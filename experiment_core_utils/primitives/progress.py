"""Progress: nested bars on a terminal, else a line a minute.

Work on samples that has no settings writes a line each half minute, whoever watches.
"""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TextIO

from tqdm import tqdm

from experiment_core_utils.primitives.units import span

UNWATCHED_INTERVAL_S = 60.0


SAMPLES_INTERVAL_S = 30.0


class Progress(Protocol):
    """Counts samples over all settings and names the setting at work."""

    def __enter__(self) -> "Progress": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def start(self, key: str, already_done: int) -> None:
        """The next setting begins, of which an earlier run has done that many samples."""
        ...

    def advance(self) -> None:
        """One sample is done."""
        ...


def progress_of(num_settings: int, samples_per_setting: int, shown: bool, stream: TextIO | None = None) -> Progress:
    """Bars on a terminal, lines elsewhere, nothing where not shown (processes other than the main one)."""
    stream = stream if stream is not None else sys.stderr
    if shown and not stream.isatty():
        return ProgressLines(num_settings, samples_per_setting, stream)
    return ProgressBars(num_settings, samples_per_setting, stream, shown)


class ProgressBars:
    """One bar for the whole run and below it one for the setting at work, each with the time left."""

    def __init__(self, num_settings: int, samples_per_setting: int, stream: TextIO, shown: bool) -> None:
        self._per_setting = samples_per_setting
        self._num_settings = num_settings
        self._started = 0
        self._run = tqdm(
            total=num_settings * samples_per_setting,
            unit="sample",
            position=0,
            file=stream,
            disable=not shown,
            dynamic_ncols=True,
        )
        self._setting = tqdm(
            total=samples_per_setting,
            unit="sample",
            position=1,
            leave=False,
            file=stream,
            disable=not shown,
            dynamic_ncols=True,
        )

    def __enter__(self) -> "ProgressBars":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._setting.close()
        self._run.close()

    def start(self, key: str, already_done: int) -> None:
        """See `Progress`; what a setting that failed did not count is set right."""
        self._run.update(self._started * self._per_setting - self._run.n + already_done)
        self._started += 1
        self._run.set_description(f"{self._started}/{self._num_settings} settings")
        self._setting.reset(self._per_setting)
        self._setting.update(already_done)
        self._setting.set_description(key)

    def advance(self) -> None:
        """See `Progress`."""
        self._run.update()
        self._setting.update()


class ProgressLines:
    """A line when a setting begins, but at most one a minute, each whole and readable on its own in a log."""

    def __init__(
        self,
        num_settings: int,
        samples_per_setting: int,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_setting = samples_per_setting
        self._num_settings = num_settings
        self._stream = stream
        self._clock = clock
        self._begun = clock()
        self._written: float | None = None
        self._started = 0
        self._key = ""
        self._in_setting = 0
        self._done_now = 0

    def __enter__(self) -> "ProgressLines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._started:
            self._write()

    def start(self, key: str, already_done: int) -> None:
        """See `Progress`."""
        self._started += 1
        self._key = key
        self._in_setting = already_done
        self._write_if_due()

    def advance(self) -> None:
        """See `Progress`."""
        self._in_setting += 1
        self._done_now += 1
        self._write_if_due()

    def _write_if_due(self) -> None:
        if self._written is None or self._clock() - self._written >= UNWATCHED_INTERVAL_S:
            self._write()

    def _write(self) -> None:
        self._written = self._clock()
        gone = self._written - self._begun
        owed = (self._num_settings - self._started + 1) * self._per_setting - self._in_setting
        left = f", about {span(gone / self._done_now * owed)} left" if self._done_now and owed else ""
        print(
            f"setting {self._started}/{self._num_settings} {self._key}: "
            f"{self._in_setting}/{self._per_setting} samples; {span(gone)} gone{left}",
            file=self._stream,
            flush=True,
        )


class SampleLines:
    """A line when the work begins and when it is done, and between them at most one each half minute.

    Args:
        work: what is done to the samples, to begin the line with.
    """

    def __init__(
        self, work: str, samples: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._work = work
        self._samples = samples
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._begun = clock()
        self._done = 0
        self._write()

    def advance(self, samples: int = 1) -> None:
        """So many more are done."""
        self._done += samples
        if samples and (self._done == self._samples or self._clock() - self._written >= SAMPLES_INTERVAL_S):
            self._write()

    def _write(self) -> None:
        self._written = self._clock()
        gone, owed = self._written - self._begun, self._samples - self._done
        left = f", about {span(gone / self._done * owed)} left" if self._done and owed else ""
        print(
            f"{self._work}: {self._done}/{self._samples} samples; {span(gone)} gone{left}",
            file=self._stream,
            flush=True,
        )
