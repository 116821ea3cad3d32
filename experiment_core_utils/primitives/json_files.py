"""JSON that someone gave: read from regular files only, and every way to be malformed ends in one line."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from experiment_core_utils.primitives.errors import ConfigurationError, first_line


def refuse_unreadable(path: Path, named: str = "", hint: str = "") -> None:
    """Raises ConfigurationError unless `path` is a regular file that this process may read; it is not opened.

    Opening a named pipe would wait for a writer for ever.

    Args:
        named: what stands before the path in the message, such as a flag.
        hint: what to do, the end of the message.
    """
    what = f"{named} {path}".lstrip()
    end = f"; {hint}" if hint else ""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{what}: {_reason(error)}{end}") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise ConfigurationError(f"{what} is {kind}, not a regular file{end}")
    if not os.access(path, os.R_OK):
        raise ConfigurationError(f"{what}: this process may not read it; change its permissions{end}")


def read_json(path: Path, named: str = "", hint: str = "") -> Any:
    """The content of a JSON file; arguments as of `refuse_unreadable`.

    Raises:
        ConfigurationError: not a regular file, not readable, not UTF-8, not JSON, or nested too deeply.
    """
    refuse_unreadable(path, named, hint)
    what = f"{named} {path}".lstrip()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{what}: {_reason(error)}{'; ' + hint if hint else ''}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{what} is not JSON ({error}){'; ' + hint if hint else ''}") from error
    return parse_json(text, what, hint)


def parse_json(text: str, what: str, hint: str = "") -> Any:
    """The content of a JSON text; raises ConfigurationError where it is none or nested too deeply.

    Args:
        what: names the text in the message.
    """
    end = f"; {hint}" if hint else ""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ConfigurationError(f"{what} is nested too deeply to be read{end}") from error
    except ValueError as error:
        raise ConfigurationError(f"{what} is not JSON ({first_line(error)}){end}") from error


def _reason(error: OSError | ValueError) -> str:
    return str(getattr(error, "strerror", None) or first_line(error))
