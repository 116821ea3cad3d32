"""A description of a loaded model: its class, sizes and dtype, and the implementations and quantisation in force."""

import copy
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from experiment_core_utils.models.common.decode_kernels import DecodeKernels, experts_in_force
from experiment_core_utils.models.common.quantisation import own_method
from experiment_core_utils.primitives.private_apis import attention_implementation
from experiment_core_utils.records.requests import ArchitectureSizes

MIB = 2**20
# Numbers that quantised weights are multiplied with when they are used.
SCALE_SUFFIXES = ("_scale_inv", "activation_scale")


def architecture_sizes(model: nn.Module) -> ArchitectureSizes:
    """Sizes of the decoder, from its config; None for those that it does not give, and for a model without a config."""
    text = model.config.get_text_config(decoder=True) if isinstance(model, PreTrainedModel) else None

    def say(name: str) -> Any:
        return getattr(text, name, None)

    sizes: Any = {
        "num_layers": say("num_hidden_layers"),
        "hidden_size": say("hidden_size"),
        "num_attention_heads": say("num_attention_heads"),
        "vocab_size": say("vocab_size"),
        "max_position_embeddings": say("max_position_embeddings"),
        "num_key_value_heads": say("num_key_value_heads"),
        "head_dim": say("head_dim"),
        "intermediate_size": say("intermediate_size"),
        "num_experts": next((n for n in map(say, ("num_experts", "num_local_experts", "n_routed_experts")) if n), None),
        "num_experts_per_tok": say("num_experts_per_tok"),
        "tie_word_embeddings": say("tie_word_embeddings"),
    }
    found: ArchitectureSizes = sizes
    return found


def count_parameters(model: nn.Module) -> int:
    """Elements of all parameters, tied ones once; weights packed several to a byte by their number before packing."""
    if is_quantised(model):
        assert isinstance(model, PreTrainedModel)
        config = copy.deepcopy(model.config)
        del config.quantization_config
        # Without storage, and with the layers that quantising replaced.
        with torch.device("meta"):
            model = type(model)(config)
    return sum(parameter.numel() for parameter in model.parameters())


def is_quantised(model: nn.Module) -> bool:
    """Whether transformers loaded it with quantised weights."""
    return isinstance(model, PreTrainedModel) and "quantization_config" in vars(model.config)


def count_unquantised(model: nn.Module) -> int:
    """Elements of the parameters that are stored as floating-point numbers of two bytes or more, scales left out."""
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.element_size() > 1 and not name.endswith(SCALE_SUFFIXES)
    )


def stored_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers as they are stored, packed weights packed; the scales that bitsandbytes keeps
    beside its weights (a few percent of them) are not counted.
    """
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def elements_by_dtype(model: nn.Module) -> dict[str, int]:
    """Stored elements of the parameters by dtype, the most frequent first."""
    counted: Counter[str] = Counter()
    for parameter in model.parameters():
        counted[dtype_name(parameter.dtype)] += parameter.numel()
    return dict(counted.most_common())


def computing_dtype(model: nn.Module) -> str | None:
    """The most frequent dtype among the parameters that are floating-point numbers of two bytes or more, if any."""
    counted: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.element_size() > 1:
            counted[parameter.dtype] += parameter.numel()
    return dtype_name(counted.most_common(1)[0][0]) if counted else None


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def implementations(model: nn.Module) -> dict[str, str | None]:
    """The attention and experts implementations in force; None for a model without experts, or that is not
    transformers'.

    On a GPU `generate()` takes `batched_mm` for the decode steps where `grouped_mm` is in force, and so do the stages.
    """
    if not isinstance(model, PreTrainedModel):
        return {"attn_implementation": None, "experts_implementation": None, "experts_implementation_decode": None}
    experts = experts_in_force(model)
    with torch.no_grad(), DecodeKernels(model).switched():
        decode = experts_in_force(model)
    return {
        "attn_implementation": attention_implementation(model.config.get_text_config(decoder=True)),
        "experts_implementation": experts,
        "experts_implementation_decode": decode,
    }


def quantisation_in_force(model: nn.Module) -> dict[str, Any] | None:
    """The quantisation method, transformers' settings, and how many elements it covers; None for unquantised
    weights.
    """
    if not is_quantised(model):
        return None
    assert isinstance(model, PreTrainedModel)
    own = model.config.quantization_config
    settings = dict(own) if isinstance(own, dict) else own.to_dict()
    total = count_parameters(model)
    covered = total - count_unquantised(model)
    return {
        "method": own_method({"quantization_config": settings}),
        "quantised_parameters": covered,
        "quantised_share": covered / total,
        "settings": {name: value for name, value in settings.items() if _has_effect(name, settings)},
    }


def _has_effect(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a setting of bitsandbytes has an effect: its config contains those of both widths."""
    other = "bnb_4bit" if settings.get("load_in_8bit") else "llm_int8" if settings.get("load_in_4bit") else "_"
    return not name.startswith(("_", other))


def device_map_of(model: nn.Module) -> dict[str, str] | None:
    """The device of each part; None for a model on one device."""
    found = vars(model).get("hf_device_map")
    if found is None:
        return None
    # accelerate numbers GPUs.
    return {name: f"cuda:{place}" if isinstance(place, int) else str(place) for name, place in found.items()}


def origin_of(model: nn.Module) -> dict[str, str | None]:
    """Type, folder and hub commit that transformers loaded the model from; None for what is not known."""
    if not isinstance(model, PreTrainedModel):
        return {"model_type": None, "folder": None, "revision": None}
    folder = Path(model.name_or_path) if model.name_or_path else None
    commit = folder.name if folder is not None and folder.parent.name == "snapshots" else None
    return {"model_type": model.config.model_type, "folder": str(folder) if folder else None, "revision": commit}
