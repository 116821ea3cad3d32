"""In: a configuration; out: its model on its device: staged for the profiler, or causal with a tokenizer for text.

Before any weight is read, `find_model` returns the limits that a config sets to the knobs, and `validate_loadable`
what this machine cannot do of a text experiment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from experiment_core_utils.config.parts import ModelConfig, say_only_model
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.config.text import Quantisation, TextConfig, validated
from experiment_core_utils.knobs.interface import KnobLimits
from experiment_core_utils.models.common.checkpoint_files import check_files, download, refuse_hub_code
from experiment_core_utils.models.common.preferences import Preferences, preferences_in
from experiment_core_utils.models.common.private_apis import compatible_attentions
from experiment_core_utils.models.common.quantisation import supported_types
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.generate import loose_tensors
from experiment_core_utils.models.hf.loader import (
    HFSource,
    LoadOptions,
    find_hf_model,
    limits_of,
    load_hf_model,
    refuse_as_loaded,
)
from experiment_core_utils.models.hf.request_work import TransformersWork
from experiment_core_utils.models.hf.requests import DEFAULT_CHAT, ChatOptions
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.models.molmoe import MolmoeConfig
from experiment_core_utils.models.molmoe.checkpoint.original import is_original_checkpoint
from experiment_core_utils.models.molmoe.checkpoint.published import PUBLISHED_MODEL_TYPE
from experiment_core_utils.models.molmoe.loader import find_molmoe_config, load_molmoe, molmoe_limits
from experiment_core_utils.models.molmoe.request_work import MolmoeWork
from experiment_core_utils.models.request_work import PlannedRequests
from experiment_core_utils.models.text_model import load_language_model, load_tokenizer, validate_loadable
from experiment_core_utils.primitives.device import choose_device, choose_dtype, release_cached_memory
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import is_gguf
from experiment_core_utils.records.text import QuantSupport
from experiment_core_utils.tasks.interface import PromptFamily, Task

CHECKPOINT_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
MODEL_HINT = "give a folder with config.json and safetensors, a GGUF file, or a hub id such as allenai/MolmoE-1B-0924"


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint that was found, before any weight is read."""

    name: str  #: the path or hub id as given
    folder: Path  #: where the files lie; the file itself of a GGUF
    #: the native config of a MolmoE, converted where the checkpoint has the published layout; else the one of
    #: transformers
    config: PreTrainedConfig
    limits: KnobLimits  #: what can be set in it
    is_published_layout: bool  #: tensors have MolmoE's published Hugging Face names
    revision: str | None  #: commit of the hub, None for a local folder
    hf: HFSource | None = None  #: of a model of transformers; None for MolmoE

    @property
    def takes_pictures(self) -> bool:
        """Whether requests contain the samples' pictures."""
        return self.hf is None or self.hf.takes_pictures

    @property
    def can_pause(self) -> bool:
        """Whether the loaded model is a `PausableModel`."""
        return self.hf is None

    @property
    def is_near_matmul(self) -> bool:
        """Whether the model comes so near to the speed of a matrix product that this is a rough estimate of its own; of
        others than MolmoE that is not known.
        """
        return self.hf is None

    def decoding_preferences(self) -> Preferences:
        """What the checkpoint prefers for decoding, and what of it is kept."""
        if self.hf is None:
            return preferences_in(self.folder, None, self.name).nothing_kept()
        return preferences_in(self.folder, self.hf.requests.tokenizer, self.name)

    def planned_requests(self, task: Task, sample_ids: Sequence[int], limit: int) -> PlannedRequests:
        """What requests with answers of at most `limit` tokens will be.

        Raises:
            ConfigurationError: none of the samples can be read.
        """
        if self.hf is not None:
            return TransformersWork(self.hf, task, sample_ids, limit)
        return MolmoeWork(self, task, sample_ids, limit)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model answers in a chat, and so in sentences; MolmoE has its own form and answers in short."""
        return self.hf is not None and self.hf.requests.chat_template is not None

    @property
    def model_type(self) -> str:
        """What transformers calls its architecture."""
        return self.config.model_type

    @property
    def prompt_family(self) -> PromptFamily:
        """How the model is asked."""
        return "molmo" if self.hf is None else self.hf.requests.prompt_family

    @property
    def chat_template_use(self) -> str:
        """Whether prompts go through a chat template: `applied`, `none` where there is none, or `off`."""
        return "none" if self.hf is None else self.hf.requests.chat_template_use

    @property
    def prompt_date(self) -> str | None:
        """The date that is today in every prompt; None where the chat template does not ask for it."""
        return None if self.hf is None else self.hf.requests.prompt_date


def find_model(path: str, cache_dir: Path | None = None, chat: ChatOptions = DEFAULT_CHAT) -> ModelSource:
    """Find a checkpoint and read its config, no weights.

    Args:
        chat: what is requested of its chat template.

    Raises:
        ConfigurationError: no such folder or hub id, no config in it, or an architecture that is not supported.
    """
    folder = Path(path)
    revision = None
    if not folder.is_dir() and not is_gguf(folder):
        folder = download(path, CHECKPOINT_FILES, MODEL_HINT, cache_dir)
        revision = folder.name
    if is_original_checkpoint(folder):
        raise ConfigurationError(
            f"{path} is in the layout of the original training code; convert it with scripts/convert_checkpoint.py"
        )
    raw = check_files(folder)
    model_type = raw.get("model_type")
    if model_type in (PUBLISHED_MODEL_TYPE, MolmoeConfig.model_type):
        config = find_molmoe_config(folder, raw)
        chat.refuse_without_template(path)
        say_only_model(path)
        is_published_layout = model_type == PUBLISHED_MODEL_TYPE
        return ModelSource(path, folder, config, molmoe_limits(config), is_published_layout, revision)
    found = find_hf_model(path, folder, raw, chat)
    say_only_model(path)
    return ModelSource(path, folder, found.config, limits_of(found), False, revision, found)


def find_requested_model(config: ProfilingConfig) -> ModelSource:
    """The model of a profiling run, to be asked as requested; raises what `find_model` does."""
    chat = ChatOptions(config.task.system_prompt, config.task.no_chat_template)
    return find_model(config.model.model_path, config.task.hf_cache_dir, chat)


@dataclass(frozen=True)
class RequestedQuantisation:
    """The flags of a profiling run as a `QuantisationOptions`."""

    model_name: str
    fp_precision: str
    quantization_config: Quantisation

    @classmethod
    def of(cls, config: ModelConfig) -> "RequestedQuantisation":
        """4 and 8 bits by bitsandbytes' defaults."""
        width = config.quantization
        requested = Quantisation(
            quantization=width != "none", load_in_4bit=width == "4bit", load_in_8bit=width == "8bit"
        )
        return cls(config.model_path, config.precision, requested)


def load_staged_model(
    config: ModelConfig, source: ModelSource, device: torch.device, *, is_profiled: bool = False
) -> StagedModel:
    """The model on `device`, in the requested precision, ready to be measured.

    With `random_weights` the weights come from a fixed seed; config, tokenizer and image processor are read.

    Args:
        is_profiled: whether PyTorch's profiler is used on it.
    """
    compatible = None if source.hf is None else compatible_attentions(source.hf.auto_class, source.hf.config)
    refuse_hub_code(config.attn_implementation, "--attn_implementation", compatible)
    dtype = choose_dtype(config.precision, device)
    if source.hf is not None:
        load_options = LoadOptions(
            dtype,
            device,
            config.attn_implementation,
            config.experts_implementation,
            RequestedQuantisation.of(config),
            config.device_map,
            config.tensor_parallel or 1,
        )
        model = load_hf_model(source.hf, load_options, config.random_weights)
        made = loose_tensors(model)
        staged = TransformersModel(
            source.name, model, source.hf.requests, config.execution, eager_reason=eager_reason(config, is_profiled)
        )
        refuse_as_loaded(source.hf, source.limits, model, staged.knobs, made)
        return staged
    if config.quantization != "none":
        raise ConfigurationError(
            f"--quantization {config.quantization} is for models of transformers; MolmoE runs in full precision "
            f"(bitsandbytes quantises linear layers, and the experts, nearly all of its weights, are not linear "
            f"layers)"
        )
    return load_molmoe(source, config, dtype, device, eager_reason(config, is_profiled))


def eager_reason(config: ModelConfig, is_profiled: bool) -> str | None:
    """Why `--execution auto` leaves the modules in place, whatever the model: another flag is about them."""
    if config.execution != "auto":
        return None
    about_modules = (
        ("--use_profiler", is_profiled),
        ("--attn_implementation", config.attn_implementation is not None),
        ("--experts_implementation", config.experts_implementation is not None),
    )
    given = [flag for flag, is_given in about_modules if is_given]
    return f"only the model's modules follow {' and '.join(given)}" if given else None


def detect_supported_quant_types() -> QuantSupport:
    """What this machine can quantise while loading, on the GPU where it has one, else on the CPU.

    4 bits are bitsandbytes' "nf4". 8 bits are its "int8"; where it is missing and the GPU has them (compute capability
    8.9 or more, with the package kernels) they are "fp8", which `fp_precision: float8` asks for. Never raises.
    """
    return supported_types(choose_device("auto"))


def load_model_tokenizer(configs: Any) -> tuple[PreTrainedModel, Any]:
    """The causal language model of a text experiment in evaluation mode on its device, and its tokenizer.

    Of a MolmoE checkpoint it is the language model alone, without vision tower and connector. The tokenizer pads on
    the left with its end-of-sequence token.

    Args:
        configs: in any form that `config.text.validated` takes.

    Raises:
        ConfigurationError: see `validate_loadable`; or weights are not there, or do not fit the config one to one.
        OutOfMemory: the model does not fit the device, or with `device_map` all GPUs together.
    """
    config = validated(configs)
    source = validate_loadable(config)
    tokenizer = load_tokenizer(config, source)
    model = load_language_model(config, source)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


# What decides which model is in memory; experiments that share it share the model.
_OF_THE_MODEL = frozenset(
    {
        "model_name",
        "revision",
        "allow_pickled_weights",
        "trust_remote_code",
        "fp_precision",
        "quantization_config",
        "device_map",
        "attn_implementation",
    }
)


@dataclass
class LastModel:
    """The language model and tokenizer that were loaded last, for text experiments that share them."""

    accelerator: Accelerator
    _key: str | None = None
    _loaded: tuple[Any, Any] | None = None

    def get(self, config: TextConfig) -> tuple[Any, Any]:
        """Model and tokenizer, loaded where those in memory are others; raises what `load_model_tokenizer` does."""
        key = config.model_dump_json(include=set(_OF_THE_MODEL))
        if self._loaded is None or key != self._key:
            self.drop()
            model, tokenizer = load_model_tokenizer(config)
            if config.mixed_precision != "no":
                model = self.accelerator.prepare_model(model, evaluation_mode=True)
            self._key, self._loaded = key, (model, tokenizer)
        return self._loaded

    def drop(self) -> None:
        """Forget the model, so that its memory is free for another."""
        self._key, self._loaded = None, None
        release_cached_memory(self.accelerator.device)


class ModelWrapper(nn.Module):
    """A Hugging Face model as tools expect one that count operations: `forward(input_ids)` gives logits [B, T, V]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[B, T] ids, all of them real -> [B, T, V]; no cache is made."""
        logits: torch.Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits
