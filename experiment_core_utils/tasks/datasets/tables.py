"""Rows that dataset readers make of official JSON files."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import parse_json, read_given

Row = Mapping[str, Any]


@dataclass(frozen=True)
class OfficialTable:
    """The rows made of a dataset's official annotation files.

    A picture is ``{"bytes": ..., "path": ...}`` as the hub stores it, or None.
    """

    rows: Sequence[Row]
    roots: tuple[Path, ...]  #: folders that a picture's path may be relative to
    source: Mapping[str, str]  #: where the rows come from, for provenance

    @property
    def columns(self) -> frozenset[str]:
        """The columns that every row has."""
        return frozenset.intersection(*(frozenset(row) for row in self.rows)) if self.rows else frozenset()

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> Row:
        """One row with all columns, its pictures not decoded."""
        return self.rows[index]

    def select(self, columns: Sequence[str]) -> list[Row]:
        """All rows with only these columns; reads no others."""
        return [{name: row[name] for name in columns} for row in self.rows]

    def has_picture(self, column: str) -> list[bool]:
        """Whether, for every row, there is a picture in `column`; decodes none."""
        return [row[column] is not None for row in self.rows]


# COCO's archives unpack into this subfolder.
_SUBFOLDERS = (".", "annotations")
# The largest of the nine datasets' files, the answers of VQA v2's training split, has 0.4 GB.
MOST_BYTES = 2 * 10**9


@dataclass(frozen=True)
class OfficialFile:
    """A parsed annotation file."""

    path: Path
    content: Any
    sha256: str

    def entries(self, key: str | None, needed: Sequence[str]) -> list[Mapping[str, Any]]:
        """The list under `key` (None: the file is the list), each entry an object that has the `needed` keys.

        Raises:
            ConfigurationError: it is not so.
        """
        if key is not None and (not isinstance(self.content, dict) or key not in self.content):
            raise ConfigurationError(f"{self.path} has no {key!r}: it is not the official file of that name")
        found = self.content if key is None else self.content[key]
        if not isinstance(found, list):
            raise ConfigurationError(f"{self.path} has no list of entries: it is not the official file of that name")
        for number, entry in enumerate(found):
            if not isinstance(entry, dict) or any(name not in entry for name in needed):
                raise ConfigurationError(f"{self.path}: entry {number} lacks one of {', '.join(needed)}")
        return found


def find_files(folder: Path, patterns: Sequence[str]) -> list[Path] | None:
    """One file for each pattern, in `folder` or its `annotations`; None where there is none of them.

    Where several files match, the last by name is taken (``val_v1.0_withQT.json`` before ``val_v1.0.json``).

    Raises:
        ConfigurationError: some are there and others are not.
    """
    places = [folder / name for name in _SUBFOLDERS]
    matches = {
        pattern: sorted((path for place in places for path in place.glob(pattern)), key=lambda path: path.name)
        for pattern in patterns
    }
    if not any(matches.values()):
        return None
    missing = [pattern for pattern, found in matches.items() if not found]
    if missing:
        there = ", ".join(found[-1].name for found in matches.values() if found)
        raise ConfigurationError(f"{folder} has {there} but not {', '.join(missing)}: put it next to them")
    return [found[-1] for found in matches.values()]


def read_official(path: Path) -> OfficialFile:
    """The parsed file; raises ConfigurationError where it cannot be read, is not JSON or is above `MOST_BYTES`."""
    hint = "put the official file there"
    if path.is_file() and path.stat().st_size > MOST_BYTES:
        raise ConfigurationError(
            f"{path} has {path.stat().st_size} bytes, and no official file has more than {MOST_BYTES}; {hint}"
        )
    data = read_given(path, hint=hint)
    return OfficialFile(path, parse_json(data, str(path), hint), hashlib.sha256(data).hexdigest())
