"""Conversion of a MolmoE folder of the original training code into the published layout.

The original layout is `config.yaml` and one state dict, `model.pt`: the experts of a block are stacked row by row, and
their second projection is transposed. The output has the published layout, because that one loads strictly and needs
the memory of one copy only; other programs can read it too.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import save_file

from experiment_core_utils.models.common.checkpoint_files import INDEX_FILE, Shape, find_tensors, refuse_misfit_tensors
from experiment_core_utils.models.molmoe.checkpoint.published import (
    PUBLISHED_MODEL_TYPE,
    TOKENIZER_FILES,
    config_from_published,
    load_published_tokenizer,
    native_shapes,
    published_layout,
)
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsNotSaved, first_line
from experiment_core_utils.primitives.files import failed_writes_named, flush_folder

CONFIG_FILE, WEIGHTS_FILE = "config.yaml", "model.pt"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHARD_BYTES = 2 * 10**9
_EXPERT = re.compile(r"model\.(transformer\.blocks\.\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_STACKED = {"gate": "w1", "up": "v1", "down": "w2"}

_RENAMED = (
    (re.compile(r"lm_head\.(weight)"), r"transformer.ff_out.\1"),
    (re.compile(r"model\.(transformer\.blocks\.\d+)\.attn\.(.*)"), r"\1.\2"),
    (re.compile(r"model\.(transformer\.blocks\.\d+)\.mlp\.gate\.(weight)"), r"\1.ffn.router.layer.\2"),
    (re.compile(r"model\.(transformer\.blocks\.\d+)\.mlp\.(ff_norm\.weight)"), r"\1.\2"),
    (re.compile(r"model\.(.*)"), r"\1"),
)


@dataclass(frozen=True)
class Origin:
    """The original tensor of a published one: rows of it, or all of them (None), transposed or not."""

    name: str
    rows: tuple[int, int] | None = None
    transposed: bool = False


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """The result of a conversion: number of tensors of the published layout, of files of weights, and bytes of
    weights.
    """

    folder: Path
    num_tensors: int
    num_files: int
    weights_bytes: int


def is_original_checkpoint(folder: Path) -> bool:
    """Whether a folder looks like one of the original training code and not like a converted one."""
    return (folder / CONFIG_FILE).is_file() and not (folder / "config.json").exists()


def convert_original_checkpoint(
    folder: Path,
    output: Path,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> ConvertedCheckpoint:
    """Write the published layout to `output`, whole or not at all.

    Beside the shard that is being written nothing of the weights is copied; pages of `model.pt` that were read for it
    are let go with it.

    Args:
        dtype: "float32", "bfloat16" or "float16"; None keeps the precision of each tensor.
        tokenizer: folder with `tokenizer.json` and `tokenizer_config.json`; None takes them from `folder`.
        shard_bytes: a file of weights is closed before it would grow beyond this.

    Raises:
        ConfigurationError: `output` exists; config, weights or tokenizer are missing, cannot be read, or are not
            MolmoE's; tensors do not fit the config one to one.
        ResultsNotSaved: the disk does not take the files, or they are not what was to be written.
    """
    if output.exists():
        raise ConfigurationError(f"{output} exists; give a folder that does not")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigurationError(f"the dtype {dtype} is not known; give one of {', '.join(DTYPES)}")
    config = read_original_config(folder)
    shapes = published_shapes(config, folder)
    origins = {name: origin_of(name, shape) for name, shape in shapes.items()}
    weights = open_weights(folder)
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    refuse_misfit_tensors(found, original_shapes(shapes, origins), str(folder / WEIGHTS_FILE))
    stored_as = {name: DTYPES[dtype] if dtype else weights[origin.name].dtype for name, origin in origins.items()}
    del weights
    tokenizer_folder = tokenizer if tokenizer is not None else folder
    check_tokenizer(tokenizer_folder)
    shards = split_into_shards(shapes, stored_as, shard_bytes)
    with whole_or_not_at_all(output) as unfinished:
        for file, names in shards.items():
            write_shard(folder, unfinished / file, {name: origins[name] for name in names}, stored_as)
        write_json(unfinished / INDEX_FILE, index_of(shards, shapes, stored_as))
        torch_dtype = str(next(iter(stored_as.values()))).removeprefix("torch.")
        write_json(unfinished / "config.json", config | {"torch_dtype": torch_dtype})
        for name in TOKENIZER_FILES:
            shutil.copyfile(tokenizer_folder / name, unfinished / name)
        verify(unfinished, shapes)
    total = sum(bytes_of(shapes[name], stored_as[name]) for name in shapes)
    return ConvertedCheckpoint(output, len(shapes), len(shards), total)


# --- what is read ---------------------------------------------------------------------------------------------------


def read_original_config(folder: Path) -> dict[str, Any]:
    """The published `config.json` of an original `config.yaml`, which contains the model's keys under `model`."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ConfigurationError(
            f"{folder} contains no {CONFIG_FILE}; give a folder of the original training code, with {CONFIG_FILE} and "
            f"{WEIGHTS_FILE}"
        )
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} is not YAML: {first_line(error)}") from error
    model = content.get("model", content) if isinstance(content, dict) else None
    if not isinstance(model, dict):
        raise ConfigurationError(f"{file} contains no model config: its keys are expected under `model`")
    return {**model, "model_type": PUBLISHED_MODEL_TYPE, "architectures": ["MolmoForCausalLM"]}


def published_shapes(config: Mapping[str, Any], folder: Path) -> dict[str, Shape]:
    """Shapes of the published tensors of a config, in the order in which they are written."""
    native = config_from_published(config, folder / CONFIG_FILE)
    return {name: tensor.shape for name, tensor in published_layout(native, native_shapes(native)).items()}


def open_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The original tensors as views of the mapped file: nothing is read yet, and no code in it is run."""
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        raise ConfigurationError(
            f"{folder} contains no {WEIGHTS_FILE}; sharded training states have to be joined first"
        )
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise ConfigurationError(f"{file} cannot be read as a state dict: {first_line(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(each, torch.Tensor) for each in content.values()):
        raise ConfigurationError(f"{file} contains no state dict of tensors; give the model's weights alone")
    other = [name for name, tensor in content.items() if not tensor.is_floating_point()]
    if other:
        raise ConfigurationError(f"{file}: {other[0]} is not stored in floating point ({content[other[0]].dtype})")
    return content


def check_tokenizer(folder: Path) -> None:
    """Raises ConfigurationError where there is no tokenizer, or where it is not MolmoE's."""
    if not (folder / "tokenizer.json").is_file():
        raise ConfigurationError(
            f"there is no tokenizer.json in {folder}; name the folder of a published MolmoE's with --tokenizer"
        )
    load_published_tokenizer(folder)


# --- names and shapes -----------------------------------------------------------------------------------------------


def origin_of(name: str, shape: Shape) -> Origin:
    """The original tensor of a published one: expert e has rows e * I to (e + 1) * I of its block's stack."""
    if match := _EXPERT.fullmatch(name):
        is_down = match[3] == "down"
        inner, expert = shape[1] if is_down else shape[0], int(match[2])
        rows = (expert * inner, (expert + 1) * inner)
        return Origin(f"{match[1]}.ffn.experts.mlp.{_STACKED[match[3]]}", rows, transposed=is_down)
    pattern, replacement = next((pattern, new) for pattern, new in _RENAMED if pattern.fullmatch(name))
    return Origin(pattern.sub(replacement, name))


def original_shapes(published: Mapping[str, Shape], origins: Mapping[str, Origin]) -> dict[str, Shape]:
    """Shapes that the original tensors must have; a stack of experts has the rows of all."""
    shapes: dict[str, Shape] = {}
    for name, origin in origins.items():
        shape = published[name][::-1] if origin.transposed else published[name]
        if origin.rows is not None:
            before = shapes[origin.name][0] if origin.name in shapes else 0
            shape = (max(before, origin.rows[1]), *shape[1:])
        shapes[origin.name] = shape
    return shapes


def bytes_of(shape: Shape, dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return torch.Size(shape).numel() * dtype.itemsize


# --- what is written ------------------------------------------------------------------------------------------------


def split_into_shards(
    shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype], shard_bytes: int
) -> dict[str, list[str]]:
    """File names and the tensors in each, in order; a tensor that is larger than a shard has its own file."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        added = bytes_of(shape, dtypes[name])
        if groups[-1] and size + added > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += added
    return {f"model-{place:05}-of-{len(groups):05}.safetensors": names for place, names in enumerate(groups, 1)}


def index_of(
    shards: Mapping[str, Sequence[str]], shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Any]:
    """The content of `model.safetensors.index.json`."""
    total = sum(bytes_of(shape, dtypes[name]) for name, shape in shapes.items())
    weight_map = {name: file for file, names in shards.items() for name in names}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def write_shard(folder: Path, file: Path, origins: Mapping[str, Origin], dtypes: Mapping[str, torch.dtype]) -> None:
    """Write one file of weights; the original is mapped anew, so that its pages do not add up over the shards."""
    weights = open_weights(folder)
    tensors = {}
    for name, origin in origins.items():
        rows = weights[origin.name] if origin.rows is None else weights[origin.name][slice(*origin.rows)]
        source = rows.T if origin.transposed else rows
        tensors[name] = torch.empty(source.shape, dtype=dtypes[name]).copy_(source)
        if not tensors[name].isfinite().all() and source.isfinite().all():
            raise ConfigurationError(
                f"{origin.name} has values that {dtypes[name]} does not contain; give another --dtype"
            )
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise ResultsNotSaved(f"{file.name} cannot be written: {first_line(error)}; make room and repeat") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file in the form that other programs write."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def verify(folder: Path, shapes: Mapping[str, Shape]) -> None:
    """Compare the headers of the files on the disk with what was to be written."""
    found = {name: stored.shape for name, stored in find_tensors(folder).items()}
    try:
        refuse_misfit_tensors(found, shapes, str(folder))
    except ConfigurationError as error:
        raise ResultsNotSaved(f"what was written is not what was to be written: {error}") from error


@contextmanager
def whole_or_not_at_all(output: Path) -> Iterator[Path]:
    """A context with a folder beside `output` to write into; it is renamed at the end, and removed after an error."""
    with failed_writes_named(output.parent):
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        with failed_writes_named(output):
            yield unfinished
            unfinished.chmod(0o755)
            unfinished.rename(output)
            flush_folder(output.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
