"""The loader of MolmoE checkpoints, in the native layout or that of the published weights."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForImageTextToText

from experiment_core_utils.config.parts import ModelConfig
from experiment_core_utils.knobs.expert_mass import EXPERT_MASS
from experiment_core_utils.knobs.interface import KnobLimits
from experiment_core_utils.knobs.thinking_budget import THINKING_BUDGET
from experiment_core_utils.knobs.top_k import TOP_K
from experiment_core_utils.models.common.checkpoint_files import (
    loaded_weights,
    refuse_not_finite,
    refuse_without_weights,
)
from experiment_core_utils.models.common.vendor_errors import vendor_errors_named
from experiment_core_utils.models.costs.memory_check import Loading, ModelSizes, Room, check_memory
from experiment_core_utils.models.hf.loader import random_model
from experiment_core_utils.models.molmoe import (
    MolmoeConfig,
    MolmoeForConditionalGeneration,
    MolmoeImageProcessor,
    MolmoeProcessor,
)
from experiment_core_utils.models.molmoe.checkpoint.published import load_published_checkpoint
from experiment_core_utils.models.molmoe.checkpoint.published_config import (
    PUBLISHED_MODEL_TYPE,
    config_from_published,
    load_published_tokenizer,
)
from experiment_core_utils.models.molmoe.costs import parameter_count
from experiment_core_utils.models.molmoe.knobs import DENSE
from experiment_core_utils.models.molmoe.processing_molmoe import ImageTokens
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.models.pausable import PausableModel
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import shortened


class MolmoeSource(Protocol):
    """A checkpoint that was found; a `ModelSource` of a MolmoE is one."""

    @property
    def name(self) -> str: ...

    @property
    def folder(self) -> Path: ...

    @property
    def config(self) -> Any: ...

    @property
    def is_published_layout(self) -> bool: ...


def find_molmoe_config(folder: Path, raw: Mapping[str, Any]) -> MolmoeConfig:
    """The native config of a checkpoint, converted where it has the published layout.

    Raises:
        ConfigurationError: a key is missing, or no model can be built of it.
    """
    if raw["model_type"] == PUBLISHED_MODEL_TYPE:
        config = config_from_published(raw, folder)
    else:
        with vendor_errors_named(f"the config in {folder} cannot be used"):
            config = MolmoeConfig.from_pretrained(folder)
    _refuse_unbuildable(config, folder)
    return config


def _refuse_unbuildable(config: MolmoeConfig, folder: Path) -> None:
    with vendor_errors_named(f"the config in {folder} cannot be used: no model can be built of it"):
        parameter_count(config)
    rows = config.text_config.vocab_size
    for name in ("bos_token_id", "image_start_token_id", "image_end_token_id", "image_patch_token_id"):
        if getattr(config, name) >= rows:
            raise ConfigurationError(
                f"the config in {folder} cannot be used: {name} {getattr(config, name)} is not among its {rows} tokens"
            )


def molmoe_limits(config: MolmoeConfig) -> KnobLimits:
    """What the knobs can be set to in a Molmo of this config."""
    reasons = {THINKING_BUDGET.name: "its tokenizer has no marks of thinking"}
    if config.num_experts is None:
        reasons |= dict.fromkeys((TOP_K.name, EXPERT_MASS.name), DENSE)
    return KnobLimits(
        int(config.text_config.num_hidden_layers), config.num_experts, config.default_top_k, unsupported=reasons
    )


def load_molmoe(
    source: MolmoeSource, config: ModelConfig, dtype: torch.dtype, device: torch.device, eager_reason: str | None
) -> PausableModel:
    """The model on `device`, ready to be measured.

    Raises:
        ConfigurationError: no weights, weights that do not fit the config, or an implementation that is not known.
    """
    refuse_several_devices(config)
    check_memory(*memory_of(source, dtype, device), FLAGS)
    if config.random_weights:
        model = random_model(source.name, AutoModelForImageTextToText, source.config, device, dtype=dtype)
    elif source.is_published_layout:
        with vendor_errors_named(f"the weights in {source.folder} cannot be read"):
            model = load_published_checkpoint(source.folder, dtype, device)
        refuse_not_finite(model, source.folder)
    else:
        refuse_without_weights(source.folder, source.name)
        load = partial(MolmoeForConditionalGeneration.from_pretrained, source.folder)
        model = loaded_weights(source.folder, load, dtype=dtype, trust_remote_code=False)
    _choose_implementations(model, config)
    model = model.to(device).eval()
    return MolmoeStagedModel(source.name, model, load_processor(source), config.execution, eager_reason)


# What to give where a MolmoE does not fit.
FLAGS = {"bfloat16": "--precision bfloat16"}


def memory_of(source: MolmoeSource, dtype: torch.dtype, device: torch.device) -> tuple[ModelSizes, Loading]:
    """The sizes of a MolmoE, and how it is to be loaded, for `memory_lines`."""
    sizes = ModelSizes(parameter_count(source.config))
    return sizes, Loading(source.name, source.config, dtype, device, Room.of(device))


def refuse_several_devices(config: ModelConfig) -> None:
    """Raises ConfigurationError where MolmoE is to be spread over several devices."""
    for flag, given in (("--device_map", config.device_map), ("--tensor_parallel", config.tensor_parallel)):
        if given is not None:
            raise ConfigurationError(
                f"{flag} {given} is for models of transformers; the engines of Molmo have fused weights on one "
                "device; drop it"
            )


def _choose_implementations(model: MolmoeForConditionalGeneration, config: ModelConfig) -> None:
    """Raises ConfigurationError for a name that transformers does not know, or one of experts for a dense model."""
    if config.experts_implementation is not None and model.num_experts is None:
        raise ConfigurationError(f"--experts_implementation {config.experts_implementation}: {DENSE}; drop it")
    with vendor_errors_named("the requested implementation is not available"):
        if config.attn_implementation is not None:
            model.set_attn_implementation(config.attn_implementation)
        if config.experts_implementation is not None:
            model.model.language_model.set_experts_implementation(config.experts_implementation)


def load_processor(source: MolmoeSource) -> MolmoeProcessor:
    """Tokenizer and image processor of a checkpoint, no weights; raises ConfigurationError where they are not there."""
    with vendor_errors_named(f"{source.folder} has no usable tokenizer or image processor"):
        processor = _read_processor(source)
    # Of the published layout the image processor is made here.
    if not source.is_published_layout:
        _refuse_unfit(processor.image_processor, source)
    return processor


def _refuse_unfit(pictures: MolmoeImageProcessor, source: MolmoeSource) -> None:
    """Raises ConfigurationError for a `preprocessor_config.json` by which every picture would fail."""
    vision = source.config.vision_config
    of_model = {
        "crop_size": vision.image_size,
        "patch_size": vision.patch_size,
        "pooling_size": source.config.pooling_size,
    }
    rules = {
        **{name: (getattr(pictures, name) == value, f"the model's is {value}") for name, value in of_model.items()},
        "image_mean": (_are_numbers(pictures.image_mean, 3), "give 3 numbers"),
        "image_std": (_are_numbers(pictures.image_std, 3) and all(pictures.image_std), "give 3 numbers above 0"),
        "overlap_margins": (_are_numbers(pictures.overlap_margins, 2), "give 2 numbers of patches"),
        "max_crops": (_are_numbers((pictures.max_crops,), 1), "give a number of crops"),
    }
    for name, (is_satisfied, rule) in rules.items():
        if not is_satisfied:
            raise ConfigurationError(
                f"the preprocessor_config.json in {source.folder} cannot be used: {name} is "
                f"{shortened(getattr(pictures, name))}; {rule}"
            )


def _are_numbers(values: Any, count: int) -> bool:
    return len(values) == count and all(type(each) in (int, float) and 0 <= each < 1e6 for each in values)


def _read_processor(source: MolmoeSource) -> MolmoeProcessor:
    if not source.is_published_layout:
        return MolmoeProcessor.from_pretrained(source.folder)
    tokenizer = load_published_tokenizer(source.folder, source.config)
    return MolmoeProcessor(MolmoeImageProcessor(), tokenizer, ImageTokens.from_config(source.config))
