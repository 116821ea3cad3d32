"""Progress by tqdm: nested bars on a terminal, else whole lines for a log, one a minute."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

UNWATCHED_INTERVAL_S = 60.0
SAMPLES_INTERVAL_S = 30.0


class LogLines(tqdm):
    """A tqdm that writes whole lines, each readable on its own, once in a while and when it closes.

    Args:
        interval_s: least time between two lines.
        delay_s: more than 0 leaves out the line at the beginning.
    """

    monitor_interval = 0
    disable: bool

    def __init__(self, work: str, samples: int, interval_s: float, stream: TextIO, delay_s: float = 0.0) -> None:
        super().__init__(
            desc=f"{work}: " if work else "",
            total=samples,
            mininterval=interval_s,
            miniters=0,
            smoothing=0,
            position=0,
            file=stream,
            delay=delay_s,
            bar_format="{desc}{n_fmt}/{total_fmt} samples; {elapsed} elapsed, {remaining} left",
        )

    @staticmethod
    def status_printer(file):  # type: ignore[no-untyped-def]
        """tqdm's place to say how a line is written."""
        return lambda line: print(line, file=file, flush=True)

    def update(self, n: float | None = 1) -> None:
        """Count `n` more as done."""
        super().update(n)
        if self.n == self.total:
            self.close()

    def close(self) -> None:
        """Write the last line."""
        if not self.disable:
            self.display()
            self.disable = True


def sample_lines(work: str, samples: int, stream: TextIO | None = None) -> LogLines:
    """Lines for work on samples without settings: one now, one each half minute, whoever watches, and one at the end.

    Args:
        work: what is done to the samples, to begin the line with.
    """
    return LogLines(work, samples, SAMPLES_INTERVAL_S, stream or sys.stderr)


class Progress:
    """Counts samples over all parts of a run (settings, or rounds of several) and names the part at work.

    On a terminal there is one bar for the whole run and below it one for the part, elsewhere a line a minute.

    Args:
        num_samples: of all parts.
        shown: False in processes other than the main one.
    """

    def __init__(self, num_parts: int, num_samples: int, shown: bool, stream: TextIO | None = None) -> None:
        stream = stream or sys.stderr
        self._num_parts, self._started, self._before, self._own = num_parts, 0, 0, 0
        watched = stream.isatty()
        self._watched, self._named = watched, ""
        self._run: tqdm | None = None
        if shown and watched:
            self._run = tqdm(total=num_samples, unit="sample", position=0, file=stream, dynamic_ncols=True)
        elif shown:
            self._run = LogLines("", num_samples, UNWATCHED_INTERVAL_S, stream, delay_s=1e-9)
        self._part = tqdm(
            total=num_samples,
            unit="sample",
            position=1,
            leave=False,
            file=stream,
            disable=not (shown and watched and num_parts > 1),
            dynamic_ncols=True,
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._part.close()
        if self._run is not None and self._started:
            self._run.close()
        elif self._run is not None:
            # Nothing was begun: no line of it comes behind an error.
            self._run.disable = True

    def start(self, name: str, already_done: int, num_samples: int) -> None:
        """The next part begins, of whose samples an earlier run has done that many.

        What a part that failed did not count is set right; neither counts for the time left.
        """
        self._started += 1
        self._before, self._own = self._before + self._own, num_samples
        if self._run is None:
            return
        _skip(self._run, self._before - self._run.n + already_done)
        self._named = name if self._num_parts == 1 else f"setting {self._started}/{self._num_parts} {name}"
        self._run.set_description(self._named, refresh=self._started == 1)
        self._run.update(0)
        self._part.reset(num_samples)
        self._part.initial = 0
        _skip(self._part, already_done)
        self._part.refresh()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Say what is done before samples are: on a terminal at once, elsewhere in the lines that are due meanwhile."""
        if self._run is not None:
            self._run.set_description(", ".join(each for each in (self._named, name) if each), refresh=self._watched)
        yield
        if self._run is not None:
            self._run.set_description(self._named, refresh=self._watched)

    def advance(self) -> None:
        """One sample is done."""
        if self._run is not None:
            self._run.update()
            self._part.update()


def _skip(bar: tqdm, samples: int) -> None:
    """Count samples as done of which the rate, and so the time left, knows nothing."""
    if bar.disable:
        return
    bar.initial += samples
    bar.n += samples
    bar.last_print_n += samples
