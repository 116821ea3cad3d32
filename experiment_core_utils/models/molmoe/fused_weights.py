"""MolmoE's weights as its engines take them.

The query, key and value weights of a block become views of one tensor; the modules, the state dict and eager runs see
the same values as before. Fuse after the model has its device and dtype: moving it afterwards leaves the fused tensors
behind.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.models.clip.modeling_clip import CLIPEncoderLayer

from experiment_core_utils.engines.weights import (
    ALIGNMENT,
    ConnectorWeights,
    DecoderWeights,
    VisionBlockWeights,
    VisionModules,
    VisionWeights,
    fused_rows,
    fusing_unsupported_reason,
)
from experiment_core_utils.models.hf.decoder_description import fused_decoder
from experiment_core_utils.models.molmoe.modeling_molmoe import PAD_VALUE, MolmoeForConditionalGeneration
from experiment_core_utils.primitives.errors import ConfigurationError


def fuse_decoder_weights(model: MolmoeForConditionalGeneration) -> DecoderWeights:
    """The decoder's weights, also of blocks that are skipped; raises ConfigurationError as `fused_decoder`."""
    with model.knobs():
        return fused_decoder(model)


def fuse_vision_weights(model: MolmoeForConditionalGeneration) -> VisionWeights:
    """The weights of the vision tower and the connector; fused ones become views in the modules.

    Raises:
        ConfigurationError: the tower computes something else than the fused path does (another activation), or its
            weights are quantised, not loaded, or not all on one device in one dtype.
    """
    tower, vision = model.model.vision_tower, model.config.vision_config
    parts = nn.ModuleList([tower, model.model.connector])
    _refuse_other_tower(model, [layer for layer in parts.modules() if isinstance(layer, nn.Linear)], parts.parameters())
    embeddings = tower.embeddings
    patches = embeddings.patch_embedding.weight.detach().flatten(1)
    return VisionWeights(
        patch_weight=nn.functional.pad(patches, (0, -patches.shape[1] % ALIGNMENT)),
        class_embedding=embeddings.class_embedding.detach(),
        positions=embeddings.position_embedding.weight.detach(),
        before=tower.pre_layernorm,
        blocks=tuple(VisionBlockWeights.fused(layer) for layer in tower.layers[: tower.blocks_to_run]),
        feature_blocks=tower.feature_blocks,
        num_heads=vision.num_attention_heads,
        patch_side=vision.patch_size,
        pad_value=PAD_VALUE,
        connector=_connector(model),
    )


def fused_vision_modules(model: MolmoeForConditionalGeneration) -> VisionModules:
    """The tower with fused blocks; weights and biases of queries, keys and values in the modules become views of those.

    Raises:
        ConfigurationError: the tower's blocks compute something else, or their weights are quantised, not loaded, or
            not all on one device in one dtype.
    """
    tower = model.model.vision_tower
    layers = tower.layers[: tower.blocks_to_run]
    linear = [layer for block in layers for layer in _vision_products(block)]
    _refuse_other_tower(model, linear, nn.ModuleList(linear).parameters())
    return VisionModules(
        embeddings=tower.embeddings,
        pre_layernorm=tower.pre_layernorm,
        blocks=tuple(VisionBlockWeights.fused(layer) for layer in layers),
        feature_blocks=tower.feature_blocks,
        num_heads=model.config.vision_config.num_attention_heads,
        pad_value=PAD_VALUE,
        connector=model.model.connector,
    )


def _refuse_other_tower(
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


def _fused(attention: Any) -> list[nn.Linear]:
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def _vision_products(layer: CLIPEncoderLayer) -> list[nn.Module]:
    """The layers of a block whose products the fused path takes."""
    return [*_fused(layer.self_attn), layer.self_attn.out_proj, layer.mlp.fc1, layer.mlp.fc2]


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
