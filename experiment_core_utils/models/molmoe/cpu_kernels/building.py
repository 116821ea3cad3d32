"""In: a C++ source of this folder and its constants; out: its functions, compiled here.

The compiler runs for about a second for each of them; what it made is kept for later processes.
"""

import ctypes
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from experiment_core_utils.models.molmoe.cpu_kernels.kept_libraries import keep, kept_file, verified_content
from experiment_core_utils.primitives.errors import ConfigurationError, first_line

LOGGER = logging.getLogger(__name__)
FOLDER = Path(__file__).parent
COMPILERS = ("g++", "c++", "clang++")
# OpenMP is not linked: its functions are found in the library that torch has loaded, and so are its threads.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wno-psabi")
LLVM_OPENMP = "__kmpc_fork_call"
EXPORTED = re.compile(r'extern "C" \w+ (\w+)\(')
MOST_S = 60.0  # that a run of the compiler may take


def built(source: str, **constants: int) -> ctypes.CDLL:
    """The library of a source, its constants defined; as it was compiled before, where it was.

    It has every function that the source exports. What was kept is loaded only where nobody but this user can have
    written it; else it is compiled in a private folder, and a warning gives the reason.

    Raises:
        ConfigurationError: there is no compiler or no temporary folder, the compiler refuses or takes too long, or what
            it made cannot be loaded.
    """
    compiler, options = found_compiler(), [*FLAGS, *(f"-D{name}={value}" for name, value in constants.items())]
    try:
        kept = kept_file([*compiler, *options, source], [*sorted(FOLDER.glob("*.cpp")), *sorted(FOLDER.glob("*.h"))])
    except ConfigurationError:
        # A user without a folder of his own.
        return _compile_library(compiler, options, source, None)
    try:
        content = verified_content(kept)
    except ConfigurationError as error:
        _warn_once(str(error))
        return _compile_library(compiler, options, source, None)
    if content is not None:
        # Of a system that is no longer this one it may not load; then it is made again.
        with suppress(ConfigurationError), _private_folder(source) as folder:
            library = folder / kept.name
            library.write_bytes(content)
            return _loaded(library, source)
    return _compile_library(compiler, options, source, kept)


@cache
def _warn_once(reason: str) -> None:
    LOGGER.warning("compiled CPU kernels are neither loaded from the cache nor kept there: %s", reason)


def _compile_library(compiler: Sequence[str], options: Sequence[str], source: str, kept: Path | None) -> ctypes.CDLL:
    """A new library, and a copy of it at `kept` where that can be."""
    refuse_other_openmp(compiler)
    with _private_folder(source) as folder:
        code, library = folder / "code.o", folder / "library.so"
        _run([*compiler, *options, "-c", str(FOLDER / source), "-o", str(code)], source)
        _run([*compiler, "-shared", str(code), "-o", str(library)], source)
        loaded = _loaded(library, source)
        if kept is not None:
            with suppress(ConfigurationError):
                # Then the next process compiles it, too.
                keep(library, kept)
        return loaded


@contextmanager
def _private_folder(source: str) -> Iterator[Path]:
    """A temporary folder that no other user can enter."""
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    except OSError as error:
        raise ConfigurationError(f"{source} has no temporary folder to be compiled in: {first_line(error)}") from None


def found_compiler() -> list[str]:
    """The words that run it: those of CXX, which may name a launcher and flags, or the first compiler that is here.

    Raises:
        ConfigurationError: CXX cannot be read, or there is no such program.
    """
    asked = os.environ.get("CXX", "")
    try:
        words = shlex.split(asked)
    except ValueError as error:
        raise ConfigurationError(f"CXX={asked} cannot be read as a command: {first_line(error)}") from None
    found = shutil.which(words[0]) if words else next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None and words:
        raise ConfigurationError(f"CXX={asked} names no program that can be run: {words[0]} is not found")
    if found is None:
        raise ConfigurationError(f"there is no C++ compiler; install one of {', '.join(COMPILERS)}, or set CXX")
    return [found, *words[1:]]


def refuse_other_openmp(compiler: Sequence[str]) -> None:
    """Raises ConfigurationError for a clang whose OpenMP is not the one that torch has loaded.

    A second OpenMP would bring threads of its own beside torch's, and both wait by spinning.
    """
    macros = _run([*compiler, "-dM", "-E", "-x", "c++", os.devnull], "an empty file")
    if "__clang__" in macros and not hasattr(ctypes.CDLL(None), LLVM_OPENMP):
        raise ConfigurationError(
            f"{shlex.join(compiler)} is clang, whose code needs LLVM's OpenMP, but torch has loaded another one; "
            "install g++, or set CXX to it"
        )


def _loaded(library: Path, source: str) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise ConfigurationError(f"what was made of {source} cannot be loaded: {first_line(error)}") from None
    missing = [name for name in EXPORTED.findall((FOLDER / source).read_text()) if not hasattr(loaded, name)]
    if missing:
        raise ConfigurationError(f"what was made of {source} lacks {', '.join(missing)}; check the compiler and CXX")
    return loaded


def _run(command: list[str], source: str) -> str:
    """What the compiler printed; raises ConfigurationError with its first error."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=MOST_S).stdout
    except OSError as error:
        raise ConfigurationError(f"the C++ compiler cannot be run: {first_line(error)}") from None
    except subprocess.TimeoutExpired:
        raise ConfigurationError(f"the C++ compiler takes more than {MOST_S:g} s for {source}") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.splitlines() or [f"exit code {error.returncode}"]
        message = next((line for line in lines if "error:" in line), lines[0])
        raise ConfigurationError(f"the C++ compiler refuses {source}: {message}") from None
