"""In: a counter file and the results beside it; out: the next run id, which no run had before."""

import fcntl
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiment_core_utils.primitives.files import check_replaceable, failed_writes_named, write_text_atomically

LOGGER = logging.getLogger(__name__)
MOST_DIGITS = 18
READ_WHOLE_BYTES = 256 * 1024
END_BYTES = 64 * 1024
BLOCK_BYTES = 1024 * 1024
# Longer than any match, so that none is cut between two blocks.
OVERLAP_BYTES = 128

_EMISSIONS = re.compile(rf"emissions_([0-9]{{1,{MOST_DIGITS}}})(?![0-9]).*\.csv")
_IN_JSON = re.compile(
    rb'"experiment_id"\s{0,8}:\s{0,8}"?([0-9]{1,%d})(?![0-9.])|"experiment_([0-9]{1,%d})"\s{0,8}:'
    % (MOST_DIGITS, MOST_DIGITS)
)


def next_run_id(id_file: Path, results_dir: Path) -> str:
    """One more than the last id given out, such as "0001"; past "9999" it grows.

    The counter is read and written under a lock on a file beside it, and replaced as a whole. A counter that holds no
    number, or a smaller one than an id that was given out, goes on after the largest of them, with one line of warning;
    so does one that is gone. Given out were the ids in `results_dir`, and the last one that the locked file remembers,
    for results that lie elsewhere.

    Raises:
        ResultsNotSaved: the counter cannot be written.
    """
    with failed_writes_named(id_file):
        id_file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(id_file.with_name(f".{id_file.name}.lock")) as lock:
            counted, damage = _read_counter(id_file)
            largest = max(_remembered(lock), max(used_ids(results_dir), default=0))
            if counted is None:
                damage = damage or ("is gone" if largest > 0 else None)
            elif largest > counted:
                damage = f"holds {counted:04d}, less than an id that was given out"
            identifier = f"{max(counted or 0, largest) + 1:04d}"
            if damage is not None:
                LOGGER.warning("%s %s: repaired, this run is %s", id_file, damage, identifier)
            os.ftruncate(lock, os.pwrite(lock, f"{identifier}\n".encode(), 0))
            write_text_atomically(f"{identifier}\n", id_file)
    return identifier


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The descriptor of `path`, locked. The file must not be removed while it is; before that it may."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_still(path, descriptor):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _remembered(lock: int) -> int:
    text = os.pread(lock, 256, 0).decode(errors="replace").strip()
    return int(text) if _is_id(text) else 0


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read_counter(id_file: Path) -> tuple[int | None, str | None]:
    """The number, or what is wrong with the file; neither for a file that is not there."""
    check_replaceable(id_file)
    try:
        with id_file.open("rb") as file:
            text = file.read(256).decode(errors="replace").strip()
    except FileNotFoundError:
        return None, None
    if not text:
        return None, "is empty"
    if not _is_id(text):
        return None, f"holds {text[:40]!r} instead of a number"
    return int(text), None


def used_ids(results_dir: Path) -> Iterator[int]:
    """Ids that results carry, in any order, some more than once.

    Looked at: names of folders in `raw_results`; names of `emissions_<id>*.csv` in `results_dir`, below it and in the
    folder that holds it; in JSON files the keys "experiment_<id>" and the values of "experiment_id". Files that lie in
    `results_dir` itself and those up to 256 KiB are read whole, of larger ones in its folders the first and the last
    64 KiB. What cannot be read is passed over.
    """
    yield from _emission_ids(entry.name for entry in _files_in(results_dir.parent))
    for place, folders, names in os.walk(results_dir):
        folder = Path(place)
        if folder.name == "raw_results":
            yield from (int(name) for name in folders if _is_id(name))
            # Their files carry the same ids.
            folders[:] = [name for name in folders if not _is_id(name)]
        yield from _emission_ids(names)
        for name in names:
            if name.endswith((".json", ".jsonl")):
                yield from _ids_in_file(folder / name, is_whole=folder == results_dir)


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS


def _files_in(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _emission_ids(names: Iterator[str] | list[str]) -> Iterator[int]:
    for name in names:
        if match := _EMISSIONS.fullmatch(name):
            yield int(match.group(1))


def _ids_in_file(path: Path, is_whole: bool) -> Iterator[int]:
    try:
        # A pipe would wait for a writer.
        if not path.is_file():
            return
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if is_whole or size <= READ_WHOLE_BYTES:
                kept = b""
                while block := file.read(BLOCK_BYTES):
                    yield from _ids_in(kept + block)
                    kept = block[-OVERLAP_BYTES:]
            else:
                yield from _ids_in(file.read(END_BYTES))
                file.seek(size - END_BYTES)
                yield from _ids_in(file.read(END_BYTES))
    except OSError:
        return


def _ids_in(content: bytes) -> Iterator[int]:
    for match in _IN_JSON.finditer(content):
        yield int(match.group(1) or match.group(2))
