"""One-line errors for what transformers and the libraries below it raise on files and names they cannot use."""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from transformers.utils import logging as transformers_logging

from experiment_core_utils.primitives.device import out_of_memory_named
from experiment_core_utils.primitives.errors import NO_MEMORY_LEFT, ConfigurationError, OutOfMemory, ProfilerError

_LONGEST = 400
# The packages of the extra `vision`, which some models of transformers need.
_OF_VISION = ("torchvision", "timm")
# What code of an architecture raises where it cannot be built or run in some way.
HF_CODE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@contextmanager
def vendor_errors_named(what: str, hint: str = "") -> Iterator[None]:
    """A context in which every error of a vendor's code becomes one ConfigurationError, lack of memory `OutOfMemory`.

    Malformed files make these libraries raise errors of nearly every class (tokenizers a bare Exception, configs
    AssertionError or ZeroDivisionError), so that no list of them is whole. What they log meanwhile is passed on where
    they come to an end, and left out where an error says it in one line.

    Args:
        what: says what cannot be done, the beginning of the message.
        hint: the end of the message.

    Raises:
        ConfigurationError, OutOfMemory: see above; errors of the project itself pass.
    """
    with _no_progress_bar_without_a_terminal(), _logged() as logged:
        try:
            with out_of_memory_named():
                yield
        except ProfilerError:
            logged.clear()
            raise
        except Exception as error:
            # Of some errors transformers logs the cause, and raises another one.
            reports = "\n".join(record.getMessage() for record in logged)
            logged.clear()
            if any(words in reports for words in (*NO_MEMORY_LEFT, "MemoryError")):
                raise OutOfMemory(f"{what}: this process has no memory left for it") from error
            advice = _missing_extra(error)
            line = vendor_line(error).rstrip("." if advice else "")
            raise ConfigurationError(f"{what}: {line}{advice}{hint}") from error


def _missing_extra(error: BaseException) -> str:
    """What to install, where an error names a package of the extra `vision` that is not installed."""
    words = set(re.findall(r"\w+", str(error).lower()))
    missing = [name for name in _OF_VISION if name in words and find_spec(name) is None]
    if not missing:
        return ""
    return f"; run: pip install {' '.join(missing)} (or install this package with its extra [vision])"


def vendor_line(error: BaseException) -> str:
    """The first line of an error's message, with the next line where it ends in a colon."""
    line = ""
    for part in (part.strip() for part in str(error).splitlines()):
        line = f"{line} {part}".strip()
        if line and not line.endswith(":"):
            break
    if isinstance(error, KeyError | IndexError | AssertionError) or not line:
        line = f"{type(error).__name__} {line}".strip()
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


@contextmanager
def _logged() -> Iterator[list[logging.LogRecord]]:
    """A context that delays what transformers logs; whatever is in the list at the end is logged then."""
    logger = transformers_logging.get_logger("transformers")
    records: list[logging.LogRecord] = []
    handlers, propagates = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [_RecordKeeper(records)], False
    try:
        yield records
    finally:
        logger.handlers, logger.propagate = handlers, propagates
        for record in records:
            logger.handle(record)


class _RecordKeeper(logging.Handler):
    def __init__(self, kept: list[logging.LogRecord]) -> None:
        super().__init__()
        self._records = kept

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)


@contextmanager
def _no_progress_bar_without_a_terminal() -> Iterator[None]:
    """A context without progress bars unless there is a terminal: in a file a bar is useless, and on a full disk its
    error would look like one of the weights.
    """
    was_enabled = transformers_logging.is_progress_bar_enabled()
    if not _is_terminal():
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _is_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:
        return False
