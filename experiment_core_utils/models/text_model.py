"""Finding and loading the causal language model and the tokenizer of a text experiment."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from experiment_core_utils.config.parts import say_only_model
from experiment_core_utils.config.text import TextConfig
from experiment_core_utils.models.common.checkpoint_files import (
    check_files,
    download,
    loaded_weights,
    refuse_hub_code,
    refuse_own_code,
    refuse_without_weights,
    weights_stamp,
)
from experiment_core_utils.models.common.gguf_files import config_in, tokenizer_in
from experiment_core_utils.models.common.placement import OFFLOADED, refuse_device_map, refuse_offload
from experiment_core_utils.models.common.quantisation import own_method
from experiment_core_utils.models.common.text_generation import only_values_of
from experiment_core_utils.models.common.vendor_errors import vendor_errors_named
from experiment_core_utils.models.costs.memory_check import check_memory
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.generate import encoder_of
from experiment_core_utils.models.hf.loader import (
    HFSource,
    LoadOptions,
    load_weights,
    memory_of,
    refuse_quantisation,
    skeleton_of,
)
from experiment_core_utils.models.hf.request_state import stages_unsupported_reason
from experiment_core_utils.models.hf.requests import ChatOptions, HFRequests
from experiment_core_utils.models.molmoe.checkpoint.published import published_language_tensors
from experiment_core_utils.models.molmoe.checkpoint.published_config import (
    PUBLISHED_MODEL_TYPE,
    config_from_published,
    load_published_tokenizer,
)
from experiment_core_utils.models.molmoe.language_model import MolmoeForCausalLM
from experiment_core_utils.primitives.device import choose_device, choose_dtype
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


@dataclass(frozen=True, kw_only=True)
class LanguageModelSource(HFSource):
    """A checkpoint of which a text experiment runs the causal language model, whatever else is in it."""

    revision: str | None  #: commit on the hub, None for a local folder
    requested: TextConfig

    auto_class = AutoModelForCausalLM
    kind = " as a causal language model"

    @property
    def trust_remote_code(self) -> bool:  # type: ignore[override]
        """Whether code that comes with the checkpoint is run."""
        return self.requested.trust_remote_code

    @property
    def stamp(self) -> tuple[object, ...]:
        """The identity of these weights: the commit on the hub, else the files of the folder."""
        return (self.name, self.revision) if self.revision else (str(self.folder.resolve()), weights_stamp(self.folder))

    @property
    def load_options(self) -> LoadOptions:
        """How this process loads the model; raises ConfigurationError for a GPU that does not exist."""
        return load_options_of(self.requested)

    def read_tokenizer(self) -> Any:
        """The checkpoint's tokenizer; raises ConfigurationError where there is none that can be used."""
        needed = "put its tokenizer.json and tokenizer_config.json there"
        with vendor_errors_named(f"{self.folder} has no usable tokenizer ({needed})"):
            return tokenizer_in(self.folder, trust_remote_code=self.trust_remote_code)

    def read_model(self, shards: int, **options: Any) -> PreTrainedModel:
        pickled = {"use_safetensors": None} if self.requested.allow_pickled_weights else {}
        return super().read_model(shards, **pickled, **options)


class PublishedMolmoe(LanguageModelSource):
    """A Molmo in its published layout; `config` is the native one, and none of the checkpoint's own code is run."""

    def read_tokenizer(self) -> Any:
        return load_published_tokenizer(self.folder, self.config)

    def read_model(self, shards: int, **options: Any) -> PreTrainedModel:
        """Tensors of the vision part are not read."""
        model: PreTrainedModel = loaded_weights(self.folder, self._assembled, **options)
        model.name_or_path = str(self.folder)
        return model

    def _assembled(self, dtype: torch.dtype, **options: Any) -> Any:
        tensors = published_language_tensors(self.folder, dtype)
        return MolmoeForCausalLM.from_pretrained(None, config=self.config, state_dict=tensors, dtype=dtype, **options)


def load_options_of(config: TextConfig) -> LoadOptions:
    """How this process loads a model; raises ConfigurationError for a GPU that does not exist."""
    device = choose_device(config.device, int(os.environ.get("LOCAL_RANK", "0")))
    dtype = choose_dtype(config.fp_precision, device)
    return LoadOptions(dtype, device, config.attn_implementation, None, config, config.device_map)


def validate_loadable(config: TextConfig) -> LanguageModelSource:
    """The checkpoint of a text experiment, once everything that this machine might not be able to do with it is
    checked, before any weight is read; of a hub id, the small files are fetched.

    Raises:
        ConfigurationError: no such folder or hub id; no config, causal language model or tokenizer in it that can be
            used; no weights in a folder; a package or an ability of the GPU is missing.
        ImpossibleCombination: the values do not go together, such as a revision and a folder.
    """
    options = load_options_of(config)
    refuse_device_map(config.device_map, options.device, "device_map auto")
    source = _found(config)
    refuse_quantisation(source, options)
    if source.revision is None:
        _refuse_without_weights(source)
    load_tokenizer(source)
    attention = config.attn_implementation
    if not config.trust_remote_code:
        if "/" in (attention or ""):
            raise ConfigurationError(
                f"attn_implementation {attention} is code from the hub; it runs with trust_remote_code: true"
            )
        refuse_hub_code(attention, "attn_implementation", compatible_attentions(AutoModelForCausalLM, source.config))
    skeleton_of(source, attention)
    return source


def _found(config: TextConfig) -> LanguageModelSource:
    folder, revision = Path(config.model_name), None
    if not folder.is_dir() and not is_gguf(folder):
        patterns = SMALL_FILES + (CODE if config.trust_remote_code else ())
        folder = download(config.model_name, patterns, HINT, revision=config.revision, ignored=IGNORED_FILES)
        revision = folder.name
    elif config.revision is not None:
        raise ImpossibleCombination(
            f"revision {config.revision} is for models of the hub, and {config.model_name} is a file or folder; drop it"
        )
    raw, kind = check_files(folder, allow_hub_code=config.trust_remote_code), LanguageModelSource
    if raw.get("model_type") == PUBLISHED_MODEL_TYPE:
        kind, native = PublishedMolmoe, config_from_published(raw, folder)
    else:
        if not config.trust_remote_code:
            refuse_own_code(raw, config.model_name, "which runs only with trust_remote_code: true")
        with vendor_errors_named(f"the config in {folder} cannot be used"):
            native = config_in(folder, config.trust_remote_code)
    say_only_model(config.model_name)
    return kind(config.model_name, folder, native, own_method(raw), revision=revision, requested=config)


def _refuse_without_weights(source: LanguageModelSource) -> None:
    has_pickled, is_allowed = any(source.folder.glob("pytorch_model*.bin")), source.requested.allow_pickled_weights
    if not (has_pickled and is_allowed):
        way_out = "allow_pickled_weights: true loads its pytorch_model*.bin" if has_pickled else HINT
        refuse_without_weights(source.folder, source.name, way_out)


def load_tokenizer(source: LanguageModelSource) -> Any:
    """The checkpoint's tokenizer, padding on the left with its end-of-sequence token.

    Raises:
        ConfigurationError: there is none that can be used, or it has no end-of-sequence token.
    """
    tokenizer = source.read_tokenizer()
    if tokenizer.eos_token is None:
        raise ConfigurationError(
            f"the tokenizer in {source.folder} has no end-of-sequence token, which generation ends at and pads with; "
            "name one as eos_token in its tokenizer_config.json"
        )
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_language_model(source: LanguageModelSource) -> PreTrainedModel:
    """The model in evaluation mode, in the requested precision, on this process's device or sharded over the GPUs.

    Raises:
        ConfigurationError: weights cannot be read, or do not fit the config one to one.
        OutOfMemory: it does not fit the device, or all GPUs together.
    """
    is_quantised = source.quant_method is not None
    if not is_quantised:
        _check_memory(source)
    if source.revision is not None:
        patterns = WEIGHTS + (PICKLED_WEIGHTS if source.requested.allow_pickled_weights else ())
        download(source.name, patterns, HINT, revision=source.revision, ignored=IGNORED_FILES)
        _refuse_without_weights(source)
    if is_quantised:
        # What it takes is known by its files.
        _check_memory(source)
    model = load_weights(source, source.load_options)
    # Times of parts on the host or the disk would not be the GPUs'.
    refuse_offload(model, OFFLOADED, "on the GPUs")
    return model


# What to give where a model does not fit.
_FLAGS = {
    "bfloat16": "fp_precision: bfloat16",
    "float8": "fp_precision: float8",
    "device_map": "device_map: auto",
    "8bit": "quantization_config: {quantization: true, load_in_8bit: true}",
    "4bit": "quantization_config: {quantization: true, load_in_4bit: true}",
}


def _check_memory(source: LanguageModelSource) -> None:
    config, options = source.requested, source.load_options
    width = "float8" if options.width == "fp8" else options.width
    sizes, loading = memory_of(source, options.dtype, options.device, width, config.device_map, hosts=())
    tokens = config.max_input_tokens + config.max_output_tokens
    check_memory(sizes, replace(loading, rows=config.batch_size or 1, tokens=tokens), _FLAGS)


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
    return "the model has a vision part" if encoder_of(model) is not None else stages_unsupported_reason(model)
