"""Finding a transformers checkpoint and the limits of its knobs, and loading the model with its weights.

What the knobs allow is found on a model without storage, before any weight is read.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.distributed import DistributedConfig

from experiment_core_utils.knobs.interface import KnobLimits, unsupported_knobs
from experiment_core_utils.models.common.checkpoint_files import (
    loaded_bytes,
    loaded_weights,
    refuse_files_not_finite,
    refuse_own_code,
    refuse_without_weights,
)
from experiment_core_utils.models.common.describe import computing_dtype, implementations, quantisation_in_force
from experiment_core_utils.models.common.gguf_files import config_in, loading_options, refuse_quantised_again, source_of
from experiment_core_utils.models.common.placement import (
    computing_devices,
    is_offloaded,
    refuse_device_map,
    refuse_offload,
    spread_over,
)
from experiment_core_utils.models.common.quantisation import (
    QuantisationOptions,
    own_method,
    refuse_impossible,
    refuse_wrong_4bit_weights,
    transformers_config,
)
from experiment_core_utils.models.common.vendor_errors import vendor_errors_named
from experiment_core_utils.models.costs.memory_check import Loading, ModelSizes, Room, check_memory
from experiment_core_utils.models.hf.knobs.adapters import adapters_of
from experiment_core_utils.models.hf.knobs.controller import DecoderKnobs
from experiment_core_utils.models.hf.processor import load_hf_processor, takes_pictures
from experiment_core_utils.models.hf.request_state import (
    forget_longer_requests,
    stages_unsupported_reason,
    state_in_question,
)
from experiment_core_utils.models.hf.requests import DEFAULT_CHAT, ChatOptions, HFRequests
from experiment_core_utils.models.hf.tensor_shards import refuse_uneven_heads
from experiment_core_utils.models.hf.visual_token_keep import VisualTokens
from experiment_core_utils.primitives.device import visible_gpus
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import is_gguf
from experiment_core_utils.primitives.in_step import as_launched
from experiment_core_utils.primitives.private_apis import owns_experts


@dataclass(frozen=True)
class HFSource:
    """A checkpoint of transformers, before any weight is read."""

    name: str  #: path or hub id as given
    folder: Path
    config: PreTrainedConfig
    quant_method: str | None  #: how the weights are quantised already, None where they are not
    chat: ChatOptions = DEFAULT_CHAT  #: what was requested of its chat template

    trust_remote_code = False
    kind = ""  #: as which it is built, for messages

    @property
    def takes_pictures(self) -> bool:
        """Whether the model has a vision part."""
        return takes_pictures(self.config)

    @property
    def auto_class(self) -> Any:
        """The class by which transformers builds and loads the model, with its vision part where it has one."""
        has_class = type(self.config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        return AutoModelForImageTextToText if has_class else AutoModelForCausalLM

    @cached_property
    def requests(self) -> HFRequests:
        """The request maker of the model, read once; raises ConfigurationError where processor or tokenizer cannot be
        used.
        """
        processor = load_hf_processor(self.folder)
        with vendor_errors_named(f"the processor, the tokenizer and the config of {self.name} do not go together"):
            return HFRequests(processor, self.config, self.name, self.chat)

    def read_model(self, shards: int, **options: Any) -> PreTrainedModel:
        """The model of the weights; raises what `loaded_weights` does.

        Args:
            options: of `from_pretrained`.
        """
        load = partial(self.auto_class.from_pretrained, **source_of(self.folder))
        options = {"trust_remote_code": self.trust_remote_code, **loading_options(self.folder), **options}
        model: PreTrainedModel = loaded_weights(self.folder, load, shards=shards, **options)
        return model


@dataclass(frozen=True)
class LoadOptions:
    """Options for loading a model; None leaves a choice to transformers."""

    dtype: torch.dtype
    device: torch.device
    attn_implementation: str | None
    experts_implementation: str | None
    quantisation: QuantisationOptions
    #: see `ModelConfig.device_map`; or the device of each part, as accelerate takes it
    device_map: str | Mapping[str, Any] | None = None
    tensor_parallel: int = 1  #: processes that share the weights, all of which load the model at the same time

    @property
    def width(self) -> str:
        """The quantisation while loading, as `ModelSizes.weights_bytes` has it."""
        requested = self.quantisation.quantization_config
        bits = "4bit" if requested.load_in_4bit else "8bit" if requested.load_in_8bit else "none"
        return "fp8" if self.quantisation.fp_precision == "float8" else bits


def find_hf_model(name: str, folder: Path, raw: Mapping[str, Any], chat: ChatOptions = DEFAULT_CHAT) -> HFSource:
    """The checkpoint, after reading its config; raises ConfigurationError for a model that is neither
    image-text-to-text nor causal, and for one whose prompt goes through an encoder of its own.
    """
    refuse_own_code(raw, name, "which is not run here; give a model that transformers has")
    with vendor_errors_named(f"the config in {folder} cannot be used"):
        config = config_in(folder)
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigurationError(
            f"{name} is a {config.model_type}, which transformers has neither as an image-text-to-text nor as a causal "
            "language model; give one of those"
        )
    if config.is_encoder_decoder:
        raise ConfigurationError(
            f"{name}, a {config.model_type}, is an encoder-decoder: its prompt does not run through the blocks of its "
            "decoder; give a decoder-only model"
        )
    if getattr(config.get_text_config(decoder=True), "cross_attention_layers", None):
        raise ConfigurationError(
            f"{name}, a {config.model_type}, reads pictures by cross-attention: they take no place in its prompt, so "
            "that no vision token can be counted; give a model whose pictures are tokens of the prompt"
        )
    return HFSource(name, folder, config, own_method(raw), chat)


def skeleton_of(source: HFSource, attn_implementation: str | None = None) -> PreTrainedModel:
    """The model without storage; a prompt runs in it, whatever its dtype and widths. Raises ConfigurationError where
    its code refuses.
    """
    what, options = f"{source.name} ({source.config.model_type}) cannot be built{source.kind}", {}
    if attn_implementation is not None:  # a None would take the place of what the config names
        what += f" with attn_implementation {attn_implementation}"
        options = {"attn_implementation": attn_implementation}
    with vendor_errors_named(what), torch.device("meta"):
        skeleton: PreTrainedModel = source.auto_class.from_config(
            copy.deepcopy(source.config), trust_remote_code=source.trust_remote_code, **options
        )
    for part in _owners_of_experts(skeleton):
        # Without storage, grouped GEMMs take bfloat16 of widths divisible by 8 only.
        part.set_experts_implementation("batched_mm")
    return skeleton.eval()


def limits_of(source: HFSource) -> KnobLimits:
    """The knobs' limits, tried on a model without storage; raises ConfigurationError if it has no separate stages."""
    skeleton = skeleton_of(source)
    knobs = DecoderKnobs(skeleton)
    _refuse_without_stages(source, skeleton)
    adapters = adapters_of(skeleton.config, source.requests, VisualTokens(skeleton, source.requests), knobs)
    return KnobLimits(
        num_total_blocks=knobs.num_total_blocks,
        num_experts=knobs.num_experts,
        default_top_k=knobs.default_top_k,
        unsupported=unsupported_knobs(**{name: each.unsupported_reason for name, each in adapters.items()}),
        untried_reason=knobs.untried_reason or state_in_question(skeleton),
        token_unit=source.requests.token_unit,
        fraction_reasons=source.requests.fraction_reasons,
        top_k_limit=knobs.top_k_limit,
    )


def _refuse_without_stages(source: HFSource, model: PreTrainedModel) -> None:
    reason = stages_unsupported_reason(model)
    if reason is not None:
        raise ConfigurationError(f"{source.name}, a {source.config.model_type}, cannot be profiled: {reason}")


def refuse_as_loaded(source: HFSource, limits: KnobLimits, model: PreTrainedModel, knobs: DecoderKnobs) -> None:
    """Refuse a loaded model whose first prompt fails as no prompt without storage did, or that shows only now that it
    has no separate stages.

    Args:
        limits: of the source.
        knobs: made of the loaded model.

    Raises:
        ConfigurationError: see above.
    """
    if knobs.failure is None or limits.untried_reason is not None:
        _refuse_without_stages(source, model)
    else:
        facts = [each for each in (computing_dtype(model), *implementations(model).values()) if each is not None]
        if quantisation_in_force(model) is not None:
            facts.append("quantised")
        raise ConfigurationError(
            f"{source.name}, loaded on {computing_devices(model)[0].type} ({', '.join(dict.fromkeys(facts))}), cannot "
            f"run a prompt: {knobs.failure}; give another --precision, --quantization or --experts_implementation"
        )


def refuse_load(source: HFSource, load_options: LoadOptions, random_weights: bool) -> None:
    """Refuse what cannot be loaded as requested, before any weights are read; raises ConfigurationError."""
    if load_options.tensor_parallel > 1:
        refuse_sharing(source, load_options, random_weights)
    if load_options.device_map == "auto":
        refuse_device_map("auto", load_options.device, "--device_map auto")
    if load_options.attn_implementation is not None:
        skeleton_of(source, load_options.attn_implementation)
    if random_weights:
        if load_options.width != "none":
            raise ConfigurationError(
                "--random_weights cannot be quantised: they are made in memory; drop --quantization"
            )
        return
    refuse_without_weights(source.folder, source.name)
    refuse_quantisation(source, load_options)


def refuse_quantisation(source: HFSource, load_options: LoadOptions) -> None:
    """Refuse weights whose quantisation, requested or their own, cannot be had here.

    Raises:
        ConfigurationError: a package or an ability of the GPU is missing, or products are wrong.
        ImpossibleCombination: they are quantised already.
    """
    requested, device = load_options.quantisation, load_options.device
    refuse_quantised_again(source.folder, load_options.width != "none")
    refuse_impossible(requested, source.quant_method, device)
    refuse_wrong_4bit_weights(requested, source.config, device, partial(skeleton_of, source))


def load_hf_model(source: HFSource, load_options: LoadOptions, random_weights: bool) -> PreTrainedModel:
    """The model, which `refuse_load` let pass, on its device in evaluation mode; random weights come from a fixed seed.

    Raises:
        ConfigurationError: weights are not there, do not fit the config one to one, or an implementation or a
            requested quantisation is not available.
        OutOfMemory: it does not fit the device.
    """
    if random_weights:
        return _random(source, load_options)
    how = load_options.width, load_options.device_map, load_options.tensor_parallel
    check_memory(*memory_of(source, load_options.dtype, load_options.device, *how), FLAGS)
    model = load_weights(source, load_options)
    refuse_offload(model, ("disk",), "on the GPUs and the host together")
    if is_offloaded(model) and load_options.width == "none":
        # Of weights that are not on their device, the check of a loaded model sees nothing.
        refuse_files_not_finite(source.folder)
    forget_longer_requests(model)
    return _with_experts(model, load_options)


def load_weights(source: HFSource, load_options: LoadOptions) -> PreTrainedModel:
    """The model of the weights in evaluation mode, in the requested precision, where it was requested; raises what
    `HFSource.read_model` does.
    """
    quantised_by = transformers_config(load_options.quantisation, load_options.dtype)
    if quantised_by is not None:
        refuse_files_not_finite(source.folder)
    # A quantised checkpoint says itself what it is multiplied in.
    keeps_own = source.quant_method is not None and load_options.quantisation.fp_precision == "auto"
    placement: dict[str, Any] = {"device_map": load_options.device_map or {"": load_options.device}}
    if load_options.tensor_parallel > 1:
        placement = {"distributed_config": DistributedConfig(tp_size=load_options.tensor_parallel)}
    options = {
        "dtype": "auto" if keeps_own else load_options.dtype,
        "attn_implementation": load_options.attn_implementation,
        "quantization_config": quantised_by,
        **placement,
    }
    requested = {name: value for name, value in options.items() if value is not None}
    with as_launched():
        return source.read_model(load_options.tensor_parallel, **requested).eval()


def refuse_sharing(source: HFSource, load_options: LoadOptions, random_weights: bool) -> None:
    """Raises ConfigurationError for a model whose weights processes cannot share as requested."""
    size = load_options.tensor_parallel
    reasons = {
        f"it needs {size} processes; launch torchrun --nproc-per-node={size} -m knob_profiler profile": (
            not distributed.is_initialized()
        ),
        "random weights are made by each process as a whole; drop --random_weights": random_weights,
        "quantised weights are not cut into parts; drop --quantization": load_options.width != "none",
        f"its weights are quantised already ({source.quant_method}) and are not cut into parts; give others": (
            source.quant_method is not None
        ),
        "a GGUF file is not cut into parts; give a folder with safetensors": is_gguf(source.folder),
        "on the CPU of a machine with GPUs transformers would take these; set CUDA_VISIBLE_DEVICES=": (
            load_options.device.type == "cpu" and torch.cuda.is_available()
        ),
    }
    reason = next((reason for reason, is_so in reasons.items() if is_so), None)
    if reason is not None:
        raise ConfigurationError(f"--tensor_parallel {size}: {reason}")
    refuse_uneven_heads(skeleton_of(source), source.name, size)


def _random(source: HFSource, load_options: LoadOptions) -> PreTrainedModel:
    requested = memory_of(source, load_options.dtype, load_options.device, device_map=load_options.device_map)
    check_memory(*requested, FLAGS_OF_RANDOM)
    if load_options.device_map is not None:
        # It is made on the host before it is spread.
        on_host = memory_of(source, load_options.dtype, torch.device("cpu"))
        check_memory(*on_host, {"bfloat16": FLAGS_OF_RANDOM["bfloat16"]})
    options = {"dtype": load_options.dtype, "attn_implementation": load_options.attn_implementation}
    spread = load_options.device_map
    device = load_options.device if spread is None else torch.device("cpu")
    model = _with_experts(random_model(source.name, source.auto_class, source.config, device, **options), load_options)
    forget_longer_requests(model)
    return model.eval() if spread is None else spread_over(model.eval(), spread)


def random_model(name: str, auto_class: Any, config: PreTrainedConfig, device: torch.device, **options: Any) -> Any:
    """A model of a copy of the config, which knobs may change, on the device with weights from a fixed seed.

    Raises:
        ConfigurationError: no such model can be built; the message begins with `name`.
    """
    torch.manual_seed(0)
    with vendor_errors_named(f"{name} cannot be built"), device:
        return auto_class.from_config(copy.deepcopy(config), trust_remote_code=False, **options)


# What to give where a model does not fit; random weights cannot be quantised.
FLAGS_OF_RANDOM = {"bfloat16": "--precision bfloat16", "device_map": "--device_map auto"}
FLAGS = FLAGS_OF_RANDOM | {"float8": "--quantization fp8", "8bit": "--quantization 8bit", "4bit": "--quantization 4bit"}


def memory_of(
    source: HFSource,
    dtype: torch.dtype,
    device: torch.device,
    width: str = "none",
    device_map: object = None,
    shards: int = 1,
    hosts: Sequence[torch.device] = (torch.device("cpu"),),
) -> tuple[ModelSizes, Loading]:
    """The sizes of a model, and how it is to be loaded, for `memory_lines`.

    Args:
        width: see `ModelSizes.weights_bytes`.
        shards: processes that share the weights, on GPUs each with memory of its own.
        hosts: where parts of a spread model may be beside the GPUs.
    """
    stored = None if source.quant_method is None else loaded_bytes(source.folder)
    is_on_gpu = device.type == "cuda"
    devices = (*visible_gpus(), *hosts)
    everywhere = partial(Room.of, *devices)
    room = Room.of(device) if device_map is None or not is_on_gpu else everywhere()
    # Without a GPU there is nothing to spread a model over.
    spread_room = everywhere if is_on_gpu and len(devices) > 1 and device_map is None and shards == 1 else None
    at = dtype, device, room, width, spread_room, shards if is_on_gpu else 1
    return ModelSizes.of(skeleton_of(source), stored), Loading(source.name, source.config, *at)


def _with_experts(model: Any, load_options: LoadOptions) -> Any:
    """The model, whose parts with experts now have the requested implementation."""
    if load_options.experts_implementation is None:
        return model
    owners = _owners_of_experts(model)
    if not owners:
        raise ConfigurationError(
            f"--experts_implementation {load_options.experts_implementation} was given, and this "
            f"{model.config.model_type} has no experts whose implementation can be chosen; drop it"
        )
    with vendor_errors_named(f"the experts implementation {load_options.experts_implementation} is not available"):
        for part in owners:
            part.set_experts_implementation(load_options.experts_implementation)
    return model


def _owners_of_experts(model: PreTrainedModel) -> list[PreTrainedModel]:
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return [part for part in parts if owns_experts(part)]
