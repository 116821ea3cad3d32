"""In: a MolmoE model on its device; out: its decoder's weights as plain tensors, laid out for few products a block.

The query, key and value weights of a block become views of one tensor, so that nothing is held twice; the modules, the
state dict and eager runs see the same values as before. Pack after the model has its device and dtype: moving it
afterwards leaves the packed tensors behind.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from experiment_core_utils.models.molmoe.joined_layers import fused_rows, fusing_unsupported_reason
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.primitives.errors import ConfigurationError


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
    """Every block of the whole decoder, whatever is active, and what stands around them."""

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
        """Where the weights are."""
        return self.head.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.head.dtype

    @property
    def width(self) -> int:
        """H."""
        return int(self.head.shape[1])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.blocks[0].router.shape[0])

    @property
    def expert_width(self) -> int:
        """I."""
        return int(self.blocks[0].down.shape[2])


def fuse_decoder_weights(model: MolmoeForConditionalGeneration) -> DecoderWeights:
    """The decoder's weights; those of queries, keys and values in the modules become views of the packed tensor.

    Raises:
        ConfigurationError: what the blocks compute is not what the packed path does (quantised weights, clipped or
            biased attention, a sliding window, another activation or rotary scaling), or the weights are not all on
            one device in one dtype.
    """
    text = model.config.text_config
    reason = _config_unsupported_reason(text.to_dict()) or _weights_unsupported_reason(model)
    if reason is not None:
        raise ConfigurationError(f"the decoder cannot be packed: {reason}; run it with --execution eager")
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
    weights = [weight for block in model.all_blocks for weight in _block_weights(block)]
    decoder = model.get_decoder()
    weights += [decoder.embed_tokens.weight, decoder.norm.weight, model.lm_head.weight]
    linear = [layer for block in model.all_blocks for layer in _projections(block)]
    return fusing_unsupported_reason(linear, weights)


def _projections(block: Any) -> tuple[Any, ...]:
    attention = block.self_attn
    return attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj


def _block_weights(block: Any) -> Iterator[torch.Tensor]:
    yield from (layer.weight for layer in _projections(block))
    attention, mixture = block.self_attn, block.mlp
    for norm in (block.input_layernorm, attention.q_norm, attention.k_norm, block.post_attention_layernorm):
        yield norm.weight
    yield from (mixture.gate.weight, mixture.experts.gate_up_proj, mixture.experts.down_proj)


def _fuse_weights(block: Any) -> BlockWeights:
    attention, mixture = block.self_attn, block.mlp
    packed = BlockWeights(
        input_norm=block.input_layernorm.weight.detach(),
        qkv=fused_rows([attention.q_proj, attention.k_proj, attention.v_proj]),
        query_norm=attention.q_norm.weight.detach(),
        key_norm=attention.k_norm.weight.detach(),
        output=attention.o_proj.weight.detach(),
        ffn_norm=block.post_attention_layernorm.weight.detach(),
        router=mixture.gate.weight.detach(),
        gate_up=mixture.experts.gate_up_proj.detach(),
        down=mixture.experts.down_proj.detach(),
    )
    # A tensor that came out of a file need not be contiguous; a copy of it would be held twice.
    for name, weight in vars(packed).items():
        if not weight.is_contiguous():
            raise ConfigurationError(f"the decoder cannot be packed: its {name} weights are not contiguous")
    return packed
