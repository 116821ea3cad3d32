"""The blocks of a transformers vision tower as weights, where they have the form that engines compute.

As a decoder, a tower is known by its modules and the values in them, never by its name: LayerNorm before attention and
MLP, full attention by four linear layers, an MLP of two with a GELU between them, all with biases. That is CLIP and
SigLIP, also as Idefics 3 and SmolVLM have it. At last the kernels must give what the modules give for a few tokens.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from experiment_core_utils.engines.cpu.vision import CpuVisionBlocks
from experiment_core_utils.engines.engine_proof import relative_distance
from experiment_core_utils.engines.weights import (
    VisionActivation,
    VisionBlockWeights,
    fusing_unsupported_reason,
)
from experiment_core_utils.models.common.vendor_errors import HF_CODE_ERRORS
from experiment_core_utils.models.hf.known_parts import (
    parts_unsupported_reason,
    replaced_unsupported_reason,
)
from experiment_core_utils.primitives.errors import ConfigurationError, first_line

# Where families keep the tower.
_TOWERS = ("vision_tower", "vision_model", "visual")
_TRIAL_TOKENS = 7
# Relative; float32 roundings of some blocks make 1e-6, another form of block a hundredth and more.
_MOST_OFF = 1e-3


@torch.no_grad()
def described_tower(model: PreTrainedModel) -> tuple[tuple[nn.Module, ...], CpuVisionBlocks]:
    """The tower's blocks of a model in float32 on the CPU, in order, and the engine that computes what they compute.

    Each block takes states [K, T, C] and a mask, and gives states; in it, weights that are fused become views.

    Raises:
        ConfigurationError: the blocks are not of the known form or no kernel runs them, in one line; the modules are as
            before then, or compute the same.
    """
    layers = _blocks(model)
    parts = [_layers(block) for block in layers]
    weights = [weight for block in layers for weight in block.parameters()]
    reason = fusing_unsupported_reason([layer for each in parts for layer in each], weights)
    if reason is None and any(type(weight.data) is not torch.Tensor for weight in weights):
        reason = "its weights are not plain tensors (divided among processes, or packed)"
    for block in layers:
        reason = reason or replaced_unsupported_reason(block)
    _refuse(reason)
    heads = {block.self_attn.num_heads for block in layers}
    if len(heads) > 1:
        raise _refused("its blocks have different numbers of heads")
    blocks = [VisionBlockWeights.fused(block, _activation(block.mlp.activation_fn)) for block in layers]
    engine = CpuVisionBlocks(blocks, heads.pop())
    _refuse_other_states(layers, engine)
    return layers, engine


def _refused(reason: str) -> ConfigurationError:
    return ConfigurationError(f"engines do not know its vision tower: {reason}")


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise _refused(reason)


def _blocks(model: PreTrainedModel) -> tuple[Any, ...]:
    """The blocks of the tower's encoder."""
    base: Any = model.base_model
    tower = next((getattr(base, name) for name in _TOWERS if isinstance(getattr(base, name, None), nn.Module)), None)
    if tower is None:
        raise _refused(f"it is none of {', '.join(_TOWERS)}")
    # Older versions of transformers have a whole model around the encoder.
    stacks = [module for name, module in tower.named_modules() if name.rpartition(".")[2] == "encoder"]
    layers = getattr(stacks[0], "layers", None) if len(stacks) == 1 else None
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise _refused("it has no encoder with a list of blocks named layers")
    return tuple(layers)


def _layers(block: Any) -> list[nn.Linear]:
    """The linear layers of a block of the known form."""
    _refuse_parts(block, "a block", ("self_attn", "layer_norm1", "layer_norm2", "mlp"))
    attention, mlp = block.self_attn, block.mlp
    _refuse_parts(attention, "its attention", ("q_proj", "k_proj", "v_proj", "out_proj"), ("scale",))
    missing = [name for name in ("num_heads", "head_dim") if not hasattr(attention, name)]
    _refuse(f"its attention lacks {', '.join(missing)}" if missing else None)
    _refuse_parts(mlp, "its MLP", ("fc1", "fc2", "activation_fn"))
    layers = [attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj, mlp.fc1, mlp.fc2]
    if any(getattr(layer, "bias", None) is None for layer in layers):
        raise _refused("a linear layer has no bias")
    for norm in (block.layer_norm1, block.layer_norm2):
        if type(norm) is not nn.LayerNorm or norm.weight is None or norm.bias is None:
            raise _refused(f"its norm is a {type(norm).__name__}, or has no weight and bias")
    width, heads, head_width = layers[3].in_features, attention.num_heads, attention.head_dim
    if width != heads * head_width or any(layer.out_features != width for layer in layers[:4]):
        raise _refused(f"its {heads} heads of {head_width} values are not as wide as its states ({width})")
    if abs(attention.scale * head_width**0.5 - 1) > 1e-6:
        raise _refused("its attention scales scores by another factor than the root of a head's width")
    if getattr(attention, "is_causal", False):
        raise _refused("its attention is causal")
    return layers


def _refuse_parts(module: nn.Module, what: str, names: tuple[str, ...], numbers: tuple[str, ...] = ()) -> None:
    missing = [name for name in (*names, *numbers) if not hasattr(module, name)]
    _refuse(f"{what} lacks {', '.join(missing)}" if missing else parts_unsupported_reason(module, what, names, numbers))


@torch.inference_mode()
def _activation(function: Any) -> VisionActivation:
    """By its values, the far ones of which tell one with bounds."""
    some = torch.linspace(-20, 20, 81)
    known: dict[VisionActivation, torch.Tensor] = {
        "quick_gelu": some * torch.sigmoid(1.702 * some),
        "gelu": F.gelu(some),
        "tanh_gelu": F.gelu(some, approximate="tanh"),
    }
    try:
        found = function(some)
    except HF_CODE_ERRORS as error:
        raise _refused(f"its activation {type(function).__name__} does not run ({first_line(error)})") from error
    for name, expected in known.items():
        if torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
            return name
    raise _refused(f"its activation {type(function).__name__} is none of {', '.join(known)}")


@torch.inference_mode()
def _refuse_other_states(layers: tuple[Any, ...], engine: CpuVisionBlocks) -> None:
    """Refuses a tower whose modules give other states for a few tokens than the kernels."""
    width = layers[0].self_attn.out_proj.in_features
    given = torch.randn(1, _TRIAL_TOKENS, width, generator=torch.Generator().manual_seed(0))
    found, exact = given.clone(), given
    try:
        for index, layer in enumerate(layers):
            engine.advance(index, found)
            exact = layer(exact, None)
    except HF_CODE_ERRORS as error:
        raise _refused(f"a block cannot run by itself ({first_line(error)})") from error
    off = relative_distance(found, exact)
    if not off <= _MOST_OFF:
        raise _refused(f"its blocks compute something else than their parts say (relative difference {off:.2g})")
