"""Progress by tqdm: nested bars on a terminal, with a table below them where there is one; else whole lines for a log.

A log gets a line a minute.
"""

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.interruption import StopRequest

UNWATCHED_INTERVAL_S = 60.0
SAMPLES_INTERVAL_S = 30.0
# Least time between two drawings of the table on a terminal.
TABLE_INTERVAL_S = 1.0
# Least time until the next one, in times that the last one took.
PAUSE_OF_DRAWING = 20.0


class LogLines(tqdm):
    """A tqdm that writes whole lines, each readable on its own, once in a while and when it closes.

    Args:
        interval_s: least time between two lines.
        delay_s: more than 0 leaves out the line at the beginning.
    """

    monitor_interval = 0
    disable: bool
    n: float

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
        if not self.disable and self.n + (n or 0) == self.total:
            self.n = self.total
            self.close()
        super().update(n)

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


@contextmanager
def announced(work: str, *, shown: bool = True) -> Iterator[None]:
    """Say on stderr what begins, and at its end how long it took; of work that fails its error says the rest.

    Args:
        shown: False in processes other than the main one.
    """
    started_s = HostClock().now_s()
    if shown:
        print(f"{work} ...", file=sys.stderr, flush=True)
    yield
    if shown:
        print(_took(work, started_s), file=sys.stderr, flush=True)


def _took(work: str, started_s: float) -> str:
    return f"{work}: {HostClock().now_s() - started_s:.1f} s"


class _Table:
    """Lines below the bars of a terminal, each a bar of text alone; what the screen has no room for is left out.

    Args:
        make: makes the lines, of which later ones are as many or more.
    """

    def __init__(self, make: Callable[[], Sequence[str]], first_position: int, stream: TextIO) -> None:
        self._make, self._position, self._stream = make, first_position, stream
        self._bars: list[tqdm] = []
        self._due_s = float("-inf")

    def draw_if_due(self) -> None:
        """Draw the table again where the last time was a while ago, which is longer where drawing takes long."""
        started_s = HostClock().now_s()
        if started_s < self._due_s:
            return
        width = shutil.get_terminal_size().columns - 1
        for at, line in enumerate(self._make()):
            if at == len(self._bars):
                place = {"position": self._position + at, "file": self._stream}
                self._bars.append(tqdm(bar_format="{desc}", leave=False, dynamic_ncols=True, **place))
            self._bars[at].set_description_str(line[:width])
        ended_s = HostClock().now_s()
        self._due_s = ended_s + max(TABLE_INTERVAL_S, PAUSE_OF_DRAWING * (ended_s - started_s))

    def close(self) -> None:
        """Take the lines off the screen."""
        for bar in reversed(self._bars):
            bar.close()


class Progress:
    """Counts samples over all parts of a run (settings, or rounds of several) and names the part at work.

    On a terminal there is one bar for the whole run and below it one for the part, elsewhere a line a minute. Their
    clocks start when the first sample can: what comes before it, such as warm-up, says nothing of the time left.

    Args:
        num_samples: of all parts.
        shown: False in processes other than the main one.
    """

    def __init__(self, num_parts: int, num_samples: int, shown: bool, stream: TextIO | None = None) -> None:
        stream = stream or sys.stderr
        self._num_parts, self._started, self._before, self._own = num_parts, 0, 0, 0
        watched = stream.isatty()
        self._watched, self._named, self._stream = watched, "", stream
        self._has_advanced = self._part_has_advanced = False
        self._held: int | None = None
        self._table: _Table | None = None
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
        if self._table is not None:
            self._table.close()
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
        self._part_has_advanced = False
        self._samples_can_start()

    def _samples_can_start(self) -> None:
        """The clock of a bar without samples starts now."""
        for bar, has_advanced in ((self._run, self._has_advanced), (self._part, self._part_has_advanced)):
            if bar is not None and not bar.disable and not has_advanced:
                bar.start_t = bar.last_print_t = bar._time()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Say what is done before samples are: on a terminal at once, elsewhere in the lines that are due meanwhile."""
        if self._run is not None:
            self._run.set_description(", ".join(each for each in (self._named, name) if each), refresh=self._watched)
        yield
        if self._run is not None:
            self._samples_can_start()
            self._run.set_description(self._named, refresh=self._watched)

    @contextmanager
    def announced(self, work: str) -> Iterator[None]:
        """As `announced`, among the bars: on a terminal the beginning is seen in the steps alone."""
        started_s = HostClock().now_s()
        if not self._watched:
            self.say(f"{work} ...")
        yield
        self._samples_can_start()
        self.say(_took(work, started_s))

    def say(self, line: str) -> None:
        """Print a line now, above the bars of a terminal; nothing in processes that show nothing."""
        if self._run is not None and self._watched:
            tqdm.write(line, file=self._stream)
        elif self._run is not None:
            print(line, file=self._stream, flush=True)

    def show(self, table: Callable[[], Sequence[str]]) -> None:
        """Draw lines below the bars of a terminal, again at most once a second, whenever a sample is done."""
        if self._run is None or not self._watched:
            return
        if self._table is not None:
            self._table.close()
        self._table = _Table(table, 1 if self._part.disable else 2, self._stream)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A context at whose end the samples that were done inside count: they took the time before it together."""
        self._held = 0
        try:
            yield
        finally:
            number, self._held = self._held, None
            if number:
                self.advance(number)

    def advance(self, number: int = 1) -> None:
        """So many samples are done."""
        if self._held is not None:
            self._held += number
            return
        if self._run is None:
            return
        self._has_advanced = self._part_has_advanced = True
        self._run.update(number)
        self._part.update(number)
        if self._table is not None:
            self._table.draw_if_due()


class WaitingLines:
    """Says once a minute that a sample waits, the first time after half of one, and ends the wait where the run is to
    stop.
    """

    def __init__(self, stop: StopRequest, say: Callable[[str], None]) -> None:
        self._stop, self._say, self._due_s = stop, say, float("-inf")

    def __call__(self, waited_s: float, what: str) -> None:
        """Look at a wait.

        Args:
            waited_s: so far.
            what: is waited for.

        Raises:
            Stopped: a stop was requested.
        """
        self._stop.raise_if_requested("while a sample waited")
        now_s = HostClock().now_s()
        if waited_s >= SAMPLES_INTERVAL_S and now_s >= self._due_s:
            self._due_s = now_s + UNWATCHED_INTERVAL_S
            self._say(f"a sample waits since {waited_s:.0f} s: {what}")


def _skip(bar: tqdm, samples: int) -> None:
    """Count samples as done of which the rate, and so the time left, knows nothing."""
    if bar.disable:
        return
    bar.initial += samples
    bar.n += samples
    bar.last_print_n += samples
