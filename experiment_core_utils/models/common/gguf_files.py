"""GGUF, llama.cpp's format: weights, config, tokenizer and chat template of a model in one file.

transformers reads it (with the package gguf) and makes every weight a plain number again, in the requested precision.
"""

import copy
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoTokenizer, GgufConfig, PreTrainedConfig
from transformers.utils.import_utils import is_gguf_available

from experiment_core_utils.models.common.vendor_errors import vendor_errors_named
from experiment_core_utils.primitives.errors import ConfigurationError, ImpossibleCombination, first_line
from experiment_core_utils.primitives.files import is_gguf, refuse_unreadable
from experiment_core_utils.primitives.private_apis import gguf_architectures, gguf_header
from experiment_core_utils.primitives.texts import shown

_AGAIN = "copy or download it again"
_GIVE = "give a GGUF file, a folder with config.json and safetensors, or a hub id"
_VERSIONS = (2, 3)


def source_of(place: Path) -> dict[str, Any]:
    """What a `from_pretrained` of transformers is called with to read a checkpoint: its folder, or the GGUF file."""
    if not is_gguf(place):
        return {"pretrained_model_name_or_path": place}
    return {"pretrained_model_name_or_path": place.parent, "gguf_file": place.name}


def config_in(place: Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """transformers' config of a checkpoint; that of a GGUF file, whose vocabulary takes seconds to read, only once."""
    if not is_gguf(place):
        return AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=trust_remote_code)
    state = place.stat()
    return copy.deepcopy(_config_of(place, state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=4)
def _config_of(file: Path, size: int, changed_ns: int) -> PreTrainedConfig:
    return AutoConfig.from_pretrained(**source_of(file), local_files_only=True, trust_remote_code=False)


def tokenizer_in(place: Path, **options: Any) -> Any:
    """transformers' tokenizer of a checkpoint, which pads on the left; that of a GGUF file is made only once."""
    if not is_gguf(place):
        return AutoTokenizer.from_pretrained(place, padding_side="left", **options)
    state = place.stat()
    return copy.deepcopy(_tokenizer_of(place, state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=4)
def _tokenizer_of(file: Path, size: int, changed_ns: int) -> Any:
    return AutoTokenizer.from_pretrained(**source_of(file), padding_side="left", local_files_only=True)


def check_gguf(file: Path, most_layers: int) -> None:
    """Raises ConfigurationError for a GGUF file that transformers cannot read, by its header; no weight is read.

    Raises:
        ConfigurationError: the package gguf is missing; the file is not there, not GGUF or not whole; its architecture
            is not one that transformers reads, or has more than `most_layers` blocks.
    """
    refuse_unreadable(file, hint=_GIVE)
    if not is_gguf_available():
        raise ConfigurationError(
            f"{file} is read with the package gguf, which is not installed or too old; run: pip install -U gguf"
        )
    _check_beginning(file)
    metadata, end = _header(file)
    size = file.stat().st_size
    if size < end:
        raise ConfigurationError(f"{file} is torn: it has {size:,} bytes, and its header names {end:,}; {_AGAIN}")
    architecture, known = str(metadata["general.architecture"]), gguf_architectures()
    if _plain(architecture) not in {_plain(each) for each in known}:
        raise ConfigurationError(
            f"{file} is a {architecture}, which transformers does not read as GGUF; give its safetensors, or one of "
            f"{', '.join(known)}"
        )
    blocks = metadata.get(f"{architecture}.block_count")
    if not isinstance(blocks, int) or not 1 <= blocks <= most_layers:
        raise ConfigurationError(f"{file}: block_count {blocks} is not possible; give 1 to {most_layers}")


def _check_beginning(file: Path) -> None:
    """Raises ConfigurationError for a file that does not begin as GGUF of a version that is read."""
    with file.open("rb") as stream:
        beginning = stream.read(8)
    if beginning.startswith(b"version "):
        raise ConfigurationError(f"{file} is a pointer of Git LFS, not the model; run: git lfs pull")
    if not b"GGUF".startswith(beginning[:4]):
        raise ConfigurationError(f"{file} is not GGUF: it begins with {shown(repr(beginning))[1:]}; {_GIVE}")
    if len(beginning) < 8:
        raise ConfigurationError(f"{file} is torn: it has {len(beginning)} bytes and no header; {_AGAIN}")
    if (version := int.from_bytes(beginning[4:], "little")) not in _VERSIONS:
        raise ConfigurationError(
            f"{file} is GGUF of version {version}, and versions {' and '.join(map(str, _VERSIONS))} are read; convert "
            "the model again with a current llama.cpp"
        )


def _header(file: Path) -> tuple[Mapping[str, Any], int]:
    with vendor_errors_named(f"the header of {file} cannot be read as GGUF", f"; {_AGAIN}"):
        state = file.stat()
        size = state.st_size
        try:
            return _header_of(file, size, state.st_mtime_ns)
        except ValueError as error:
            if "ggml type" not in str(error):
                raise
            # The file may be whole: another copy of it would be the same.
            raise ConfigurationError(
                f"{file} has weights of a type that neither transformers nor this gguf reads ({first_line(error)}); "
                "run: pip install -U gguf transformers, or give the model in another quantisation"
            ) from error
        except struct.error as error:
            raise ConfigurationError(f"{file} is torn within its header, after {size:,} bytes; {_AGAIN}") from error


@lru_cache(maxsize=4)
def _header_of(file: Path, size: int, changed_ns: int) -> tuple[Mapping[str, Any], int]:
    return gguf_header(file)


def _plain(architecture: str) -> str:
    return architecture.replace("_", "").replace("-", "").lower()


def quantised_file(place: Path) -> dict[str, str] | None:
    """Format and type of the file that weights come from, such as `{"format": "gguf", "type": "Q4_1"}`; None for a
    folder.
    """
    return {"format": "gguf", "type": _type_of(place)} if is_gguf(place) else None


def _type_of(file: Path) -> str:
    """llama.cpp's name of the file's type, which most of its weights have."""
    from gguf import LlamaFileType

    try:
        name = LlamaFileType(_header(file)[0].get("general.file_type")).name
    except ValueError:
        return "unknown"
    return name.removeprefix("ALL_").removeprefix("MOSTLY_")


def refuse_quantised_again(place: Path, is_requested: bool) -> None:
    """Raises ImpossibleCombination where the weights of a GGUF file should be quantised while they are loaded."""
    if is_gguf(place) and is_requested:
        raise ImpossibleCombination(
            f"{place} is a GGUF file ({_type_of(place)}), whose weights are computed in full precision and are not "
            "quantised again: drop the quantisation, or give the model's safetensors"
        )


def loading_options(place: Path) -> dict[str, Any]:
    """What `from_pretrained` of a model is called with, beside `source_of`: a GGUF's weights become plain numbers,
    and its config is not read again.

    Otherwise transformers would take a kernel from the hub that multiplies packed weights, where there is one.
    """
    if not is_gguf(place):
        return {"use_safetensors": True}
    return {"quantization_config": GgufConfig(dequantize=True), "config": config_in(place)}


def keep_origin(model: Any, place: Path) -> None:
    """Note on a loaded model which GGUF file its weights come from; a folder is noted by transformers."""
    if is_gguf(place):
        model.name_or_path = str(place)
        model.quantised_file = quantised_file(place)


def quantised_file_of(model: nn.Module) -> dict[str, str] | None:
    """See `quantised_file`; None for a model whose weights did not come from such a file."""
    found: dict[str, str] | None = vars(model).get("quantised_file")
    return found
