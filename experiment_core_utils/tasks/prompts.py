"""The prompts of text experiments, from the embedded set, a file or a list."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiment_core_utils.config.text import PromptSource
from experiment_core_utils.primitives.errors import ConfigurationError, first_line, package_of_extra
from experiment_core_utils.primitives.files import parse_json, refuse_unreadable
from experiment_core_utils.primitives.texts import short_digest

_JSONL = (".jsonl", ".ndjson")
_OTHER_FORMATS = (".json", ".csv", ".tsv", ".parquet", ".arrow", ".yaml", ".yml")
EMBEDDED_PROMPTS = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True)
class Prompts:
    """Prompts in the order of their source."""

    texts: tuple[str, ...]
    source: Mapping[str, str]  #: what was read, with a digest of the texts


def read_prompts(given: PromptSource, cache_dir: Path | None = None) -> Prompts:
    """All prompts of a source.

    Raises:
        ConfigurationError: it is not there, contains no prompt, or something that is not a text.
    """
    if given.dataset_name is not None:
        texts, source = _of_dataset(given, cache_dir)
    else:
        path = EMBEDDED_PROMPTS if given.path is None else Path(given.path)
        texts = list(_of_file(path, given.column))
        source = {"read_from": "embedded prompts" if given.path is None else "file", "path": str(path)}
    if not texts:
        raise ConfigurationError(f"{given.dataset_name or given.path} contains no prompts")
    return Prompts(tuple(texts), {**source, "digest": short_digest(json.dumps(texts))})


def _of_file(path: Path, column: str) -> Iterator[str]:
    kind = path.suffix.lower()
    if kind in _OTHER_FORMATS:
        raise ConfigurationError(
            f"{path}: prompts are read from JSONL (an object a line) or text (a prompt a line), not from {kind}"
        )
    refuse_unreadable(path, "prompts in")
    try:
        # A byte order mark is not a part of the first prompt.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"prompts in {path} cannot be read: {first_line(error)}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield _of_json(line, column, where) if kind in _JSONL else _checked(line.rstrip("\r"), where)


def _of_json(line: str, column: str, where: str) -> str:
    content = parse_json(line, where)
    if not isinstance(content, dict) or column not in content:
        found = ", ".join(content) if isinstance(content, dict) else type(content).__name__
        raise ConfigurationError(f"{where} has no {column!r} (found: {found}); name the right key in prompts.column")
    return _checked(content[column], where)


def _checked(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError(f"{where} contains no text but {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{where} contains half a surrogate pair, which is not a text: {error.reason}"
        ) from error
    return value


def _of_dataset(given: PromptSource, cache_dir: Path | None) -> tuple[list[str], Mapping[str, str]]:
    # Its library takes seconds to import, and no other source needs it.
    with package_of_extra("datasets", "datasets"):
        from experiment_core_utils.tasks.datasets.hub_tables import HubDataset, read_folder, read_hub

    name = str(given.dataset_name)
    hub = HubDataset(name, given.config_name, given.revision or "main")
    try:
        if Path(name).is_dir():
            table = read_folder(Path(name), hub, given.split, cache_dir)
        else:
            table = read_hub(hub, given.split, cache_dir)
    except ConfigurationError as error:
        raise type(error)(f"prompts from {name}, split {given.split}: {error}") from error
    if table is None:
        raise ConfigurationError(
            f"{name} contains no copy with a split {given.split!r} (parquet, arrow or save_to_disk)"
        )
    if given.column not in table.columns:
        raise ConfigurationError(
            f"{name} has no column {given.column!r}; prompts.column is one of {', '.join(sorted(table.columns))}"
        )
    rows = table.select([given.column])
    texts = [_checked(row[given.column], f"{name}, row {index}") for index, row in enumerate(rows)]
    return texts, table.source
