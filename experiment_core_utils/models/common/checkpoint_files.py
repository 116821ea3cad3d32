"""The files of a checkpoint: its folder, its config as written, and whether its weights fit the model."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import CONFIG_MAPPING, GenerationConfig
from transformers.utils import is_kernels_available

from experiment_core_utils.models.common.gguf_files import check_gguf, keep_origin
from experiment_core_utils.models.common.vendor_errors import vendor_errors_named
from experiment_core_utils.primitives.errors import ConfigurationError, HubUnreachable, first_line
from experiment_core_utils.primitives.files import is_gguf, read_json, refuse_unreadable
from experiment_core_utils.primitives.texts import first_of

# What transformers opens in a folder, by the ends of the names; JSON files contain one object each.
_OPENED = (".json", ".safetensors", ".jinja", ".model", ".txt", ".bin")

_JSON_OBJECTS = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "model.safetensors.index.json",
)

# The deepest published models have fewer than 200; building a million of them takes hours and all memory.
MOST_LAYERS = 1000
_NUMBER_OF_LAYERS = re.compile(r"(.*_)?n?(layers?|blocks|depth)")
_NUMBER_OF_HEADS = re.compile(r"num_(attention|key_value)_heads|n_(kv_)?heads?")
_ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")


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
        HubUnreachable: there is no network, and the cache does not contain it.
        ConfigurationError: `name` is not a hub id, or the hub does not give it.
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
                # transformers requests the list of files of a commit from the hub, also offline.
                local_files_only=constants.HF_HUB_OFFLINE,
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at_revision = f" at revision {revision}" if revision is not None else ""
        refused = isinstance(error, HfHubHTTPError | HFValidationError)
        raise (ConfigurationError if refused else HubUnreachable)(
            f"{name} is not a folder, and the hub did not give it{at_revision} ({first_line(error)}); {hint}"
        ) from error


WEIGHT_FILES = ("*.safetensors", "*.bin")


def weights_stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of change of each file of weights; it differs where the same folder gets other weights."""
    files = [folder] if is_gguf(folder) else sorted(each for kind in WEIGHT_FILES for each in folder.glob(kind))
    return tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)


def loaded_bytes(folder: Path) -> int:
    """Bytes of the files of weights that transformers reads, without copies of them in other layouts."""
    stamps = [each for each in weights_stamp(folder) if not each[0].startswith("consolidated")]
    safe = [each for each in stamps if each[0].endswith(".safetensors")]
    return sum(size for _, size, _ in safe or stamps)


# What decides what a model in a folder answers.
_OF_THE_MODEL = (
    "config.json",
    "generation_config.json",
    "*processor_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.py",
    "*.safetensors",
    "*.bin",
)
_WHOLE_BYTES, _STRIDE_BYTES, _SAMPLE_BYTES = 2**26, 2**20, 2**12


def model_digest(folder: Path) -> str:
    """SHA-256 by which the model in a folder is known again, wherever the folder is and whenever it was written.

    Over the names, sizes and contents of its configs, tokenizer and weights. Files of more than 64 MiB are sampled:
    their first MiB, which has a safetensors file's header, and 4 KiB of each further one. So it takes no minutes, and
    sees weights that were trained further; it does not see a change of single numbers.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    digest = hashlib.sha256()
    found = {path for pattern in _OF_THE_MODEL for path in folder.glob(pattern) if path.is_file()}
    for path in [folder] if is_gguf(folder) else sorted(found):
        try:
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                digest.update(file.read(size if size <= _WHOLE_BYTES else _STRIDE_BYTES))
                for place in range(_STRIDE_BYTES, size if size > _WHOLE_BYTES else 0, _STRIDE_BYTES):
                    file.seek(place)
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise ConfigurationError(f"{path}: {error.strerror or first_line(error)}") from error
    return digest.hexdigest()


def weights_digest(folder: Path) -> str:
    """SHA-256 over the names and bytes of the files of weights; it does not depend on where the folder is."""
    digest = hashlib.sha256()
    for name, _, _ in weights_stamp(folder):
        digest.update(name.encode())
        with (folder if is_gguf(folder) else folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_raw_config(folder: Path) -> Mapping[str, Any]:
    """`config.json` as written; raises ConfigurationError where there is none that can be read."""
    file = folder / "config.json"
    if not file.exists() and not file.is_symlink():
        raise ConfigurationError(f"{folder} contains no model: there is no config.json in it, nor a GGUF file")
    return _object_in(file)


def check_files(folder: Path, allow_hub_code: bool = False) -> Mapping[str, Any]:
    """The content of a folder's `config.json`, once every file that transformers would open can be opened and read;
    empty for a GGUF file, whose config transformers makes.

    Args:
        allow_hub_code: whether the config may name an attention that is code from the hub.

    Raises:
        ConfigurationError: a file that is not regular, not readable, or not the JSON that belongs there; more layers
            than `MOST_LAYERS`; no heads; code from the hub.
    """
    if is_gguf(folder):
        check_gguf(folder, MOST_LAYERS)
        return {}
    config = read_raw_config(folder)
    for file in sorted(folder.iterdir()):
        if file.name.endswith(_OPENED):
            refuse_unreadable(file)
    for name in _JSON_OBJECTS:
        if (folder / name).exists():
            _object_in(folder / name)
    for key in ("text_config", "vision_config"):
        if not isinstance(config.get(key, {}), dict | None):
            raise ConfigurationError(
                f"{folder / 'config.json'} is not possible: {key} is {type(config[key]).__name__}; give an object"
            )
    for key, value in _fields_of(config):
        if key in _ATTENTION and isinstance(value, str) and not allow_hub_code:
            refuse_hub_code(value, f"{key} in {folder / 'config.json'}")
        if isinstance(value, int) and value > MOST_LAYERS and _NUMBER_OF_LAYERS.fullmatch(key):
            raise ConfigurationError(
                f"{folder / 'config.json'}: {key} {value:.6g} is not possible; give at most {MOST_LAYERS}"
            )
        if isinstance(value, int) and value < 1 and _NUMBER_OF_HEADS.fullmatch(key):
            raise ConfigurationError(f"{folder / 'config.json'}: {key} {value} is not possible; give at least 1")
    if (folder / "generation_config.json").exists():
        _check_generation_config(folder)
    return config


def _object_in(file: Path) -> dict[str, Any]:
    content = read_json(file)
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file} contains no JSON object but {type(content).__name__}")
    return content


def _fields_of(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key of a config with its value, those of parts included; a file that was read is not nested deeply."""
    for key, value in config.items():
        yield key, value
        if isinstance(value, dict):
            yield from _fields_of(value)


def _check_generation_config(folder: Path) -> None:
    with vendor_errors_named(f"the generation_config.json in {folder} cannot be used"):
        found = GenerationConfig.from_pretrained(folder, local_files_only=True)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(found, name)
        ids = value if isinstance(value, list) else [value]
        if not all(each is None or type(each) is int for each in ids):
            raise ConfigurationError(
                f"the generation_config.json in {folder} cannot be used: {name} is {value!r}; give a token id"
            )


def refuse_own_code(raw: Mapping[str, Any], name: str, advice: str) -> None:
    """Raises ConfigurationError for a `config.json` whose model exists only in the checkpoint's own code."""
    kind = raw.get("model_type")
    if raw.get("auto_map") and (kind is None or (isinstance(kind, str) and kind not in CONFIG_MAPPING)):
        raise ConfigurationError(f"{name} needs code of its own (auto_map in config.json), {advice}")


def refuse_hub_code(attention: str | None, named: str, compatible: Sequence[str] | None = None) -> None:
    """Raises ConfigurationError for an attention implementation whose code would come from the hub and run.

    That is a repository's name, and with the package `kernels` also flash attention whose own package is not here.

    Args:
        named: what requests it.
        compatible: the flash attentions that the model takes; for another one transformers takes the first of them.
    """
    if attention is None:
        return
    plain = attention.removeprefix("paged|")
    if "/" in plain:
        raise ConfigurationError(f"{named}: {attention} is code from the hub, which is not run; give sdpa or eager")
    flash = re.fullmatch(r"flash_attention_([0-9]+)", plain)
    if flash is None or not is_kernels_available():
        # Without that package nothing is fetched: transformers says what is missing.
        return
    if compatible is not None and plain not in compatible:
        raise ConfigurationError(
            f"{named}: in place of {attention} this model takes a kernel that transformers would fetch from the hub "
            f"({compatible[0]}), which is not run; give sdpa or eager"
        )
    if not getattr(transformers.utils, f"is_flash_attn_{flash[1]}_available", lambda: False)():
        raise ConfigurationError(
            f"{named}: {attention} needs the package flash-attn and a GPU; transformers would fetch a kernel from the "
            "hub in its place, which is not run; install flash-attn, or give sdpa or eager"
        )


def refuse_not_finite(model: nn.Module, folder: Path) -> None:
    """Raises ConfigurationError for a weight that is NaN or infinite: nothing that such a model answers means anything.

    The numbers by which quantised weights are scaled are looked at like weights.
    """
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            _refuse_not_finite(name, tensor, folder)


def refuse_files_not_finite(folder: Path) -> None:
    """Raises ConfigurationError for a NaN or infinite weight in files that are quantised while they are loaded, since
    quantised numbers no longer show it.

    One tensor is in memory at a time; pickled files are not looked at.
    """
    for file in sorted(folder.glob("*.safetensors")):
        with vendor_errors_named(f"the weights in {file} cannot be read"), safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                _refuse_not_finite(name, handle.get_tensor(name), folder)


def _refuse_not_finite(name: str, tensor: torch.Tensor, folder: Path) -> None:
    # A number alone may be the bound of a range that has none, as in Gemma 4's tower for sounds.
    if not _is_finite(tensor) and not (tensor.dim() == 0 and tensor.isinf()):
        raise ConfigurationError(
            f"the weights in {folder} are not finite: {name} contains NaN or infinity; copy the files again, or "
            f"give a precision with enough range, such as bfloat16"
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or not tensor.is_floating_point():
        return True
    wide = tensor if tensor.element_size() > 1 else tensor.float()
    # A sum reads the weights once and keeps nothing; only one that overflows needs a look at each number.
    total = wide.sum(dtype=torch.float64 if wide.dtype == torch.float64 else torch.float32)
    return bool(total.isfinite()) or bool(wide.isfinite().all())


def refuse_misfit(found: Mapping[str, Any], folder: Path, shards: int = 1) -> None:
    """Raises ConfigurationError unless every tensor is there and fits: transformers alone would fill a gap with random
    numbers and a warning.

    Args:
        found: transformers' loading info.
        shards: processes that share the weights; where a shape differs, transformers may have divided them wrongly.

    Raises:
        ConfigurationError: weights are missing, of another shape, or left over.
    """
    misfit, advice = f"the weights in {folder} do not fit its config", ""
    if shards > 1 and found["mismatched_keys"]:
        misfit = (
            f"--tensor_parallel {shards}: transformers divides the weights of this model wrongly, or those in {folder} "
            "do not fit its config"
        )
        advice = "; give --device_map auto, which does not divide them"
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in found[what])
        if names:
            raise ConfigurationError(
                f"{misfit}: {len(names)} {what.replace('_', ' ')}, for example {names[0]}{advice}"
            )


def refuse_without_weights(
    folder: Path,
    name: str,
    way_out: str = "give a folder with weights, or --random_weights to profile the architecture alone",
) -> None:
    """Raises ConfigurationError for a folder without safetensors."""
    if not is_gguf(folder) and not any(folder.glob("*.safetensors")):
        raise ConfigurationError(f"{name} has a config.json but no *.safetensors; {way_out}")


def loaded_weights(folder: Path, load: Callable[..., Any], *, shards: int = 1, **options: Any) -> Any:
    """The model that `load` makes of a folder, all of whose weights are there, fit the config and are finite.

    Args:
        load: a `from_pretrained` of transformers, which gets the options.
        shards: processes that share the weights.

    Raises:
        ConfigurationError: weights that cannot be loaded, do not fit the config one to one, or are not finite.
        OutOfMemory: they do not fit the device.
    """
    again = "; copy or download a file that cannot be read again"
    with vendor_errors_named(f"the weights in {folder} cannot be loaded", again):
        # Tensors of another shape are refused by name.
        model, found = load(output_loading_info=True, ignore_mismatched_sizes=True, **options)
        refuse_misfit(found, folder, shards)
    refuse_not_finite(model, folder)
    keep_origin(model, folder)
    return model


INDEX_FILE = "model.safetensors.index.json"
_FLOATING = ("F64", "F32", "F16", "BF16")
_NAMED_AT_MOST = 5
Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor, by the header of its file; `dtype` is safetensors' name, such as "F32"."""

    file: Path
    shape: Shape
    dtype: str


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder by its name; headers are read, no data.

    With `model.safetensors.index.json` the files are those that it names, else all `*.safetensors`.

    Raises:
        ConfigurationError: no files; a file that the index names is not there, or one is there that it does not name;
            a file that is not whole; a tensor that is in two files, or is not stored in floating point.
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
            f"{folder}: {first_of(other, _NAMED_AT_MOST)} not stored in floating point ({found[other[0]].dtype}); "
            "quantised weights in this layout are not supported"
        )
    return found


def _files_of(folder: Path) -> list[Path]:
    present = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX_FILE
    if not index.is_file():
        refuse_without_weights(folder, str(folder))
        return present
    try:
        named = sorted({folder / str(file) for file in read_json(index)["weight_map"].values()})
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{index} is not an index of safetensors: {first_line(error)}") from error
    missing = [file.name for file in named if not file.is_file()]
    if missing:
        raise ConfigurationError(
            f"{folder}: {len(missing)} of the {len(named)} files that {INDEX_FILE} names are not there: "
            f"{first_of(missing, _NAMED_AT_MOST)}; the download is not complete, repeat it"
        )
    left_over = [file.name for file in present if file not in named]
    if left_over:
        raise ConfigurationError(
            f"{folder}: {INDEX_FILE} does not name {first_of(left_over, _NAMED_AT_MOST)}; remove what is not its own"
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
    """A tensor as a view of its file.

    The file is mapped anew for each: pages that were read count as this process's memory for as long as the file stays
    mapped, which here is as long as the tensor exists.
    """
    with safe_open(stored.file, framework="pt") as handle:
        tensor: torch.Tensor = handle.get_tensor(name)
    return tensor


def refuse_misfit_tensors(found: Mapping[str, Shape], expected: Mapping[str, Shape], where: str) -> None:
    """Raises ConfigurationError unless every tensor that the config needs is there in its shape, and no other.

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
    complaints = [f"{len(names)} {kind}: {first_of(names, _NAMED_AT_MOST)}" for kind, names in kinds.items() if names]
    if complaints:
        raise ConfigurationError(f"the tensors in {where} do not fit its config; {'; '.join(complaints)}")
