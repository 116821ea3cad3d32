"""What a reader reads from: rows with the hub's column names, whether they come from the hub or from official JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, Any]


class Table(Protocol):
    """A split's rows. A picture is ``{"bytes": ..., "path": ...}`` as the hub stores it, or None."""

    @property
    def columns(self) -> frozenset[str]:
        """The names of the columns that every row has."""
        ...

    @property
    def roots(self) -> tuple[Path, ...]:
        """Folders that a picture's path may be relative to."""
        ...

    @property
    def source(self) -> Mapping[str, str]:
        """Where the rows come from, for provenance."""
        ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """One row with all columns, its pictures not decoded."""
        ...

    def select(self, columns: Sequence[str]) -> list[Row]:
        """All rows with only these columns; reads no others."""
        ...

    def has_picture(self, column: str) -> list[bool]:
        """For every row, whether there is a picture in `column`; decodes none."""
        ...


@dataclass(frozen=True)
class OfficialTable:
    """The rows made of a dataset's official annotation files. Implements `Table`."""

    rows: Sequence[Row]
    roots: tuple[Path, ...]
    source: Mapping[str, str]

    @property
    def columns(self) -> frozenset[str]:
        """The columns that every row has."""
        return frozenset.intersection(*(frozenset(row) for row in self.rows)) if self.rows else frozenset()

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> Row:
        """See `Table`."""
        return self.rows[index]

    def select(self, columns: Sequence[str]) -> list[Row]:
        """See `Table`."""
        return [{name: row[name] for name in columns} for row in self.rows]

    def has_picture(self, column: str) -> list[bool]:
        """See `Table`."""
        return [row[column] is not None for row in self.rows]
