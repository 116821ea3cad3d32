"""Rows of datasets from the hub, or from a folder in the hub's layout; pictures are not decoded.

The only file that imports the `datasets` library, which takes seconds: readers import this file, and the registry
imports a reader when a task of it is opened.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
from datasets.exceptions import DatasetsError

from experiment_core_utils.primitives.errors import LIBRARY_ERRORS, ConfigurationError, HubUnreachable, first_line
from experiment_core_utils.primitives.files import read_json
from experiment_core_utils.primitives.texts import shown
from experiment_core_utils.tasks.datasets.tables import Row

# What `load_dataset` and `load_from_disk` raise: no network, no such dataset or split, broken files, a loading script,
# a description of the rows that is of other types than the library writes.
_UNREADABLE = (*LIBRARY_ERRORS, MemoryError, DatasetsError)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FORMATS = ("parquet", "arrow")
UNKNOWN_COMMIT = "unknown"


@dataclass(frozen=True)
class HubDataset:
    """Where a dataset is on the hub."""

    id: str
    config: str | None  #: None for the hub's only or default configuration
    revision: str  #: commit, tag or branch that is requested; the commit that it gave is in the table's `source`


class HubTable:
    """Rows held by the `datasets` library (memory-mapped); an `OfficialTable` has the same methods."""

    def __init__(self, rows: datasets.Dataset, roots: tuple[Path, ...], source: Mapping[str, str]) -> None:
        # As they are stored: the library would decode pictures, sounds, films and PDF files, also in lists, in any
        # format that it knows.
        self._rows = rows.with_format("arrow")
        self.columns = frozenset(rows.column_names)
        #: names of the classes, of the columns that contain their numbers
        self.class_names: Mapping[str, Sequence[str]] = {
            name: each.names for name, each in rows.features.items() if isinstance(each, datasets.ClassLabel)
        }
        self.roots = roots
        self.source = source

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        row: dict[str, Any] = self._rows[index].to_pylist()[0]
        return row

    def select(self, columns: Sequence[str]) -> list[Row]:
        rows: list[Row] = self._rows.select_columns(list(columns))[:].to_pylist()
        return rows

    def has_picture(self, column: str) -> list[bool]:
        # The struct's parts, bytes and path; a missing struct has neither.
        parts = [part.is_valid().to_pylist() for part in self._rows.data.column(column).flatten()]
        return [any(has) for has in zip(*parts, strict=True)]


def read_hub(hub: HubDataset, split: str, cache_dir: Path | None) -> HubTable:
    """One split from the hub or from the library's cache of it.

    Raises:
        HubUnreachable: there is no network, and the cache does not contain it.
        ConfigurationError: it cannot be had otherwise; its message gives the reason only. Without a network the library
            takes whichever revision its cache has: one that is not the requested commit is refused.
    """
    try:
        rows = datasets.load_dataset(
            hub.id,
            hub.config,
            split=split,
            revision=hub.revision,
            cache_dir=None if cache_dir is None else str(cache_dir),
        )
    except ConnectionError as error:
        raise HubUnreachable(shown(first_line(error))) from error
    except _UNREADABLE as error:
        raise ConfigurationError(shown(first_line(error))) from error
    # Named in the downloaded addresses, and the last folder of the cache.
    addresses = [re.search(r"@([0-9a-f]{40})/", address) for address in rows.info.download_checksums or ()]
    folders = [_COMMIT.fullmatch(Path(file["filename"]).parent.name) for file in rows.cache_files]
    found = {match[1] for match in addresses if match} or {match[0] for match in folders if match}
    commit = found.pop() if len(found) == 1 else UNKNOWN_COMMIT
    if _COMMIT.fullmatch(hub.revision) and commit != hub.revision:
        raise ConfigurationError(f"revision {hub.revision} was requested, and the cache contains {commit}")
    source = {
        "read_from": "hub",
        "hub_id": hub.id,
        "config": hub.config or "default",
        "split": split,
        "revision_asked": hub.revision,
        "revision": commit,
        "fingerprint": rows._fingerprint,
    }
    return HubTable(rows, (), source)


def cache_folders(cache_dir: Path | None) -> tuple[Path, ...]:
    """Where the libraries keep what they download and unpack."""
    own = Path(datasets.config.HF_DATASETS_CACHE) if cache_dir is None else cache_dir
    return own, Path(datasets.config.HF_DATASETS_CACHE), Path(huggingface_hub.constants.HF_HUB_CACHE)


def read_folder(folder: Path, hub: HubDataset, split: str, cache_dir: Path | None) -> HubTable | None:
    """One split from a local copy; None where `folder` contains none.

    A copy is a folder written by `save_to_disk`, or parquet or arrow files anywhere below `folder` that are named
    after the split as on the hub: ``validation-00000-of-00004.parquet``, ``validation.parquet``,
    ``validation/0000.parquet``, or as in the library's cache: ``textvqa-validation-00000-of-00003.arrow``. Of a
    dataset with a configuration, only those below its subfolder count, or, where there is none, those in `folder`
    itself, its ``data`` and the split's folder.

    Raises:
        ConfigurationError: there is a copy and it cannot be read, or has no such split.
    """
    copied = folder / hub.config if hub.config is not None and (folder / hub.config).is_dir() else folder
    try:
        if (copied / "dataset_dict.json").is_file() or (copied / "state.json").is_file():
            return _saved(copied, split)
        for kind in _FORMATS:
            found = [path for path in sorted(copied.rglob(f"*.{kind}")) if _is_of_split(path, copied, split)]
            files = [path for path in found if path.is_file()]
            if hub.config is not None and copied == folder:
                # Only folders that are not another configuration's may lie between.
                files = [path for path in files if {"data", split}.issuperset(path.relative_to(folder).parts[:-1])]
            if files:
                rows = _loaded(kind, files, cache_dir)
                listed = ", ".join(f"{path.relative_to(folder)} ({path.stat().st_size} bytes)" for path in files)
                source = {"read_from": f"{kind} files", "path": str(folder), "split": split, "files": listed}
                return HubTable(rows, (copied,), source)
    except _UNREADABLE as error:
        reason = shown(first_line(error.__cause__ or error))
        raise ConfigurationError(f"split {split!r} in {copied} cannot be read: {reason}") from error
    return None


def read_saved(folder: Path, split: str | None) -> HubTable:
    """A folder written by `save_to_disk`; None is the only split of one that has no several.

    Raises:
        ConfigurationError: it cannot be read, or has no such split.
    """
    try:
        return _saved(folder, split)
    except _UNREADABLE as error:
        raise ConfigurationError(f"{folder} cannot be read: {shown(first_line(error.__cause__ or error))}") from error


def read_parquet(path: Path, cache_dir: Path | None) -> HubTable:
    """One Parquet file; raises ConfigurationError with the reason where it cannot be read."""
    try:
        return HubTable(_loaded("parquet", [path], cache_dir), (), {})
    except _UNREADABLE as error:
        raise ConfigurationError(shown(first_line(error.__cause__ or error))) from error


def _loaded(kind: str, files: Sequence[Path], cache_dir: Path | None) -> datasets.Dataset:
    with _without_progress():
        return datasets.load_dataset(
            kind,
            data_files={"read": [str(path) for path in files]},
            split="read",
            cache_dir=None if cache_dir is None else str(cache_dir),
        )


@contextmanager
def _without_progress() -> Iterator[None]:
    """The library shows no bars of its own: local files are read in moments, under a name that nobody gave."""
    are_shown = not datasets.are_progress_bars_disabled()
    if are_shown:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if are_shown:
            datasets.enable_progress_bars()


def _saved(folder: Path, split: str | None) -> HubTable:
    for path in (each for pattern in ("*.json", "*.arrow") for each in folder.rglob(pattern)):
        # Reading a pipe or a device may never end.
        if not path.is_file() and not path.is_dir():
            raise ConfigurationError(
                f"{folder} cannot be read: {path.name} is not a regular file; copy the folder again"
            )
    for state in folder.rglob("state.json"):
        _refuse_files_elsewhere(state)
    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.DatasetDict):
        if split is None or split not in saved:
            raise ConfigurationError(f"{folder} was saved without split {split!r}: it has {', '.join(saved)}")
        rows = saved[split]
    else:
        rows = saved
        if split is not None and rows.split is not None and str(rows.split) != split:
            raise ConfigurationError(f"{folder} was saved from split {str(rows.split)!r}, and {split!r} was requested")
    named = "all" if split is None else f"{split}, as requested; the folder does not state it"
    stated = str(rows.split) if rows.split is not None else named
    source = {"read_from": "saved dataset", "path": str(folder), "split": stated, "fingerprint": rows._fingerprint}
    return HubTable(rows.flatten_indices() if rows._indices is not None else rows, (folder,), source)


def _refuse_files_elsewhere(state: Path) -> None:
    """Raises ConfigurationError where a saved dataset names a file that is not beside its state, and would be read."""
    try:
        content = read_json(state)
    except ConfigurationError:
        # The library says what is wrong.
        return
    files = content.get("_data_files") if isinstance(content, dict) else None
    for each in files if isinstance(files, list) else ():
        name = each.get("filename") if isinstance(each, dict) else None
        if isinstance(name, str) and (Path(name).name != name or name == ".."):
            raise ConfigurationError(
                f"{state} names the file {shown(name)}, which is not beside it; save the dataset again by save_to_disk"
            )


def _is_of_split(path: Path, folder: Path, split: str) -> bool:
    inside = path.relative_to(folder)
    return f"-{split}-" in f"-{inside.stem}-" or inside.parent.name == split
