"""In: tensors and plain values under names; out: one file, written whole or not at all, and back."""

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from experiment_core_utils.primitives.errors import ResultsError, first_line
from experiment_core_utils.primitives.files import failed_writes_named


def write_tensor_file(path: Path, kind: str, version: int, content: Mapping[str, Any]) -> None:
    """Write beside `path` and rename over it; raises ResultsNotSaved where the disk does not take it."""
    temporary = path.with_name(f".{path.name}.tmp")
    with failed_writes_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"kind": kind, "version": version, **content}, temporary)
        temporary.replace(path)


def read_tensor_file(path: Path, kind: str, version: int) -> dict[str, Any]:
    """The content without kind and version, on the host; raises ResultsError for a file of anything else.

    Nothing in the file is run: it may hold tensors and plain values alone.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise ResultsError(f"{path} cannot be read as a {kind}: {first_line(error)}") from error
    found = (content.pop("kind", None), content.pop("version", None)) if isinstance(content, dict) else None
    if found != (kind, version):
        raise ResultsError(f"{path} is no {kind} of version {version}; make it again with experiments.controller.train")
    return dict(content)
