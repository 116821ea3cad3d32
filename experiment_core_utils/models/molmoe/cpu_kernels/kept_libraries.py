"""In: all that a compiled library depends on; out: the file that keeps it for later processes of this user."""

import hashlib
import os
import platform
import secrets
import shlex
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from experiment_core_utils.primitives.errors import ConfigurationError, first_line

CPU_FACTS = Path("/proc/cpuinfo")
# What `-march=native` looks at, by the names of x86 and of Arm.
FACTS = ("model name", "flags", "CPU part", "Features")
SEAL_BYTES = hashlib.sha256().digest_size
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def kept_file(command: Sequence[str], sources: Iterable[Path]) -> Path:
    """Where the library is kept that this command makes of these sources on a processor like this one.

    A file in the user's cache folder (`$XDG_CACHE_HOME`, else `~/.cache`). Its name is a digest of the command's words,
    of the programs among them as they are installed, of the sources' text and of the processor.

    Raises:
        ConfigurationError: the user has no such folder.
    """
    parts = [*command, *map(_installed, command), *(path.read_text() for path in sources), _processor()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return _cache_folder() / "inference_knob_profiler" / "cpu_kernels" / f"{digest[:32]}.so"


def keep(library: Path, kept: Path) -> None:
    """Put the library there whole, whoever else does the same at that time; see `verified_content`.

    Raises:
        ConfigurationError: the folder cannot be written to, or is not this user's alone.
    """
    content = library.read_bytes()
    try:
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _own_folder(kept.parent) as folder:
            unfinished = f"{kept.name}.{secrets.token_hex(8)}"
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
            try:
                with open(descriptor, "wb") as file:
                    file.write(content + _seal(content))
                os.replace(unfinished, kept.name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                os.unlink(unfinished, dir_fd=folder)
                raise
    except OSError as error:
        raise ConfigurationError(f"{kept.parent} does not keep compiled kernels: {first_line(error)}") from None


def verified_content(kept: Path) -> bytes | None:
    """The library as `keep` left it; None where there is none, or one that was cut off, which would end the process.

    The last bytes of the file are a digest of all before them. The digest proves that the file is whole, not who wrote
    it: a library runs as soon as it is loaded, so that the owner and the mode of the folder and of the file are read
    from what is open, and the caller loads these bytes and not the file, which may be another one by then.

    Raises:
        ConfigurationError: the folder or the file belongs to another user, or others may write to it.
    """
    try:
        with _own_folder(kept.parent) as folder:
            # A pipe would wait for a writer.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            with open(os.open(kept.name, flags, dir_fd=folder), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return None
                _refuse_others(file.fileno(), kept)
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


def _cache_folder() -> Path:
    asked = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if asked.is_absolute():
        return asked
    try:
        return Path.home() / ".cache"
    except RuntimeError as error:
        raise ConfigurationError(f"there is no folder to keep compiled kernels in: {first_line(error)}") from None


def _installed(word: str) -> str:
    """Which file it runs, with its size and time; nothing for a word that is not a program."""
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
