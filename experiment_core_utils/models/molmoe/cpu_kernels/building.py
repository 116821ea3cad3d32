"""In: a C++ source of this folder and its constants; out: its functions, compiled here.

The compiler runs for about a second for each of them; what it made is kept for later processes.
"""

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from experiment_core_utils.models.molmoe.cpu_kernels.kept_libraries import is_whole, keep, kept_file
from experiment_core_utils.primitives.errors import ConfigurationError, first_line

FOLDER = Path(__file__).parent
COMPILERS = ("g++", "c++", "clang++")
# OpenMP is not linked: its functions are found in the library that torch has loaded, and so are its threads.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wno-psabi")
MOST_S = 60.0  # that a run of the compiler may take


def built(source: str, **constants: int) -> ctypes.CDLL:
    """The library of a source, its constants defined; as it was compiled before, where it was.

    Raises:
        ConfigurationError: there is no compiler or no temporary folder, the compiler refuses or takes too long, or what
            it made cannot be loaded.
    """
    compiler, options = _compiler(), [*FLAGS, *(f"-D{name}={value}" for name, value in constants.items())]
    try:
        kept = kept_file([*compiler, *options, source], [*sorted(FOLDER.glob("*.cpp")), *sorted(FOLDER.glob("*.h"))])
    except ConfigurationError:
        # A user without a folder of his own.
        return _compiled(compiler, options, source, None)
    if is_whole(kept):
        # Of a system that is no longer this one it may not load; then it is made again.
        with suppress(ConfigurationError):
            return _loaded(kept, source)
    return _compiled(compiler, options, source, kept)


def _compiled(compiler: Sequence[str], options: Sequence[str], source: str, kept: Path | None) -> ctypes.CDLL:
    """A new library, and a copy of it at `kept` where that can be."""
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            code, library = Path(folder, "code.o"), Path(folder, "library.so")
            _run([*compiler, *options, "-c", str(FOLDER / source), "-o", str(code)], source)
            _run([*compiler, "-shared", str(code), "-o", str(library)], source)
            loaded = _loaded(library, source)
            if kept is not None:
                with suppress(ConfigurationError):
                    # Then the next process compiles it, too.
                    keep(library, kept)
            return loaded
    except OSError as error:
        raise ConfigurationError(f"{source} has no temporary folder to be compiled in: {first_line(error)}") from None


def _compiler() -> list[str]:
    """The words that run it: those of CXX, which may name a launcher and flags, or the first compiler that is here."""
    asked = os.environ.get("CXX", "")
    try:
        words = shlex.split(asked)
    except ValueError as error:
        raise ConfigurationError(f"CXX={asked} cannot be read as a command: {first_line(error)}") from None
    found = shutil.which(words[0]) if words else next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        raise ConfigurationError(f"there is no C++ compiler ({asked if words else ', '.join(COMPILERS)})")
    return [found, *words[1:]]


def _loaded(library: Path, source: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise ConfigurationError(f"what was made of {source} cannot be loaded: {first_line(error)}") from None


def _run(command: list[str], source: str) -> None:
    """Raises ConfigurationError with what the compiler said first."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=MOST_S)
    except OSError as error:
        raise ConfigurationError(f"the C++ compiler cannot be run: {first_line(error)}") from None
    except subprocess.TimeoutExpired:
        raise ConfigurationError(f"the C++ compiler takes more than {MOST_S:g} s for {source}") from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr.splitlines() or ["nothing"])[0]
        raise ConfigurationError(f"the C++ compiler refuses {source}: {said}") from None
