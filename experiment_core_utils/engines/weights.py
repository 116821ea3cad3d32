"""The decoder's and the vision tower's weights as plain tensors, fused for few products a block.

The query, key and value weights of a block become views of one tensor, so nothing is stored twice; the modules, the
state dict and eager runs see the same values as before. Fuse after the model has its device and dtype: moving it
afterwards leaves the fused tensors behind.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from transformers.models.clip.modeling_clip import CLIPEncoderLayer

from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.primitives.errors import ConfigurationError


def fusing_unsupported_reason(layers: Iterable[nn.Module], weights: Iterable[torch.Tensor]) -> str | None:
    """The reason why weights cannot be fused, to follow on "cannot be fused: "; None where they can.

    Args:
        layers: what has to be a plain `nn.Linear`.
        weights: all that is fused, of layers and of anything else.
    """
    weights = list(weights)
    if any(type(layer) is not nn.Linear for layer in layers) or not all(map(torch.is_floating_point, weights)):
        return "its weights are quantised"
    devices = sorted({str(weight.device) for weight in weights})
    if len(devices) > 1:
        return f"its weights are on several devices ({', '.join(devices)})"
    if devices == ["meta"]:
        return "its weights are not loaded"
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in weights})
    return f"its weights are in several dtypes ({', '.join(dtypes)})" if len(dtypes) > 1 else None


@torch.inference_mode(False)
@torch.no_grad()
def fused_rows(layers: list[nn.Linear], name: str = "weight") -> torch.Tensor:
    """The layers' weights (or biases) one below the other; each layer's own becomes a view of its rows."""
    fused = torch.cat([getattr(layer, name).detach() for layer in layers])
    parts = fused.split([layer.out_features for layer in layers])
    for layer, own in zip(layers, parts, strict=True):
        setattr(layer, name, nn.Parameter(own, requires_grad=getattr(layer, name).requires_grad))
    return fused


@dataclass(frozen=True)
class BlockWeights:
    """One decoder block: H wide, Q query and KV key heads of width D, E experts of width I.

    All tensors are contiguous, on one device, in one dtype.
    """

    input_norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [(Q + 2 * KV) * D, H], rows: queries, keys, values
    query_norm: torch.Tensor  # [Q * D], one norm over the whole width
    key_norm: torch.Tensor  # [KV * D]
    output: torch.Tensor  # [H, Q * D]
    ffn_norm: torch.Tensor  # [H]
    router: torch.Tensor  # [E, H]
    gate_up: torch.Tensor  # [E, 2 * I, H], rows: gate, up
    down: torch.Tensor  # [E, H, I]


@dataclass(frozen=True)
class DecoderWeights:
    """Every block of the whole decoder, whatever is active, with embedding, final norm and head."""

    blocks: tuple[BlockWeights, ...]
    embedding: torch.Tensor  # [V_in, H]
    final_norm: torch.Tensor  # [H]
    head: torch.Tensor  # [V, H]
    inverse_frequencies: torch.Tensor  # [D / 2] float32; angle = position * frequency, no further scaling
    num_heads: int
    num_kv_heads: int
    head_width: int
    norm_eps: float
    default_top_k: int  # experts per token of block 0, whatever the setting
    normalise_top_k: bool  # whether the chosen experts' weights are made to sum to 1

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.head.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.head.dtype

    @property
    def width(self) -> int:
        """The hidden width H."""
        return int(self.head.shape[1])

    @property
    def num_experts(self) -> int:
        """The number of experts E."""
        return int(self.blocks[0].router.shape[0])

    @property
    def expert_width(self) -> int:
        """The width of an expert I."""
        return int(self.blocks[0].down.shape[2])


def fuse_decoder_weights(model: MolmoeForConditionalGeneration) -> DecoderWeights:
    """The decoder's weights; those of queries, keys and values in the modules become views of the fused tensor.

    Raises:
        ConfigurationError: what the blocks compute is not what the fused path does (quantised weights, clipped or
            biased attention, a sliding window, another activation or rotary scaling), or the weights are not all on
            one device in one dtype.
    """
    text = model.config.text_config
    reason = _config_unsupported_reason(text.to_dict()) or _weights_unsupported_reason(model)
    if reason is not None:
        raise ConfigurationError(f"the decoder cannot be fused: {reason}; run it with --execution eager")
    decoder = model.get_decoder()
    head_width = model.all_blocks[0].self_attn.head_dim
    return DecoderWeights(
        blocks=tuple(_fuse_weights(block) for block in model.all_blocks),
        embedding=decoder.embed_tokens.weight.detach(),
        final_norm=decoder.norm.weight.detach(),
        head=model.lm_head.weight.detach(),
        inverse_frequencies=decoder.rotary_emb.inv_freq.detach().to(model.device, torch.float32),
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_width=head_width,
        norm_eps=text.rms_norm_eps,
        default_top_k=model.default_top_k,
        normalise_top_k=bool(text.norm_topk_prob),
    )


def _config_unsupported_reason(text: dict[str, Any]) -> str | None:
    rope = text["rope_parameters"]["rope_type"]
    if text["clip_qkv"] is not None:
        return f"queries, keys and values are clipped (clip_qkv {text['clip_qkv']})"
    if text["attention_bias"]:
        return "its attention has biases"
    if text.get("sliding_window") is not None:
        return f"its attention has a sliding window of {text['sliding_window']}"
    if text["hidden_act"] != "silu":
        return f"its experts use {text['hidden_act']}, not silu"
    if rope != "default":
        return f"its rotary positions are scaled ({rope})"
    return None


def _weights_unsupported_reason(model: MolmoeForConditionalGeneration) -> str | None:
    if model.config.to_dict().get("quantization_config") is not None:
        return "its weights are quantised"
    decoder, blocks = model.get_decoder(), model.all_blocks
    linear = [layer for block in blocks for layer in (*_fused(block.self_attn), block.self_attn.o_proj)]
    weights = [decoder.embed_tokens.weight, decoder.norm.weight, model.lm_head.weight]
    weights += [layer.weight for layer in linear]
    weights += [attrgetter(place)(block) for block in blocks for place in _OWN_WEIGHTS.values()]
    return fusing_unsupported_reason(linear, weights)


# The weights of a block that are taken as they lie, by their names in the module; queries, keys and values are fused.
_OWN_WEIGHTS = {
    "input_norm": "input_layernorm.weight",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "output": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "router": "mlp.gate.weight",
    "gate_up": "mlp.experts.gate_up_proj",
    "down": "mlp.experts.down_proj",
}


def _fused(attention: Any) -> list[nn.Linear]:
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def _fuse_weights(block: Any) -> BlockWeights:
    own = {name: attrgetter(place)(block).detach() for name, place in _OWN_WEIGHTS.items()}
    fused = BlockWeights(qkv=fused_rows(_fused(block.self_attn)), **own)
    # A tensor that came out of a file need not be contiguous; a copy of it would take the memory twice.
    for name, weight in vars(fused).items():
        if not weight.is_contiguous():
            raise ConfigurationError(f"the decoder cannot be fused: its {name} weights are not contiguous")
    return fused


# Products on tensor cores want the inner width in multiples of this.
ALIGNMENT = 16


@dataclass(frozen=True)
class VisionBlockWeights:
    """One block of the tower, D wide."""

    first_norm: nn.LayerNorm
    qkv: torch.Tensor  # [3 * D, D], rows: queries, keys, values
    qkv_bias: torch.Tensor  # [3 * D]
    output: torch.Tensor  # [D, D]
    output_bias: torch.Tensor  # [D]
    second_norm: nn.LayerNorm
    inner: torch.Tensor  # [I, D], then quick-GELU
    inner_bias: torch.Tensor  # [I]
    outer: torch.Tensor  # [D, I]
    outer_bias: torch.Tensor  # [D]


@dataclass(frozen=True)
class ConnectorWeights:
    """Pooling by attention and the gated projection; C is the width of all feature blocks together."""

    grid_side: int  # patches along a side of a crop
    window: int  # patches along a side of a window that becomes one feature
    num_heads: int
    pads: torch.Tensor  # [2, C], for patches that are all or partly padding
    query: torch.Tensor  # [D, C]
    query_bias: torch.Tensor  # [D]
    key_value: torch.Tensor  # [2 * D, C], rows: keys, values
    key_value_bias: torch.Tensor  # [2 * D]
    output: torch.Tensor  # [D, D]
    output_bias: torch.Tensor  # [D]
    gate_up: torch.Tensor  # [2 * J, D], rows: gate, up
    down: torch.Tensor  # [H, J]


@dataclass(frozen=True)
class VisionWeights:
    """The tower's blocks that run, in order, with embeddings, norms and connector."""

    patch_weight: torch.Tensor  # [D, 3 * S * S padded with zero columns], S the side of a patch
    class_embedding: torch.Tensor  # [D]
    positions: torch.Tensor  # [P + 1, D]
    before: nn.LayerNorm
    blocks: tuple[VisionBlockWeights, ...]
    feature_blocks: tuple[int, ...]  # whose states are laid side by side
    num_heads: int
    patch_side: int
    connector: ConnectorWeights

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.patch_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.patch_weight.dtype


def fuse_vision_weights(model: MolmoeForConditionalGeneration) -> VisionWeights:
    """The weights of the vision tower and the connector; fused ones become views in the modules.

    Raises:
        ConfigurationError: the tower computes something else than the fused path does (another activation), or its
            weights are quantised, not loaded, or not all on one device in one dtype.
    """
    tower, vision = model.model.vision_tower, model.config.vision_config
    parts = nn.ModuleList([tower, model.model.connector])
    refuse_other_tower(model, [layer for layer in parts.modules() if isinstance(layer, nn.Linear)], parts.parameters())
    embeddings = tower.embeddings
    patches = embeddings.patch_embedding.weight.detach().flatten(1)
    return VisionWeights(
        patch_weight=nn.functional.pad(patches, (0, -patches.shape[1] % ALIGNMENT)),
        class_embedding=embeddings.class_embedding.detach(),
        positions=embeddings.position_embedding.weight.detach(),
        before=tower.pre_layernorm,
        blocks=tuple(fuse_vision_block(layer) for layer in tower.layers[: tower.blocks_to_run]),
        feature_blocks=tower.feature_blocks,
        num_heads=vision.num_attention_heads,
        patch_side=vision.patch_size,
        connector=_connector(model),
    )


def refuse_other_tower(
    model: MolmoeForConditionalGeneration, layers: Iterable[nn.Module], weights: Iterable[torch.Tensor]
) -> None:
    """Raises ConfigurationError where the tower computes something else than the fused path does.

    Args:
        layers, weights: see `fusing_unsupported_reason`.
    """
    activation = model.config.vision_config.hidden_act
    reason = fusing_unsupported_reason(layers, weights)
    if activation != "quick_gelu":
        reason = f"its activation is {activation}, not quick_gelu"
    if reason is not None:
        raise ConfigurationError(f"the vision tower cannot be fused: {reason}; run it with --execution eager")


def vision_products(layer: CLIPEncoderLayer) -> list[nn.Module]:
    """The layers of a block whose products the fused path takes."""
    return [*_fused(layer.self_attn), layer.self_attn.out_proj, layer.mlp.fc1, layer.mlp.fc2]


def fuse_vision_block(layer: CLIPEncoderLayer) -> VisionBlockWeights:
    """The block's weights; those of queries, keys and values in the modules become views of the fused ones."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = _fused(attention)
    return VisionBlockWeights(
        first_norm=layer.layer_norm1,
        qkv=fused_rows(qkv),
        qkv_bias=fused_rows(qkv, "bias"),
        output=attention.out_proj.weight.detach(),
        output_bias=attention.out_proj.bias.detach(),
        second_norm=layer.layer_norm2,
        inner=mlp.fc1.weight.detach(),
        inner_bias=mlp.fc1.bias.detach(),
        outer=mlp.fc2.weight.detach(),
        outer_bias=mlp.fc2.bias.detach(),
    )


def _connector(model: MolmoeForConditionalGeneration) -> ConnectorWeights:
    connector = model.model.connector
    key_value = [connector.k_proj, connector.v_proj]
    return ConnectorWeights(
        grid_side=connector.grid_side,
        window=connector.window,
        num_heads=connector.num_heads,
        pads=connector.pad_embed.detach(),
        query=connector.q_proj.weight.detach(),
        query_bias=connector.q_proj.bias.detach(),
        key_value=fused_rows(key_value),
        key_value_bias=fused_rows(key_value, "bias"),
        output=connector.out_proj.weight.detach(),
        output_bias=connector.out_proj.bias.detach(),
        gate_up=fused_rows([connector.gate_proj, connector.up_proj]),
        down=connector.down_proj.weight.detach(),
    )
