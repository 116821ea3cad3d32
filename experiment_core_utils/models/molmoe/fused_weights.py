"""MolmoE's weights as its engines take them.

The query, key and value weights of a block become views of one tensor; the modules, the state dict and eager runs see
the same values as before. Fuse after the model has its device and dtype: moving it afterwards leaves the fused tensors
behind.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from transformers.models.clip.modeling_clip import CLIPEncoderLayer

from experiment_core_utils.engines.description import DecoderDescription
from experiment_core_utils.engines.weights import (
    ALIGNMENT,
    BlockWeights,
    ConnectorWeights,
    DecoderWeights,
    VisionBlockWeights,
    VisionModules,
    VisionWeights,
    fused_rows,
    fusing_unsupported_reason,
)
from experiment_core_utils.models.molmoe.configuration_molmoe import MolmoeConfig
from experiment_core_utils.models.molmoe.modeling_molmoe import PAD_VALUE, MolmoeForConditionalGeneration
from experiment_core_utils.primitives.errors import ConfigurationError


def decoder_description(config: MolmoeConfig) -> DecoderDescription:
    """The sizes of the decoder of such a model."""
    text = config.text_config
    return DecoderDescription(
        width=text.hidden_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_width=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        num_experts=text.num_experts,
        expert_width=text.intermediate_size,
        head_rows=config.head_vocab_size,
        norm_eps=text.rms_norm_eps,
        default_top_k=text.num_experts_per_tok,
        normalise_top_k=bool(text.norm_topk_prob),
    )


def fuse_decoder_weights(model: MolmoeForConditionalGeneration) -> DecoderWeights:
    """The decoder's weights; those of queries, keys and values in the modules become views of the fused tensor.

    Raises:
        ConfigurationError: what the blocks compute is not what the fused path does (quantised weights, clipped or
            biased attention, a sliding window, another activation or rotary scaling), or the weights are not all on
            one device in one dtype, or not of the sizes that the config says.
    """
    text = model.config.text_config
    reason = _config_unsupported_reason(text.to_dict()) or _weights_unsupported_reason(model)
    if reason is not None:
        raise ConfigurationError(f"the decoder cannot be fused: {reason}; run it with --execution eager")
    decoder = model.get_decoder()
    return DecoderWeights.of(
        decoder_description(model.config),
        blocks=tuple(_fuse_weights(block) for block in model.all_blocks),
        embedding=decoder.embed_tokens.weight.detach(),
        final_norm=decoder.norm.weight.detach(),
        head=model.lm_head.weight.detach(),
        inverse_frequencies=decoder.rotary_emb.inv_freq.detach().to(model.device, torch.float32),
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
    for name, weight in fused.tensors.items():
        if not weight.is_contiguous():
            raise ConfigurationError(f"the decoder cannot be fused: its {name} weights are not contiguous")
    return fused


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
