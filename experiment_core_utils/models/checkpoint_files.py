"""In: a folder or a hub id; out: the folder with its files, its config as it stands, and whether weights fit it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from experiment_core_utils.primitives.errors import ConfigurationError, first_line


def download(
    name: str,
    patterns: Sequence[str],
    hint: str,
    cache_dir: Path | None = None,
    revision: str | None = None,
    ignored: Sequence[str] | None = None,
) -> Path:
    """The folder of a hub id's snapshot, named by its commit, with at least the files that fit `patterns`.

    Args:
        hint: what to give instead, the end of the message.

    Raises:
        ConfigurationError: `name` is no hub id, or the hub does not give it.
    """
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise ConfigurationError(f"there is no model folder {name}; {hint}")
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignored) if ignored is not None else None,
                # Of a commit the hub is asked for the list of files, offline too.
                local_files_only=constants.HF_HUB_OFFLINE,
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at_revision = f" at revision {revision}" if revision is not None else ""
        raise ConfigurationError(
            f"{name} is no folder, and the hub did not give it{at_revision} ({first_line(error)}); {hint}"
        ) from error


def weights_stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of change of each file of weights: other weights in the same folder differ in it."""
    files = sorted(path for kind in ("*.safetensors", "*.bin") for path in folder.glob(kind))
    return tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)


def weights_digest(folder: Path) -> str:
    """SHA-256 over the names and bytes of the files of weights: the same wherever the folder lies."""
    digest = hashlib.sha256()
    for name, _, _ in weights_stamp(folder):
        digest.update(name.encode())
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_raw_config(folder: Path) -> Mapping[str, Any]:
    """`config.json` as it stands; raises ConfigurationError where there is none that can be read."""
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigurationError(f"{folder} holds no model: there is no config.json in it")
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigurationError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file} holds no JSON object")
    return content


def refuse_misfit(found: Mapping[str, Any], folder: Path) -> None:
    """Every tensor must be there and fit: transformers alone would fill a gap with random numbers and a warning.

    Args:
        found: transformers' loading info.

    Raises:
        ConfigurationError: weights are missing, of another shape, or left over.
    """
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in found[what])
        if names:
            raise ConfigurationError(
                f"the weights in {folder} do not fit its config: {len(names)} {what.replace('_', ' ')}, "
                f"for example {names[0]}"
            )
