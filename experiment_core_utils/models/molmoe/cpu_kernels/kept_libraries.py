"""In: all that a compiled library depends on; out: the file that keeps it for later processes of this user."""

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiment_core_utils.primitives.errors import ConfigurationError, first_line

CPU_FACTS = Path("/proc/cpuinfo")
# What `-march=native` looks at, by the names of x86 and of Arm.
FACTS = ("model name", "flags", "CPU part", "Features")
SEAL_BYTES = hashlib.sha256().digest_size


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
    """Put the library there whole, whoever else does the same at that time; see `is_whole`.

    Raises:
        ConfigurationError: the folder cannot be written to.
    """
    content = library.read_bytes()
    try:
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=kept.parent, prefix=kept.name, delete=False) as file:
            own = Path(file.name)
            try:
                file.write(content + _seal(content))
                file.close()
                own.replace(kept)
            except OSError:
                own.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ConfigurationError(f"{kept.parent} does not keep compiled kernels: {first_line(error)}") from None


def is_whole(kept: Path) -> bool:
    """Whether the file is there as `keep` left it: to load a library that was cut off ends the process.

    Its last bytes are a digest of all before them, which the system's loader does not look at.
    """
    try:
        content = kept.read_bytes()
    except OSError:
        return False
    return content[-SEAL_BYTES:] == _seal(content[:-SEAL_BYTES])


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
    """Which file it runs, with its size and time; nothing for a word that is no program."""
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
