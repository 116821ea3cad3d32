"""Compilation of the C++ sources of this folder, the cache of the libraries, and loading of their functions.

Compiling a source takes about a second; the library is kept for later processes.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import secrets
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from experiment_core_utils.primitives.errors import ConfigurationError, first_line

CPU_FACTS = Path("/proc/cpuinfo")
# What `-march=native` looks at, by the names of x86 and of Arm.
FACTS = ("model name", "flags", "CPU part", "Features")
SEAL_BYTES = hashlib.sha256().digest_size
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cached_file(command: Sequence[str], sources: Iterable[Path]) -> Path:
    """The file of the library that this command makes of these sources on a processor like this one.

    A file in the user's cache folder (`$XDG_CACHE_HOME`, else `~/.cache`). Its name is a digest of the command's words,
    of the programs among them as they are installed, of the sources' text and of the processor.

    Raises:
        ConfigurationError: the user has no such folder.
    """
    parts = [*command, *map(_installed, command), *(path.read_text() for path in sources), _processor()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return _compilers_folder("cpu_kernels") / f"{digest[:32]}.so"


def private_folder(name: str) -> Path:
    """The folder of this name beside that of the libraries, made where there is none.

    Raises:
        ConfigurationError: it cannot be made, or is not this user's alone.
    """
    folder = _compilers_folder(name)
    try:
        _make_folders(folder)
        with _own_folder(folder):
            return folder
    except OSError as error:
        raise ConfigurationError(f"{folder} does not keep compiled kernels: {first_line(error)}") from None


def store(library: Path, cached: Path) -> None:
    """Put the library there whole, whichever other process does the same at that time; see `verified_content`.

    Raises:
        ConfigurationError: the folder cannot be written to, or is not this user's alone.
    """
    content = library.read_bytes()
    try:
        _make_folders(cached.parent)
        with _own_folder(cached.parent) as folder:
            unfinished = f"{cached.name}.{secrets.token_hex(8)}"
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
            try:
                with open(descriptor, "wb") as file:
                    file.write(content + _seal(content))
                os.replace(unfinished, cached.name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                os.unlink(unfinished, dir_fd=folder)
                raise
    except OSError as error:
        raise ConfigurationError(f"{cached.parent} does not keep compiled kernels: {first_line(error)}") from None


def verified_content(cached: Path) -> bytes | None:
    """The library as `store` left it; None where there is none, or a truncated one, which would end the process.

    The last bytes of the file are a digest of all before them. The digest proves that the file is whole, not who wrote
    it: a library runs as soon as it is loaded, so that the owner and the mode of the folder and of the file are read
    from what is open, and the caller loads these bytes and not the file, which may be another one by then.

    Raises:
        ConfigurationError: the folder or the file belongs to another user, or others may write to it.
    """
    try:
        with _own_folder(cached.parent) as folder:
            # A pipe would wait for a writer.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            with open(os.open(cached.name, flags, dir_fd=folder), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return None
                _refuse_others(file.fileno(), cached)
                content = file.read()
    except OSError:
        return None
    library, seal = content[:-SEAL_BYTES], content[-SEAL_BYTES:]
    return library if seal == _seal(library) else None


@contextmanager
def _own_folder(folder: Path) -> Iterator[int]:
    """The descriptor of a folder that is this user's alone.

    Raises:
        ConfigurationError: it belongs to another user, or others may write to it.
        OSError: it cannot be opened, or is a link.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _refuse_others(descriptor, folder)
        yield descriptor
    finally:
        os.close(descriptor)


def _refuse_others(descriptor: int, path: Path) -> None:
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        raise ConfigurationError(
            f"{path} belongs to user {found.st_uid}, not to this user ({os.geteuid()}); remove it, or set "
            "XDG_CACHE_HOME to a folder of your own"
        )
    if found.st_mode & WRITABLE_BY_OTHERS:
        raise ConfigurationError(f"other users may write to {path}; run: chmod go-w {shlex.quote(str(path))}")


def _seal(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _make_folders(folder: Path) -> None:
    # The mode that is given to `mkdir` is of the last folder alone: each is this user's, whatever the umask.
    for above in (*reversed(folder.parents[:2]), folder):
        if not above.exists():
            above.mkdir(parents=True, exist_ok=True, mode=0o700)


def _compilers_folder(name: str) -> Path:
    return _cache_folder() / "inference_knob_profiler" / name


def _cache_folder() -> Path:
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        return named
    try:
        return Path.home() / ".cache"
    except RuntimeError as error:
        raise ConfigurationError(f"there is no folder to keep compiled kernels in: {first_line(error)}") from None


def _installed(word: str) -> str:
    """The file that a word of a command runs, with its size and time; nothing for a word that is not a program."""
    found = shutil.which(word)
    if found is None:
        return ""
    file = Path(found).resolve()
    return f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}"


def _processor() -> str:
    if not CPU_FACTS.is_file():
        return f"{platform.machine()} {platform.processor()}"
    facts = dict(
        line.split(":", 1) for line in reversed(CPU_FACTS.read_text().splitlines()) if line.partition(":")[1] == ":"
    )
    named = {name.strip(): value.strip() for name, value in facts.items()}
    return " ".join([platform.machine(), *(named.get(name, "") for name in FACTS)])


LOGGER = logging.getLogger(__name__)
FOLDER = Path(__file__).parent / "csrc"
COMPILERS = ("g++", "c++", "clang++")
# OpenMP is not linked: its functions are found in the library that torch has loaded, and so are its threads.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wno-psabi")
LLVM_OPENMP = "__kmpc_fork_call"
EXPORTED = re.compile(r'extern "C" \w+ (\w+)\(')
# The C types of the kernels' arguments.
POINTER, INT64, FLOAT, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
MOST_S = 60.0  # that a run of the compiler may take
SAYS_AFTER_S = 15.0  # that a run of the compiler is waited for


def built(source: str, **constants: int) -> ctypes.CDLL:
    """The library of a source with its constants defined; compiled now unless it was compiled before.

    It has every function that the source exports. What was kept is loaded only where no other user can have
    written it; else it is compiled in a private folder, and a warning gives the reason.

    Raises:
        ConfigurationError: there is no compiler or no temporary folder, the compiler refuses or takes too long, or what
            it made cannot be loaded.
    """
    compiler, options = found_compiler(), [*FLAGS, *(f"-D{name}={value}" for name, value in constants.items())]
    try:
        cached = cached_file(
            [*compiler, *options, source], [*sorted(FOLDER.glob("*.cpp")), *sorted(FOLDER.glob("*.h"))]
        )
    except ConfigurationError:
        # A user without a folder of his own.
        return _compile_library(compiler, options, source, None)
    try:
        content = verified_content(cached)
    except ConfigurationError as error:
        _warn_once(str(error))
        return _compile_library(compiler, options, source, None)
    if content is not None:
        # Of a system that is no longer this one it may not load; then it is made again.
        with suppress(ConfigurationError), _private_folder(source) as folder:
            library = folder / cached.name
            library.write_bytes(content)
            return _loaded(library, source)
    return _compile_library(compiler, options, source, cached)


def declared(library: Any, **arguments: Sequence[Any]) -> Any:
    """The library, its functions with the C types of their arguments; none of them returns anything."""
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes, function.restype = list(types), None
    return library


def fields(kind: Any, *names: str) -> tuple[tuple[str, Any], ...]:
    """Members of a C struct, all of one type."""
    return tuple((name, kind) for name in names)


def pointers(*tensors: torch.Tensor | None) -> list[int | None]:
    """For a call, null for None; valid as long as the tensors live."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


class HeadNorm(ctypes.Structure):
    """The struct of rows.h."""

    _fields_ = (*fields(POINTER, "weights"), *fields(INT64, "width"))

    @classmethod
    def of(cls, weights: torch.Tensor | None) -> "HeadNorm":
        """For a call; valid as long as the weights live."""
        return cls(None, 0) if weights is None else cls(weights.data_ptr(), len(weights))


def refuse_others(name: str, given: torch.Tensor, *size: int) -> None:
    """Raises ValueError for what a kernel would read wrongly."""
    if given.shape != size or given.dtype != torch.float32 or not given.is_contiguous():
        raise ValueError(f"{name} have to be contiguous float32 {list(size)}, not {given.dtype} {list(given.shape)}")


@cache
def _warn_once(reason: str) -> None:
    LOGGER.warning("compiled CPU kernels are neither loaded from the cache nor kept there: %s", reason)


def _compile_library(compiler: Sequence[str], options: Sequence[str], source: str, cached: Path | None) -> ctypes.CDLL:
    """A newly compiled library, and a copy of it at `cached` where that is possible."""
    refuse_other_openmp(compiler)
    with _private_folder(source) as folder:
        code, library = folder / "code.o", folder / "library.so"
        _run([*compiler, *options, "-c", str(FOLDER / source), "-o", str(code)], source)
        _run([*compiler, "-shared", str(code), "-o", str(library)], source)
        loaded = _loaded(library, source)
        if cached is not None:
            with suppress(ConfigurationError):
                # Then the next process compiles it, too.
                store(library, cached)
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
    """The words that run the compiler: those of CXX, which may name a launcher and flags, or the first compiler found.

    Raises:
        ConfigurationError: CXX cannot be read, or there is no such program.
    """
    command = os.environ.get("CXX", "")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigurationError(f"CXX={command} cannot be read as a command: {first_line(error)}") from None
    found = shutil.which(words[0]) if words else next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None and words:
        raise ConfigurationError(f"CXX={command} names no program that can be run: {words[0]} is not found")
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
    """The output of the compiler; raises ConfigurationError with its first error."""
    what = f"the C++ compiler ({shlex.join(command[:1])}) for {source}"
    # On time it says nothing; where it hangs, a reader knows what is waited for.
    notice = threading.Timer(SAYS_AFTER_S, LOGGER.warning, ("waiting for %s, at most %g s", what, MOST_S))
    notice.daemon = True
    notice.start()
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
    finally:
        notice.cancel()
