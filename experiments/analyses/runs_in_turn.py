"""Two sides of a comparison, measured in turn by fresh processes of the profiling command: AB, BA, AB, ...

What the machine does meanwhile is common to the two of a pair, and neither side is always the first one. Imports no
torch.
"""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.primitives.errors import (
    EXIT_CODE_FAILED_SAMPLES,
    EXIT_CODE_INVALID,
    ConfigurationError,
    ResultsError,
    Stopped,
)
from experiment_core_utils.primitives.files import REPOSITORY
from experiments.core_exp.multi_datasets import DRIVER

# What a process gets to save what it has measured when all is stopped.
STOP_S = 10.0


@dataclass(frozen=True)
class Side:
    """How a side's process is started."""

    label: str
    python: str
    driver: Path
    words: tuple[str, ...]  #: flags of its own

    @classmethod
    def of(cls, flags: str, checkout: Path | None, python: str | None) -> Self:
        """A side from the flags of its own as one text, and its checkout and interpreter; None for these here.

        Raises:
            ConfigurationError: no driver in the checkout, quotes in the flags that do not close.
        """
        driver = DRIVER if checkout is None else checkout.resolve() / DRIVER.relative_to(REPOSITORY)
        if not driver.is_file():
            raise ConfigurationError(f"--checkout {checkout} lacks {DRIVER.relative_to(REPOSITORY)}; give a checkout")
        try:
            words = shlex.split(flags)
        except ValueError as error:
            raise ConfigurationError(f"{flags.strip()!r} cannot be read: {error}; close its quotes") from error
        named = (" ".join(words), "" if checkout is None else str(checkout), python or "")
        label = ", ".join(each for each in named if each) or "no flags of its own"
        return cls(label, python or sys.executable, driver, tuple(words))

    def command(self, shared: Sequence[str], results: Path) -> list[str]:
        """The command line of a process that measures into a folder."""
        return [self.python, str(self.driver), *self.words, *shared, "--output_dir", str(results)]

    def check(self, shared: Sequence[str]) -> None:
        """Raises ConfigurationError for an output folder among the flags and, in this checkout, for a wrong one."""
        words = [*self.words, *shared]
        if any(word.partition("=")[0] == "--output_dir" for word in words):
            raise ConfigurationError("--output_dir is no flag of a side; give it once, before --, for the runs of both")
        if (self.python, self.driver) == (sys.executable, DRIVER):
            parse_config(words)


def run_in_turn(sides: Sequence[Side], shared: Sequence[str], repeats: int, folder: Path) -> list[Path]:
    """Measure; returns the folder of each side, `a` and `b`, with a sub-folder for each of its processes, from `1` on.

    Args:
        shared: flags of the profiling command for both.

    Raises:
        ConfigurationError: there are such folders already, or a flag is wrong, as far as this checkout can say.
        ResultsError: a process failed, with the last line that it wrote to standard error.
        Stopped: a stop was requested; no process is left.
    """
    for side in sides:
        side.check(shared)
    found = [folder / name for name in ("a", "b")]
    if any(each.exists() for each in found):
        raise ConfigurationError(f"{folder} contains runs of a comparison already; give a new --output_dir")
    for each in found:
        each.mkdir(parents=True)
    done, total = 0, repeats * len(sides)
    with (
        _handled(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP),
        tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as scratch,
    ):
        try:
            for repeat in range(repeats):
                for number in (0, 1) if repeat % 2 == 0 else (1, 0):
                    name, started = "AB"[number], time.monotonic()
                    results = Path(scratch) / "results"
                    results.mkdir()
                    print(f"{done + 1}/{total} {name} ({sides[number].label}) ...", file=sys.stderr, flush=True)
                    _run(sides[number].command(shared, results), f"{name} ({sides[number].label})")
                    # A process that ended early leaves nothing that could be taken for a run.
                    results.rename(found[number] / str(repeat + 1))
                    done += 1
                    print(f"{done}/{total} {name} {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            reads = f"; knobprof compare {found[0]} {found[1]} reads these" if done > 1 else ""
            raise Stopped(f"stopped after {done} of {total} processes{reads}") from None
    return found


def _run(command: Sequence[str], name: str) -> None:
    """Run a process to its end, and end all that it started, whatever happens."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        # In a session of its own, so that Ctrl-C reaches it through here, and once.
        child = None
        try:
            with _interrupts_afterwards():
                child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
                )
            code = child.wait()
        finally:
            if child is not None:
                _end(child)
        errors.seek(0)
        lines = [line for line in errors.read().splitlines() if line.strip()]
    if code not in (0, EXIT_CODE_FAILED_SAMPLES, EXIT_CODE_INVALID):
        raise ResultsError(f"{name} failed with exit code {code}: {lines[-1] if lines else 'it said nothing'}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a process and those of its session: by a signal to stop, which it has time for, then at once."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            child.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@contextmanager
def _handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """A context in which these signals are handled so."""
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, former in zip(numbers, before, strict=True):
            signal.signal(number, former)


@contextmanager
def _interrupts_afterwards() -> Iterator[None]:
    """A context that no Ctrl-C breaks off: it raises KeyboardInterrupt at its end instead.

    A process that was started while its `Popen` was broken off would run on, known to nobody.
    """
    received: list[int] = []
    with _handled(lambda number, frame: received.append(number), signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield
    if received:
        raise KeyboardInterrupt
