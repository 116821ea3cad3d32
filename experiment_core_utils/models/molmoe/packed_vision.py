"""In: a MolmoE model on its device; out: the weights of its vision tower and connector, for few products a block.

Weights that are multiplied with the same rows become views of one tensor, as in `packed_blocks`, so that next to
nothing is held twice (the patch embedding is: its columns are padded).
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers.models.clip.modeling_clip import CLIPEncoderLayer

from experiment_core_utils.models.molmoe.joined_layers import fused_biases, fused_rows, fusing_unsupported_reason
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.primitives.errors import ConfigurationError

# Products on tensor cores want the inner width in multiples of this.
ALIGNMENT = 16


@dataclass(frozen=True)
class LayerNorm:
    """Weights [D] of a layer norm."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float


@dataclass(frozen=True)
class VisionBlockWeights:
    """One block of the tower, D wide."""

    first_norm: LayerNorm
    qkv: torch.Tensor  # [3 * D, D], rows: queries, keys, values
    qkv_bias: torch.Tensor  # [3 * D]
    output: torch.Tensor  # [D, D]
    output_bias: torch.Tensor  # [D]
    second_norm: LayerNorm
    inner: torch.Tensor  # [I, D], then quick-GELU
    inner_bias: torch.Tensor  # [I]
    outer: torch.Tensor  # [D, I]
    outer_bias: torch.Tensor  # [D]


@dataclass(frozen=True)
class PooledWindows:
    """A crop's grid of patches, and the side of a window that becomes one feature."""

    grid_side: int
    window: int


@dataclass(frozen=True)
class ConnectorWeights:
    """Pooling by attention and the gated projection; C is the width of all feature blocks together."""

    windows: PooledWindows
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
    """The blocks that run, in order, and what stands around them."""

    patch_weight: torch.Tensor  # [D, 3 * S * S padded with zero columns], S the side of a patch
    class_embedding: torch.Tensor  # [D]
    positions: torch.Tensor  # [P + 1, D]
    before: LayerNorm
    blocks: tuple[VisionBlockWeights, ...]
    feature_blocks: tuple[int, ...]  # whose states are laid side by side
    num_heads: int
    patch_side: int
    connector: ConnectorWeights

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.patch_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.patch_weight.dtype


def fuse_vision_weights(model: MolmoeForConditionalGeneration) -> VisionWeights:
    """The weights of the vision tower and the connector; joined ones become views in the modules.

    Raises:
        ConfigurationError: the tower computes something else than the packed path does (another activation), or its
            weights are quantised, not loaded, or not all on one device in one dtype.
    """
    tower, vision = model.model.vision_tower, model.config.vision_config
    reason = _unsupported_reason(model)
    if reason is not None:
        raise ConfigurationError(f"the vision tower cannot be packed: {reason}; run it with --execution eager")
    embeddings = tower.embeddings
    return VisionWeights(
        patch_weight=_padded(embeddings.patch_embedding.weight.detach().flatten(1)),
        class_embedding=embeddings.class_embedding.detach(),
        positions=embeddings.position_embedding.weight.detach(),
        before=_norm(tower.pre_layernorm),
        blocks=tuple(_block(layer) for layer in tower.layers[: tower.blocks_to_run]),
        feature_blocks=tower.feature_blocks,
        num_heads=vision.num_attention_heads,
        patch_side=vision.patch_size,
        connector=_connector(model),
    )


def _unsupported_reason(model: MolmoeForConditionalGeneration) -> str | None:
    activation = model.config.vision_config.hidden_act
    if activation != "quick_gelu":
        return f"its blocks use {activation}, not quick_gelu"
    parts = nn.ModuleList([model.model.vision_tower, model.model.connector])
    layers = [layer for layer in parts.modules() if isinstance(layer, nn.Linear)]
    return fusing_unsupported_reason(layers, parts.parameters())


def _block(layer: CLIPEncoderLayer) -> VisionBlockWeights:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    return VisionBlockWeights(
        first_norm=_norm(layer.layer_norm1),
        qkv=fused_rows(qkv),
        qkv_bias=fused_biases(qkv),
        output=attention.out_proj.weight.detach(),
        output_bias=attention.out_proj.bias.detach(),
        second_norm=_norm(layer.layer_norm2),
        inner=mlp.fc1.weight.detach(),
        inner_bias=mlp.fc1.bias.detach(),
        outer=mlp.fc2.weight.detach(),
        outer_bias=mlp.fc2.bias.detach(),
    )


def _connector(model: MolmoeForConditionalGeneration) -> ConnectorWeights:
    connector = model.model.connector
    key_value = [connector.k_proj, connector.v_proj]
    return ConnectorWeights(
        windows=PooledWindows(connector.grid_side, connector.window),
        num_heads=connector.num_heads,
        pads=connector.pad_embed.detach(),
        query=connector.q_proj.weight.detach(),
        query_bias=connector.q_proj.bias.detach(),
        key_value=fused_rows(key_value),
        key_value_bias=fused_biases(key_value),
        output=connector.out_proj.weight.detach(),
        output_bias=connector.out_proj.bias.detach(),
        gate_up=fused_rows([connector.gate_proj, connector.up_proj]),
        down=connector.down_proj.weight.detach(),
    )


def _norm(norm: nn.LayerNorm) -> LayerNorm:
    return LayerNorm(norm.weight.detach(), norm.bias.detach(), norm.eps)


def _padded(weight: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(weight, (0, -weight.shape[1] % ALIGNMENT))
