"""Functions that all commands share: one-line errors, exit codes, closed streams, late imports."""

import gc
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, TextIO

from experiment_core_utils.primitives.errors import (
    HOST_FULL,
    NO_MEMORY_LEFT,
    ConfigurationError,
    ProfilerError,
    Stopped,
    UnforeseenError,
    described,
    first_line,
    raise_if_device_is_lost,
    traceback_of,
)
from experiment_core_utils.primitives.texts import printable, without_hidden

# Variable that names a file to which a command adds the class of its error, for a runner of several commands: there are
# few exit codes, and launchers change them.
ERRORS_FILE = "KNOB_PROFILER_ERRORS_FILE"
# What the system's loader says where a library does not fit into the memory that the process may have.
_NO_ROOM = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory")


class _MayClose(io.FileIO):
    """A descriptor of which a refused write is dropped with all that follow."""

    #: the system's reason where that is not a reader that went away; None where nothing was lost that anybody reads
    refused: OSError | None = None

    def write(self, data: Any) -> int:
        """Write like any file does, but drop what is refused."""
        try:
            written = super().write(data)
        except OSError as error:
            self.refused = None if isinstance(error, BrokenPipeError) else error
            # What libraries and processes started from here write is dropped, too.
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self.fileno())
            written = memoryview(data).nbytes
        return written or 0


class _Printable(io.TextIOWrapper):
    """A stream to a terminal in which control characters of what is printed, names and texts of files, are escapes."""

    def write(self, text: str, /) -> int:
        """Write as any stream does; new lines, tabs, and what a progress bar goes back by stay."""
        super().write(printable(text, is_stream=True))
        return len(text)


def run_command(main: Callable[[], int | None]) -> int:
    """Run a command's `main` and return its exit code, 1 in place of 0 where standard output took not all of it.

    Errors are reported as `reporting_errors` does. A reader that goes away (`| head -1`) changes nothing: what is to be
    saved is saved. Output that cannot be written for another reason is one line on standard error.
    """
    output = _guarded("stdout")
    _guarded("stderr")
    code = reporting_errors(main)()
    if sys.stdout is not None:
        sys.stdout.flush()
    if output is not None and output.refused is not None:
        print(f"error: standard output cannot be written: {first_line(output.refused)}", file=sys.stderr)
        return code or 1
    return code


def reporting_errors(main: Callable[..., int | None]) -> Callable[..., int]:
    """A command's `main` that ends in one line on standard error and an exit code, whatever it raises.

    Of a launcher's processes, which all are stopped, the first one says so. The traceback of an error that is none of
    the project's is in a file that the line names; the exit code is 1 then.
    """

    @wraps(main)
    def reported(*arguments: Any) -> int:
        try:
            return main(*arguments) or 0
        except Stopped as stopped:
            _say_of_all(str(stopped))
            return stopped.exit_code
        except UnforeseenError as error:
            line = str(error) if error.__cause__ is None else _unforeseen(error.__cause__)
            print(f"error: {line}", file=sys.stderr)
            return error.exit_code
        except ProfilerError as error:
            print(f"error: {printable(str(error))}", file=sys.stderr)
            _note(type(error).__name__)
            return error.exit_code
        except KeyboardInterrupt:
            _say_of_all("stopped; what is finished is saved: run the same command again to resume")
            return 130
        except Exception as error:
            print(f"error: {_unforeseen(error)}", file=sys.stderr)
            return 1

    return reported


def _note(kind: str) -> None:
    """Name the kind of an error to who asks for it by ERRORS_FILE."""
    if name := os.environ.get(ERRORS_FILE):
        with suppress(OSError), open(name, "a", encoding="utf-8") as file:
            file.write(f"{kind}\n")


def _unforeseen(error: BaseException) -> str:
    """The line of an error that is none of the project's; its traceback is saved."""
    try:
        raise_if_device_is_lost(error)
    except ProfilerError as lost:
        return str(lost)
    line = described(error)
    if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY_LEFT):
        return f"{line}: {HOST_FULL}; what is finished is saved"
    _note("UnforeseenError")
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="knobprof-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(without_hidden(traceback_of(error)))
    except (OSError, MemoryError) as refused:
        reason = getattr(refused, "strerror", None) or first_line(refused)
        return f"{line} (its traceback cannot be saved: {reason})"
    return f"{line} (unforeseen; its traceback is in {file.name}: please report it)"


def _say_of_all(line: str) -> None:
    # As torchrun and accelerate number their processes.
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


def _guarded(name: str) -> _MayClose | None:
    """Put a stream that may close in the place of `sys.stdout` or `sys.stderr`; None where the program has none.

    A letter that the terminal's encoding lacks (a dash under `LC_ALL=POSIX`, a name that is not UTF-8) becomes an
    escape.
    """
    stream: TextIO | None = getattr(sys, name)
    if not isinstance(stream, io.TextIOWrapper):
        return None
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        # A stream in memory has no reader that goes away.
        stream.reconfigure(errors="backslashreplace")
        return None
    stream.flush()
    raw = _MayClose(descriptor, "w", closefd=False)
    made = _Printable(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering or name == "stderr",
        write_through=stream.write_through,
    )
    setattr(sys, name, made)
    return raw


@contextmanager
def libraries_loading() -> Iterator[None]:
    """Context of a command's late imports: raises ConfigurationError where memory is too little for them.

    Meanwhile garbage is not looked for, which would take a tenth of the time.
    """
    gc.disable()
    try:
        yield
    except (ImportError, OSError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in _NO_ROOM):
            raise
        raise ConfigurationError(
            f"this process may not have the memory that torch and transformers need ({first_line(error)}); raise its "
            "limit (ulimit -v unlimited)"
        ) from error
    finally:
        gc.enable()
