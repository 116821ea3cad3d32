"""The private names of torch and transformers that are used, each in one function.

A release may drop any of them. `TRIED_WITH` gives the releases that have them all; look here first after an upgrade.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed, nn
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    # Processes meet before anything of transformers is needed, which takes long to import.
    from transformers import PreTrainedConfig, PreTrainedModel

TRIED_WITH = {"torch": ("2.11", "2.13"), "transformers": ("5.17", "5.18", "5.19", "5.20", "5.21", "5.22", "5.23")}

# Under these names `vars(module)` has a module's parts and its own parameters; walking them takes far less time than
# the public iterators, which look for what occurs twice.
PARTS, PARAMETERS = "_modules", "_parameters"


def end_allocation_to_pool(device: int, pool: Any) -> None:
    """Take the allocator out of a pool that a broken capture left it in; RuntimeError where the capture had ended."""
    torch._C._cuda_endAllocateToPool(device, pool)


def release_pool(device: int, pool: Any) -> None:
    """Give a pool of a broken capture back."""
    torch._C._cuda_releasePool(device, pool)


def default_group() -> Any:
    """The process group of all processes."""
    return distributed.distributed_c10d._get_default_group()


def default_store() -> Any:
    """The store in which all processes met."""
    return distributed.distributed_c10d._get_default_store()


def decode_kernels_switch(model: "PreTrainedModel") -> Any:
    """What makes the context of `generate()`'s decode steps; None in a model that does not generate."""
    return getattr(model, "_optimize_model_for_decode", None)


def undivided_classes(model: "PreTrainedModel") -> list[str]:
    """Names of the classes whose modules stay on one device."""
    return list(model._no_split_modules or ())


def arguments_left_in_place(model: "PreTrainedModel") -> Any:
    """Names of the arguments, such as the cache, that are not sent from device to device."""
    return model._skip_keys_device_placement


def owns_experts(part: "PreTrainedModel") -> bool:
    """Whether the part has experts whose implementation can be chosen."""
    return bool(part._can_set_experts_implementation())


def experts_implementation(config: Any) -> str | None:
    """The implementation of experts in force."""
    return config._experts_implementation


def computes_experts(module: nn.Module) -> bool:
    """Whether transformers' decorator of experts made the module's class."""
    return hasattr(module, "_apply_gate")


#: under this name a config has the fields in which its blocks differ; there is none where they do not
FIELDS_BY_BLOCK = "_heterogeneity_spec"


def fields_of_blocks(config: Any, blocks: Sequence[int]) -> Any:
    """What `FIELDS_BY_BLOCK` has of these blocks, numbered by their places among them."""
    fields = vars(config)[FIELDS_BY_BLOCK]
    every = fields.per_layer_overrides
    return replace(fields, per_layer_overrides={at: every[each] for at, each in enumerate(blocks) if each in every})


#: the attribute of experts by which they leave out slots whose expert is `num_experts`
SKIPS_SLOTS = "_is_expert_parallel"


def attention_implementation(config: Any) -> str | None:
    """The implementation of attention in force."""
    return config._attn_implementation


def set_implementations(config: Any, attention: str | None, experts: str | None) -> None:
    """Set the implementations of a part's own config; those of the configs inside it stay, unlike with the public
    names.
    """
    config._attn_implementation_internal, config._experts_implementation_internal = attention, experts


def share_attention_implementation(config: Any, part: Any) -> None:
    """Give a part's config the implementation of attention in force."""
    part._attn_implementation = config._attn_implementation


def compatible_attentions(auto_class: Any, config: "PreTrainedConfig") -> Sequence[str] | None:
    """The flash attentions that a model's class takes; None where it takes any."""
    try:
        return getattr(auto_class._model_mapping[type(config)], "_compatible_flash_implementations", None)
    except (KeyError, AttributeError):
        return None


def without_weights(model: "PreTrainedModel", config: "PreTrainedConfig") -> Any:
    """Another model of the class, in float32 with eager attention, on the device in force."""
    return type(model)._from_config(config, attn_implementation="eager", dtype=torch.float32)


def position_ids(model: "PreTrainedModel", ids: torch.Tensor, kwargs: Mapping[str, Any]) -> Any:
    """The positions of a prompt, as `generate()` makes them."""
    return model._prepare_position_ids_for_generation(ids, kwargs)


def carried_kwargs(
    model: "PreTrainedModel", outputs: Any, kwargs: Mapping[str, Any], num_new_tokens: int = 1
) -> dict[str, Any]:
    """What `generate()` gives to the next step, of so many tokens."""
    kwargs = dict(kwargs)
    types = kwargs.pop("token_type_ids", None) if num_new_tokens > 1 else None
    carried: dict[str, Any] = model._update_model_kwargs_for_generation(outputs, kwargs, num_new_tokens=num_new_tokens)
    if types is not None:
        # Each is of the type of the last one, as if they came one by one.
        carried["token_type_ids"] = torch.cat([types, types[:, -1:].expand(-1, num_new_tokens)], dim=-1)
    return carried


def takes_dynamic_cache(model: "PreTrainedModel") -> bool:
    """Whether the family keeps keys and values in transformers' own cache."""
    return bool(model._supports_default_dynamic_cache())


def set_cached_tokens(layer: Any, tokens: int) -> None:
    """Put a layer of a static cache so far, on its device; one that counts no tokens stays as it is."""
    for name in ("cumulative_length", "indexer_cumulative_length"):
        if (length := getattr(layer, name, None)) is not None:
            length.fill_(tokens)


def set_window_tokens(layer: Any, tokens: int) -> None:
    """Put a layer of a growing cache with a window at so many tokens, which it counts on the host."""
    layer.cumulative_length = tokens


def flattened(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of nested lists, tuples and mappings, and their layout."""
    return pytree.tree_flatten(tree)


def unflattened(leaves: Sequence[Any], layout: Any) -> Any:
    """The nested whole of leaves and their layout."""
    return pytree.tree_unflatten(leaves, layout)


def gguf_header(file: Path) -> tuple[Mapping[str, Any], int]:
    """The metadata of a GGUF file, arrays of texts as their length, and the byte at which its last tensor ends.

    No tensor is read. What it raises for a file that is none, or is torn, is of many classes.
    """
    from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

    _read_all_gguf_types()
    metadata, _ = read_gguf_metadata(str(file))
    header = GgufHeader.from_file(str(file))
    return metadata, header.data_start + max((each.offset + each.nbytes for each in header.tensors), default=0)


@cache
def _read_all_gguf_types() -> None:
    """Teach transformers the types of weights that the package gguf reads and transformers' own reader lacks."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
    from transformers.integrations.gguf import dequant

    def numbers_of(kind: GGMLQuantizationType) -> Callable[[torch.Tensor, torch.dtype], torch.Tensor]:
        def read(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            return torch.from_numpy(quants.dequantize(blocks.cpu().numpy(), kind)).to(blocks.device, dtype)

        return read

    for kind, (elements, size) in GGML_QUANT_SIZES.items():
        # Of one element are plain numbers.
        if elements == 1 or kind in dequant.GGML_BLOCK:
            continue
        with suppress(NotImplementedError):
            quants.dequantize(np.zeros((1, size), dtype=np.uint8), kind)
            dequant.GGML_BLOCK[int(kind)] = elements, size
            dequant.GGML_NAME[int(kind)] = kind.name
            dequant._DEQUANT[int(kind)] = numbers_of(kind)


def gguf_architectures() -> Sequence[str]:
    """The architectures that are read as GGUF."""
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    return sorted({*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS})
