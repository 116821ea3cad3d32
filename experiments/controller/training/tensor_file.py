"""Files of tensors and plain values under names, written whole or not at all."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch

from experiment_core_utils.primitives.errors import ResultsError, first_line
from experiment_core_utils.primitives.files import read_regular_file, replaced_whole, shortened


@dataclass(frozen=True)
class FileKind:
    """The kind and version that a file records of itself."""

    kind: str
    version: int
    usual_name: str  #: under which `experiments.controller.train` writes it

    @property
    def advice(self) -> str:
        """The advice for a user who gave another kind of file."""
        return f"give the {self.usual_name} that experiments.controller.train wrote"


def write_tensor_file(path: Path, of: FileKind, content: Mapping[str, Any]) -> None:
    """Write beside `path` and rename over it; raises ResultsNotSaved where the disk refuses."""
    with replaced_whole(path) as temporary, temporary.open("wb") as file:
        try:
            torch.save({"kind": of.kind, "version": of.version, **content}, file)
        except RuntimeError as error:
            # torch closes its archive after the write that was refused, and complains of that.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


@contextmanager
def read_tensor_file(path: Path, of: FileKind) -> Iterator[dict[str, Any]]:
    """A context in which the content without kind and version, on the host, is used.

    Nothing in the file is run: it may contain tensors and plain values only.

    Raises:
        ResultsError: a file of anything else, or something in it is missing or not possible.
    """
    content = _loaded(path, of)
    if not isinstance(content, dict) or "kind" not in content:
        raise ResultsError(f"{path} is not a {of.kind} of version {of.version}; {of.advice}")
    kind, version = content.pop("kind"), content.pop("version", None)
    if (kind, version) != (of.kind, of.version):
        raise ResultsError(
            f"{path} is not a {of.kind} of version {of.version}, but a {kind} of version {version}; {of.advice}"
        )
    try:
        yield content
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RuntimeError) as error:
        raise ResultsError(f"{path} is a broken {of.kind} ({shortened(first_line(error))}); {of.advice}") from error


def _loaded(path: Path, of: FileKind) -> Any:
    try:
        file = BytesIO(read_regular_file(path))
        # torch's own reader takes any other bytes for a pickle, and raises whatever these happen to mean.
        if not is_zipfile(file):
            raise ResultsError(f"{path} is not a {of.kind}, or not the whole of one; {of.advice}")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ResultsError(f"{path} cannot be read as a {of.kind} ({error.strerror or error}); {of.advice}") from error
    except (UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        # torch's message is about loading such a file in another way, which is unsafe.
        raise ResultsError(f"{path} is not a {of.kind}: it contains more than tensors and plain values, or is damaged; "
                           f"{of.advice}") from error  # fmt: skip
