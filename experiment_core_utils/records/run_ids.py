"""The ids of runs: a counter in a file, repaired from the ids that were given out before."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from experiment_core_utils.primitives.files import check_replaceable, failed_writes_named, write_text_atomically
from experiment_core_utils.records.locks import locked

LOGGER = logging.getLogger(__name__)
MOST_DIGITS = 18


def next_run_id(id_file: Path, results_dir: Path) -> str:
    """The id after the last one given out, such as "0001"; past "9999" it grows.

    The counter is read and written under a lock on a file beside it, which remembers the last id, and replaced as a
    whole. A counter that is gone, without a number or behind continues after that id and those of `used_ids`, with one
    line of warning.

    Raises:
        ResultsNotSaved: the counter cannot be written.
    """
    with failed_writes_named(id_file), locked(id_file) as lock:
        counted, damage = _read_counter(id_file)
        text = os.pread(lock, 256, 0).decode(errors="replace").strip()
        largest = max(int(text) if _is_id(text) else 0, max(used_ids(results_dir), default=0))
        if counted is None:
            damage = damage or ("was not found" if largest > 0 else None)
        elif largest > counted:
            damage = f"contains {counted:04d}, less than an id that was already used"
        identifier = f"{max(counted or 0, largest) + 1:04d}"
        if damage is not None:
            LOGGER.warning("%s %s; continuing at %s", id_file, damage, identifier)
        os.ftruncate(lock, os.pwrite(lock, f"{identifier}\n".encode(), 0))
        write_text_atomically(f"{identifier}\n", id_file)
    return identifier


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
        return None, f"contains {text[:40]!r} instead of a number"
    return int(text), None


def used_ids(results_dir: Path) -> Iterator[int]:
    """Ids of the folders of runs in every `raw_results` in or below `results_dir`, in any order.

    Folders that cannot be read are passed over.
    """
    for place, folders, _ in os.walk(results_dir):
        if Path(place).name == "raw_results":
            yield from map(int, filter(_is_id, folders))
            folders.clear()


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS
