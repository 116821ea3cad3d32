"""Finding and loading the causal language model and the tokenizer of a text experiment."""

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from experiment_core_utils.config.parts import say_only_model
from experiment_core_utils.config.text import TextConfig
from experiment_core_utils.models.common.checkpoint_files import (
    check_files,
    download,
    loaded_bytes,
    loaded_weights,
    refuse_files_not_finite,
    refuse_hub_code,
    refuse_own_code,
    weights_stamp,
)
from experiment_core_utils.models.common.gguf_files import (
    config_in,
    loading_options,
    refuse_quantised_again,
    source_of,
    tokenizer_in,
)
from experiment_core_utils.models.common.placement import OFFLOADED, refuse_offload
from experiment_core_utils.models.common.quantisation import (
    own_method,
    refuse_impossible,
    refuse_wrong_4bit_weights,
    transformers_config,
)
from experiment_core_utils.models.common.text_generation import only_values_of
from experiment_core_utils.models.common.vendor_errors import vendor_errors_named
from experiment_core_utils.models.costs.memory_check import Loading, ModelSizes, Room, check_memory
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.generate import vision_entry
from experiment_core_utils.models.hf.request_state import stages_unsupported_reason
from experiment_core_utils.models.hf.requests import ChatOptions, HFRequests
from experiment_core_utils.models.source import FoundFiles
from experiment_core_utils.primitives.device import choose_device, choose_dtype, visible_gpus
from experiment_core_utils.primitives.errors import ConfigurationError, ImpossibleCombination
from experiment_core_utils.primitives.files import is_gguf
from experiment_core_utils.primitives.private_apis import compatible_attentions

SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
WEIGHTS = ("*.safetensors",)
PICKLED_WEIGHTS = ("pytorch_model*.bin", "pytorch_model*.json")
CODE = ("*.py",)
# Copies of the same weights in other layouts.
IGNORED_FILES = ("*/*", "consolidated*")
HINT = "give a folder with config.json and safetensors, or a hub id such as allenai/OLMoE-1B-7B-0924"


@dataclass(frozen=True)
class LanguageModelSource:
    """A checkpoint that was found, before any weight is read; transformers reads it, unless a subclass does."""

    name: str  #: the folder or hub id as given, or the only model in that folder
    folder: Path  #: where the files are; of a GGUF file itself
    revision: str | None  #: commit on the hub, None for a local folder
    config: PreTrainedConfig  #: the model's config, as transformers or this project has it
    quant_method: str | None  #: how the weights are quantised already, None where they are not

    @property
    def model_type(self) -> str:
        """The model type in its config, such as "llama"."""
        return str(self.config.model_type)

    @property
    def stamp(self) -> tuple[object, ...]:
        """The identity of these weights: the commit on the hub, else the files of the folder."""
        return (self.name, self.revision) if self.revision else (str(self.folder.resolve()), weights_stamp(self.folder))

    def read_tokenizer(self, trust_remote_code: bool) -> Any:
        """The checkpoint's tokenizer; raises ConfigurationError where there is none that can be used."""
        needed = "put its tokenizer.json and tokenizer_config.json there"
        with vendor_errors_named(f"{self.folder} has no usable tokenizer ({needed})"):
            return tokenizer_in(self.folder, trust_remote_code=trust_remote_code)

    def read_model(self, folder: Path, config: TextConfig, **options: Any) -> PreTrainedModel:
        """The model of the weights in `folder`; raises what `loaded_weights` does.

        Args:
            options: of `from_pretrained`.
        """
        pickled = {"use_safetensors": None} if config.allow_pickled_weights else {}
        model: PreTrainedModel = loaded_weights(
            folder,
            partial(AutoModelForCausalLM.from_pretrained, **source_of(folder)),
            trust_remote_code=config.trust_remote_code,
            **loading_options(folder) | pickled | options,
        )
        return model


# What reads the checkpoints of one layout, None of others; raises ConfigurationError for a config that cannot be used.
TextBackend = Callable[[TextConfig, FoundFiles], LanguageModelSource | None]


def transformers_language_model(config: TextConfig, files: FoundFiles) -> LanguageModelSource:
    """The requested checkpoint as transformers reads it; raises ConfigurationError where it cannot use the config."""
    if not config.trust_remote_code:
        refuse_own_code(files.config, config.model_name, "which runs only with trust_remote_code: true")
    with vendor_errors_named(f"the config in {files.folder} cannot be used"):
        native = config_in(files.folder, config.trust_remote_code)
    return LanguageModelSource(config.model_name, files.folder, files.revision, native, own_method(files.config))


def device_of(config: TextConfig) -> torch.device:
    """The device of this process; raises ConfigurationError for a GPU that does not exist."""
    return choose_device(config.device, int(os.environ.get("LOCAL_RANK", "0")))


def find_language_model(config: TextConfig, backends: Sequence[TextBackend]) -> LanguageModelSource:
    """Find a checkpoint and read its config; of a hub id, fetch the small files.

    Args:
        backends: in the order in which they are asked; the last one takes every checkpoint.

    Raises:
        ConfigurationError: no such folder or hub id, or no config in it that can be used.
        ImpossibleCombination: a revision for a folder.
    """
    folder, revision = Path(config.model_name), None
    if not folder.is_dir() and not is_gguf(folder):
        patterns = SMALL_FILES + (CODE if config.trust_remote_code else ())
        folder = download(config.model_name, patterns, HINT, revision=config.revision, ignored=IGNORED_FILES)
        revision = folder.name
    elif config.revision is not None:
        raise ImpossibleCombination(
            f"revision {config.revision} is for models of the hub, and {config.model_name} is a file or folder; drop it"
        )
    files = FoundFiles(folder, revision, check_files(folder, allow_hub_code=config.trust_remote_code))
    source = next(found for backend in backends if (found := backend(config, files)) is not None)
    say_only_model(config.model_name)
    return source


def refuse_unloadable(config: TextConfig, source: LanguageModelSource) -> None:
    """Refuse what this machine cannot do with a checkpoint, before any weight is read.

    Raises:
        ConfigurationError: no causal language model or tokenizer in it, no weights in a folder, a package or an
            ability of the GPU is missing.
        ImpossibleCombination: the values do not go together.
    """
    device = device_of(config)
    refuse_quantised_again(source.folder, config.quantization_config.quantization or config.fp_precision == "float8")
    refuse_impossible(config, source.quant_method, device)
    if source.revision is None:
        _validate_weight_files(config, source)
    load_tokenizer(config, source)
    _validate_architecture(config, source, device)


def _validate_weight_files(config: TextConfig, source: LanguageModelSource) -> None:
    if is_gguf(source.folder) or any(source.folder.glob("*.safetensors")):
        return
    has_pickled = any(source.folder.glob("pytorch_model*.bin"))
    if has_pickled and config.allow_pickled_weights:
        return
    way_out = "allow_pickled_weights: true loads its pytorch_model*.bin" if has_pickled else HINT
    raise ConfigurationError(f"{source.name} has a config.json but no *.safetensors; {way_out}")


def _validate_architecture(config: TextConfig, source: LanguageModelSource, device: torch.device) -> None:
    """Build the model without storage; raises ConfigurationError for what its code refuses."""
    if "/" in (config.attn_implementation or "") and not config.trust_remote_code:
        raise ConfigurationError(
            f"attn_implementation {config.attn_implementation} is code from the hub; it runs with "
            "trust_remote_code: true"
        )
    if not config.trust_remote_code:
        compatible = compatible_attentions(AutoModelForCausalLM, source.config)
        refuse_hub_code(config.attn_implementation, "attn_implementation", compatible)
    skeleton = _skeleton(config, source, choose_dtype(config.fp_precision, device))
    refuse_wrong_4bit_weights(config, source.config, device, lambda: skeleton)


def _skeleton(config: TextConfig, source: LanguageModelSource, dtype: torch.dtype) -> PreTrainedModel:
    """The model without storage; raises ConfigurationError where its code refuses."""
    what = f"{source.name} ({source.model_type}) cannot be built as a causal language model"
    if config.attn_implementation is not None:
        what += f" with attn_implementation {config.attn_implementation}"
    with vendor_errors_named(what), torch.device("meta"):
        skeleton: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(source.config),
            dtype=dtype,
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
        )
    return skeleton


def load_tokenizer(config: TextConfig, source: LanguageModelSource) -> Any:
    """The checkpoint's tokenizer, padding on the left with its end-of-sequence token.

    Raises:
        ConfigurationError: there is none that can be used, or it has no end-of-sequence token.
    """
    tokenizer = source.read_tokenizer(config.trust_remote_code)
    if tokenizer.eos_token is None:
        raise ConfigurationError(
            f"the tokenizer in {source.folder} has no end-of-sequence token, which generation ends at and pads with; "
            "name one as eos_token in its tokenizer_config.json"
        )
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_language_model(config: TextConfig, source: LanguageModelSource) -> PreTrainedModel:
    """The model in evaluation mode, in the requested precision, on this process's device or sharded over the GPUs.

    Raises:
        ConfigurationError: weights cannot be read, or do not fit the config one to one.
        OutOfMemory: it does not fit the device, or all GPUs together.
    """
    device = device_of(config)
    dtype = choose_dtype(config.fp_precision, device)
    # A quantised checkpoint says itself what it is multiplied in.
    keeps_own = source.quant_method is not None and config.fp_precision == "auto"
    options = {
        "dtype": "auto" if keeps_own else dtype,
        "attn_implementation": config.attn_implementation,
        "quantization_config": transformers_config(config, dtype),
        "device_map": config.device_map or {"": device},
    }
    given = {name: value for name, value in options.items() if value is not None}
    if source.quant_method is None:
        _check_memory(config, source, None)
    folder = _with_weights(config, source)
    if source.quant_method is not None:
        _check_memory(config, source, loaded_bytes(folder))
    if options["quantization_config"] is not None:
        refuse_files_not_finite(folder)
    model = source.read_model(folder, config, **given)
    # Times of parts on the host or the disk would not be the GPUs'.
    refuse_offload(model, OFFLOADED, "on the GPUs")
    return model.eval()


# What to give where a model does not fit.
_FLAGS = {
    "bfloat16": "fp_precision: bfloat16",
    "float8": "fp_precision: float8",
    "device_map": "device_map: auto",
    "8bit": "quantization_config: {quantization: true, load_in_8bit: true}",
    "4bit": "quantization_config: {quantization: true, load_in_4bit: true}",
}


def _check_memory(config: TextConfig, source: LanguageModelSource, stored_bytes: int | None) -> None:
    device, requested = device_of(config), config.quantization_config
    dtype = choose_dtype(config.fp_precision, device)
    width = "4bit" if requested.load_in_4bit else "8bit" if requested.load_in_8bit else "none"
    gpus = visible_gpus() if device.type == "cuda" else []
    loading = Loading(
        source.name,
        source.config,
        dtype,
        device,
        Room.of(device) if config.device_map is None else Room.of(*gpus),
        "float8" if config.fp_precision == "float8" else width,
        spread_room=partial(Room.of, *gpus) if len(gpus) > 1 and config.device_map is None else None,
        rows=config.batch_size or 1,
        tokens=config.max_input_tokens + config.max_output_tokens,
    )
    check_memory(ModelSizes.of(_skeleton(config, source, dtype), stored_bytes), loading, _FLAGS)


def _with_weights(config: TextConfig, source: LanguageModelSource) -> Path:
    if source.revision is None:
        return source.folder
    patterns = WEIGHTS + (PICKLED_WEIGHTS if config.allow_pickled_weights else ())
    folder = download(source.name, patterns, HINT, revision=source.revision, ignored=IGNORED_FILES)
    _validate_weight_files(config, source)
    return folder


def staged_language_model(
    config: TextConfig, model: Any, tokenizer: Any
) -> tuple[TransformersModel | None, str | None]:
    """What runs requests by engines or graphs, as the timed samples of a knob run; or None, and why only the model's
    own `generate()` can run this experiment. The model stays as it is.
    """
    reason = _generate_reason(config, model)
    if reason is not None:
        return None, reason
    # Prompts are in the template already.
    chat = ChatOptions(no_chat_template=tokenizer.chat_template is not None)
    try:
        # The adapter's own values of generation are put in here.
        with only_values_of(model.generation_config, model):
            requests = HFRequests(tokenizer, model.config, config.model_name, chat)
            staged = TransformersModel(config.model_name, model, requests, "auto")
    except ConfigurationError as error:
        return None, str(error)
    failure = staged.knobs.failure
    return (staged, None) if failure is None else (None, f"its decoder alone runs no prompt: {failure}")


def _generate_reason(config: TextConfig, model: Any) -> str | None:
    """Why `generate()` runs an experiment whatever the blocks of its model are; None where stages may."""
    mode = config.decoder_config.decoding_mode
    is_causal = isinstance(model, PreTrainedModel) and type(model.config) in MODEL_FOR_CAUSAL_LM_MAPPING
    reasons = (
        (f"decoding_mode {mode} draws tokens", mode != "greedy"),
        (f"mixed_precision {config.mixed_precision}", config.mixed_precision != "no"),
        ("only the model's modules follow attn_implementation", config.attn_implementation is not None),
        (f"{type(model).__name__} is not a causal language model of transformers", not is_causal),
    )
    reason = next((reason for reason, is_so in reasons if is_so), None)
    if reason is not None:
        return reason
    return "the model has a vision part" if vision_entry(model) is not None else stages_unsupported_reason(model)
