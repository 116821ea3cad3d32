"""Atomic file writes, safe reading of regular files, the project's own folder, and JSON from outside."""

import errno
import json
import os
import re
import resource
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, BinaryIO

from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    OutputRefused,
    ProfilerError,
    ResultsNotSaved,
    first_line,
)
from experiment_core_utils.primitives.texts import without_hidden

# File systems take names of 255 bytes, of which such a part is only one.
FILE_NAME_PART = r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}"
_FOLDER_IN_THE_WAY = "a folder has this name; move it away or give another name"
_FILE_IN_THE_WAY = "a file has the name of a folder that is needed; move it away or give another name"
_NO_PERMISSION = "give a place that you may write to"
# What to do where the place is refused; everything else (full, gone) may be mended under the same command.
_REFUSED = {
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.EROFS: _NO_PERMISSION,
    errno.EISDIR: _FOLDER_IN_THE_WAY,
    errno.ENOTDIR: _FILE_IN_THE_WAY,
    errno.EEXIST: _FILE_IN_THE_WAY,
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "give a name that is not a link to itself",
}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def allow_open_files(number: int) -> None:
    """Let this process have so many files open at once, as far as the system's hard limit allows it.

    Raises:
        ConfigurationError: the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= number:
        return
    if hard != resource.RLIM_INFINITY and hard < number:
        raise ConfigurationError(
            f"{number} files are needed at once, and this system allows {hard} (ulimit -Hn); raise that limit, or give "
            "fewer settings"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


def check_file_name_part(value: str, what: str) -> None:
    """Raises ConfigurationError for a name that could lead out of its folder or into another file."""
    if not re.fullmatch(FILE_NAME_PART, value):
        raise ConfigurationError(
            f"{what} {shortened(value)} is part of file names; use letters, digits, - and _ only, 100 at most"
        )


def shortened(value: object, most: int = 60) -> str:
    """A value as it is written in Python, cut for a message."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def open_regular_file(path: Path) -> BinaryIO:
    """A file, open to be read.

    Raises:
        OSError: the system refuses it, or it is a folder, a pipe or a device, from which reading might never end.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path.open("rb")


def read_regular_file(path: Path) -> bytes:
    """All of a file; raises what `open_regular_file` does."""
    with open_regular_file(path) as file:
        return file.read()


def check_replaceable(path: Path) -> None:
    """Check that nothing but a regular file would be written over.

    Raises:
        OutputRefused: a device, a pipe, a link or a folder has that name.
    """
    with failed_writes_named(path):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        kind = "a link" if stat.S_ISLNK(mode) else "a device or a pipe"
        raise OutputRefused(f"{path} is {kind}, and only a regular file is written over; give another name")


def check_writable(path: Path) -> None:
    """Check, before what takes long, that a file can be written there; nothing is made.

    Raises:
        OutputRefused: as `check_replaceable`, or this process may not write into its folder, or not make the folder.
    """
    check_replaceable(path)
    if not _is_writable(path.parent):
        raise OutputRefused(f"{path} cannot be written ({os.strerror(errno.EACCES)}); {_NO_PERMISSION}")


@contextmanager
def failed_writes_named(path: Path, action: str = "written") -> Iterator[None]:
    """Turns the system's refusal to write `path` into one line that says what to do.

    Args:
        action: what was refused, for the message: `path` cannot be ...

    Raises:
        OutputRefused: the place cannot be written to: no permission, a folder or a file in the way, too long a name.
        ResultsNotSaved: the disk is full, over its quota, or gone.
    """
    try:
        yield
    except OSError as error:
        message = f"{path} cannot be {action} ({error.strerror or first_line(error)})"
        if error.errno in _REFUSED:
            raise OutputRefused(f"{message}; {_REFUSED[error.errno]}") from error
        todo = "make room" if error.errno in _FULL else "see that the disk is there"
        raise ResultsNotSaved(f"{message}; {todo}, then run the same command again to resume") from error


def write_json_atomically(content: Mapping[str, Any], path: Path) -> None:
    """Write beside `path`, flush to disk, rename over it: a reader sees the old file or the new one, never a part."""
    write_text_atomically(json.dumps(content, indent=1, allow_nan=False) + "\n", path)


def write_text_atomically(text: str, path: Path) -> None:
    """Write text, without secrets, beside `path`, flush to disk, rename over it; raises what `replaced_whole` does."""
    with replaced_whole(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        file.write(without_hidden(text))


@contextmanager
def replaced_whole(path: Path, ending: str = ".tmp") -> Iterator[Path]:
    """Gives a file beside `path` to write; at the end it is flushed to disk and renamed over `path`.

    Args:
        ending: of the file beside it, for writers that go by that.

    Raises:
        OutputRefused: `path` is not a place for a file, or something else than a regular file has its name.
        ResultsNotSaved: the disk does not take it.
    """
    check_replaceable(path)
    # Always the same name: what a killed process leaves behind is removed by the one that resumes.
    temporary = path.with_name(f".{path.name}{ending}")
    with failed_writes_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # A link or a pipe of that name would lead elsewhere.
        temporary.unlink(missing_ok=True)
        try:
            yield temporary
            _flush(temporary, os.O_RDONLY)
            os.replace(temporary, path)
            # A rename may else come after what is done because of it.
            _flush(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def remove_file(path: Path) -> None:
    """Remove a file, where it is there; raises what `failed_writes_named` does."""
    with failed_writes_named(path, "removed"):
        path.unlink(missing_ok=True)


def move_file(path: Path, to: Path) -> None:
    """Give a file another name on the same disk, over what has that name; raises what `failed_writes_named` does."""
    with failed_writes_named(path, "moved"):
        os.replace(path, to)


def remove_leftovers(folder: Path) -> None:
    """Remove what writers that were killed left beside their files, which may never be written again.

    Raises what `failed_writes_named` does.
    """
    for kind in ("json", "csv", "parquet"):
        for path in folder.glob(f".*.{kind}.tmp"):
            remove_file(path)


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The folder that contains the packages: a checkout, or site-packages, where nothing is ever written.
REPOSITORY = Path(__file__).resolve().parents[2]
IS_CHECKOUT = (REPOSITORY / "pyproject.toml").is_file()
# setup.py puts it into a package.
_MODELS = REPOSITORY if IS_CHECKOUT else REPOSITORY / "experiment_core_utils"
EMBEDDED_MODEL = _MODELS / "checkpoints" / "molmoe_tiny"
TRACKERS = REPOSITORY / "persistent_progress_trackers"


def state_folder(results_dir: Path, trackers: Path = TRACKERS, *, in_checkout: bool = IS_CHECKOUT) -> Path:
    """Where the counter of runs is kept.

    In the checkout, where there is one that can be written to, else in the user's state folder (`$XDG_STATE_HOME`, else
    `~/.local/state`), else with the results.
    """
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    home = Path(os.environ.get("HOME", ""))
    users = given if given.is_absolute() else home / ".local" / "state"
    own = users / "inference_knob_profiler" / trackers.name
    candidates = [*([trackers] if in_checkout else []), *([own] if own.is_absolute() else [])]
    return next((each for each in candidates if _is_writable(each)), results_dir / f".{trackers.name}")


def _is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder that is there, or can be made."""
    there = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    return os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)


def refuse_unreadable(path: Path, named: str = "", hint: str = "") -> None:
    """Raises ConfigurationError unless `path` is a regular file that this process may read; it is not opened.

    Opening a named pipe would wait for a writer for ever.

    Args:
        named: the words before the path in the message, such as a flag.
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


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file, which contains a whole model; it need not exist."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def read_given(path: Path, named: str = "", hint: str = "") -> bytes:
    """All of a file that a user names; arguments and errors as of `refuse_unreadable`."""
    refuse_unreadable(path, named, hint)
    try:
        return path.read_bytes()
    except OSError as error:
        end = f"; {hint}" if hint else ""
        raise ConfigurationError(f"{f'{named} {path}'.lstrip()}: {_reason(error)}{end}") from error


def run_python_file(path: Path, flag: str) -> None:
    """Run a Python file that a user gives by a flag; raises ConfigurationError where it cannot be run."""
    refuse_unreadable(path, flag)
    spec = spec_from_file_location(f"{flag.removeprefix('--')}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{flag} {path} is not a Python file; give one that ends in .py")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    except ProfilerError as error:
        raise ConfigurationError(f"{flag} {path}: {error}") from error
    except (Exception, SystemExit) as error:  # whatever the code of a user raises
        raise ConfigurationError(
            f"{flag} {path} cannot be run ({type(error).__name__}: {first_line(error)}); correct it"
        ) from error


def read_json(path: Path, named: str = "", hint: str = "") -> Any:
    """The content of a JSON file; arguments as of `refuse_unreadable`.

    Raises:
        ConfigurationError: not a regular file, not readable, not UTF-8, not JSON, or nested too deeply.
    """
    return parse_json(read_given(path, named, hint), f"{named} {path}".lstrip(), hint)


def parse_json(text: str | bytes, what: str, hint: str = "") -> Any:
    """The content of a JSON text in UTF-8; raises ConfigurationError where it is none or nested too deeply.

    Args:
        what: names the text in the message.
    """
    end = f"; {hint}" if hint else ""
    try:
        return json.loads(text if isinstance(text, str) else text.decode())
    except (RecursionError, MemoryError) as error:
        raise ConfigurationError(f"{what} is nested too deeply or too large to be read{end}") from error
    except ValueError as error:
        raise ConfigurationError(f"{what} is not JSON ({first_line(error)}){end}") from error


def _reason(error: OSError | ValueError) -> str:
    return str(getattr(error, "strerror", None) or first_line(error))
