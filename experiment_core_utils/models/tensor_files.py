"""In: a folder of safetensors; out: what each file holds by its header, and one tensor at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from experiment_core_utils.primitives.errors import ConfigurationError, first_line
from experiment_core_utils.primitives.files import read_json

INDEX_FILE = "model.safetensors.index.json"
_FLOATING = ("F64", "F32", "F16", "BF16")
_NAMED_AT_MOST = 5

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, by the header of its file; `dtype` is safetensors' name, such as "F32"."""

    file: Path
    shape: Shape
    dtype: str


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder by its name; headers are read, no data.

    With `model.safetensors.index.json` the files are those that it names, else all `*.safetensors`.

    Raises:
        ConfigurationError: no files; a file that the index names is not there, or one is there that it does not name;
            a file that is not whole; a tensor that lies in two files, or is not stored in floating point.
    """
    found: dict[str, StoredTensor] = {}
    for file in _files_of(folder):
        for name, stored in _read_header(file).items():
            if name in found:
                raise ConfigurationError(
                    f"{folder}: the tensor {name} lies in {found[name].file.name} and in {file.name}; keep one of them"
                )
            found[name] = stored
    other = [name for name, stored in found.items() if stored.dtype not in _FLOATING]
    if other:
        raise ConfigurationError(
            f"{folder}: {listed(other)} not stored in floating point ({found[other[0]].dtype}); quantised weights in "
            "this layout are not supported"
        )
    return found


def _files_of(folder: Path) -> list[Path]:
    present = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX_FILE
    if not index.is_file():
        if not present:
            raise ConfigurationError(
                f"{folder} has a config.json but no *.safetensors; give a folder with weights, or --random_weights to "
                "profile the architecture alone"
            )
        return present
    try:
        named = sorted({folder / str(file) for file in read_json(index)["weight_map"].values()})
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{index} is not an index of safetensors: {first_line(error)}") from error
    missing = [file.name for file in named if not file.is_file()]
    if missing:
        raise ConfigurationError(
            f"{folder}: {len(missing)} of the {len(named)} files that {INDEX_FILE} names are not there: "
            f"{listed(missing)}; the download is not complete, repeat it"
        )
    left_over = [file.name for file in present if file not in named]
    if left_over:
        raise ConfigurationError(
            f"{folder}: {INDEX_FILE} does not name {listed(left_over)}; remove what is not its own"
        )
    return named


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, framework="pt") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(file, tuple(part.get_shape()), str(part.get_dtype()))
                for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise ConfigurationError(
            f"the weights in {file} cannot be read: {first_line(error)}; copy or download the file again"
        ) from error


def read_tensor(name: str, stored: StoredTensor) -> torch.Tensor:
    """One tensor, as a view of its file.

    The file is mapped anew for each: pages that were read count as this process's memory for as long as the file stays
    mapped, which here is as long as the tensor is held.
    """
    with safe_open(stored.file, framework="pt") as handle:
        tensor: torch.Tensor = handle.get_tensor(name)
    return tensor


def refuse_misfit_tensors(found: Mapping[str, Shape], expected: Mapping[str, Shape], where: str) -> None:
    """Every tensor that the config asks for must be there in its shape, and no other.

    Raises:
        ConfigurationError: names what is missing, unexpected and of another shape.
    """
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    misshapen = [
        f"{name} {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
    complaints = [f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds.items() if names]
    if complaints:
        raise ConfigurationError(f"the tensors in {where} do not fit its config; {'; '.join(complaints)}")


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
