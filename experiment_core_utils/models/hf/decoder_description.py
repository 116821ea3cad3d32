"""The description and fused weights of a transformers decoder whose blocks have the form that engines compute.

A decoder is known by its modules and the values in them, never by its name: which parts a block has, what each part is,
and no part or number beside them. At last the engine's plain torch must give what the modules give for a few tokens,
which shows what structure does not (rotary positions in pairs, parallel parts).
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from experiment_core_utils.engines.description import DecoderDescription, EngineKnobs
from experiment_core_utils.engines.engine_proof import relative_distance
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.reference.decoder import ReferencePrefill
from experiment_core_utils.engines.weights import BlockWeights, DecoderWeights, fused_rows, fusing_unsupported_reason
from experiment_core_utils.models.common.block_modules import block_stack
from experiment_core_utils.models.common.vendor_errors import HF_CODE_ERRORS
from experiment_core_utils.models.hf.known_parts import (
    numbers_unsupported_reason,
    parts_unsupported_reason,
    replaced_unsupported_reason,
)
from experiment_core_utils.primitives.errors import ConfigurationError, first_line

# Rotary frequencies of these do not depend on the length of a prompt.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "mrope")
# Of a decoder's config: what changes scores, logits or states where it is set.
_CHANGES = (
    *("clip_qkv", "attn_logit_softcapping", "final_logit_softcapping", "logits_scaling", "logit_scale"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "llama_4_scaling_beta"),
)
_TRIAL_TOKENS = 7
# Relative; float32 roundings of a few blocks make 1e-6, another form of block a hundredth and more. In lower precision
# roundings make several of its steps, and the proof at each setting finds what passes here.
_MOST_OFF, _MOST_STEPS_OFF = 1e-3, 16


def fused_decoder(model: PreTrainedModel) -> DecoderWeights:
    """The decoder's weights; in the modules, those that are fused become views.

    Raises:
        ConfigurationError: the decoder is not of the known form, in one line; its modules are as before then, or
            compute the same.
    """
    found, head = block_stack(model), model.get_output_embeddings()
    if found is None or head is None or model.get_decoder() is not found.owner or found.name != "layers":
        raise _refused("it has no output head" if head is None else "it has no list of blocks named layers")
    stack = found.owner
    _refuse_config(model)
    _refuse_parts(stack, "its decoder", ("embed_tokens", "layers", "norm", "rotary_emb"))
    if type(stack.embed_tokens) is not nn.Embedding:
        raise _refused(f"its embedding is a {type(stack.embed_tokens).__name__}")
    if not _is_linear(head):
        raise _refused(f"its head is a {type(head).__name__}, or has a bias")
    windows = _windows(model, len(stack.layers))
    blocks = list(stack.layers)
    layers = [layer for block in blocks for layer in _layers(block)]
    reason = fusing_unsupported_reason([*layers, head], [*stack.parameters(), head.weight])
    if reason is None and any(type(weight.data) is not torch.Tensor for weight in model.parameters()):
        reason = "its weights are not plain tensors (divided among processes, or packed)"
    _refuse(reason)
    _refuse(replaced_unsupported_reason(stack))
    eps = _eps(stack.norm)
    norms = [module for block in blocks for name, module in block.named_modules() if name.endswith("norm")]
    _refuse_norms([stack.norm, *norms], eps)
    routed = [block.mlp for block in blocks if hasattr(block.mlp, "experts")]
    top_k, normalises = _routing(routed)
    attention = blocks[0].self_attn
    width, head_width = head.in_features, int(attention.head_dim)
    description = DecoderDescription(
        width=width,
        num_heads=attention.q_proj.out_features // head_width,
        num_kv_heads=attention.k_proj.out_features // head_width,
        head_width=head_width,
        num_experts=routed[0].experts.gate_up_proj.shape[0] if routed else 1,
        expert_width=routed[0].experts.down_proj.shape[2] if routed else blocks[0].mlp.down_proj.in_features,
        head_rows=head.out_features,
        norm_eps=eps,
        default_top_k=top_k,
        normalise_top_k=normalises,
    )
    frequencies, scale = _rotary(stack.rotary_emb, head_width)
    decoder = DecoderWeights.of(
        description,
        blocks=tuple(_fused(block, window) for block, window in zip(blocks, windows, strict=True)),
        embedding=stack.embed_tokens.weight.detach(),
        final_norm=stack.norm.weight.detach(),
        head=head.weight.detach(),
        inverse_frequencies=frequencies.to(stack.norm.weight.device),
        rotary_scale=scale,
    )
    _refuse_other_states(stack, decoder)
    return decoder


def _refused(reason: str) -> ConfigurationError:
    return ConfigurationError(f"engines do not know its decoder: {reason}")


def _refuse_config(model: PreTrainedModel) -> None:
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    for name in _CHANGES:
        value = getattr(config, name, None) or rope.get(name)
        # A factor of 1 changes nothing, a bound of 1 does.
        if value and not (value == 1 and name.endswith(("scaling", "scale", "multiplier"))):
            raise _refused(f"its config has {name} {value}")
    if any(isinstance(value, dict) for value in rope.values()):
        raise _refused("its blocks have rotary positions of several kinds")
    for module in (model, model.base_model):
        _refuse_numbers(module, f"its {type(module).__name__}")


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise _refused(reason)


def _refuse_parts(module: nn.Module, what: str, names: Collection[str]) -> None:
    _refuse(parts_unsupported_reason(module, what, names))


def _refuse_numbers(module: nn.Module, what: str) -> None:
    _refuse(numbers_unsupported_reason(module, what))


def _layers(block: Any) -> list[nn.Linear]:
    """The linear layers of a block of the known form."""
    _refuse_parts(
        block,
        "a block",
        ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"),
    )
    attention, mlp = getattr(block, "self_attn", None), getattr(block, "mlp", None)
    if attention is None or mlp is None or not hasattr(block, "post_attention_layernorm"):
        raise _refused("a block lacks self_attn, mlp or post_attention_layernorm")
    if hasattr(block, "input_layernorm") == hasattr(block, "post_feedforward_layernorm"):
        raise _refused("a block has norms both before and after its parts, or neither")
    _refuse_parts(attention, "its attention", ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"))
    head_width = getattr(attention, "head_dim", None)
    if not isinstance(head_width, int) or head_width % 2:
        raise _refused(f"its attention has heads of {head_width} values")
    if abs(getattr(attention, "scaling", 0.0) * head_width**0.5 - 1) > 1e-6:
        raise _refused("its attention scales scores by another factor than the root of a head's width")
    if getattr(attention, "is_causal", True) is not True:
        raise _refused("its attention is not causal")
    if attention.o_proj.bias is not None:
        raise _refused("the output of its attention has a bias")
    fused = _qkv(attention)
    for layer, name in zip(fused, ("q_norm", "k_norm"), strict=False):
        norm = getattr(attention, name, None)
        if norm is not None and norm.weight.shape[0] not in (head_width, layer.out_features):
            raise _refused(f"its {name} is neither for a head nor for all of them")
    if len({layer.bias is None for layer in fused}) > 1:
        raise _refused("some of queries, keys and values have a bias, others none")
    return [*fused, attention.o_proj, *_mlp_layers(mlp)]


def _qkv(attention: Any) -> list[nn.Linear]:
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def _mlp_layers(mlp: Any) -> list[nn.Linear]:
    if not hasattr(mlp, "experts"):
        return _dense_layers(mlp, "its MLP")
    _refuse_parts(mlp, "its MLP", ("gate", "experts", "shared_expert", "shared_expert_gate"))
    router, experts = mlp.gate, mlp.experts
    _refuse_numbers(router, "its router")
    _refuse_numbers(experts, "its experts")
    own = {name: weight.dim() for name, weight in [*router.named_parameters(), *router.named_buffers()]}
    if own != {"weight": 2}:
        raise _refused(f"its router has {', '.join(own)}")
    stored = {name: weight.dim() for name, weight in [*experts.named_parameters(), *experts.named_buffers()]}
    if stored != {"gate_up_proj": 3, "down_proj": 3} or getattr(experts, "is_transposed", False):
        raise _refused("its experts are not stored together as gate_up_proj and down_proj")
    if not _is_silu(experts.act_fn):
        raise _refused("its experts do not use silu")
    if not hasattr(mlp, "shared_expert"):
        return []
    gate = [mlp.shared_expert_gate] if hasattr(mlp, "shared_expert_gate") else []
    if not all(map(_is_linear, gate)):
        raise _refused("the gate of its shared expert has a bias")
    return [*_dense_layers(mlp.shared_expert, "its shared expert"), *gate]


def _dense_layers(mlp: Any, what: str) -> list[nn.Linear]:
    _refuse_parts(mlp, what, ("gate_proj", "up_proj", "down_proj", "act_fn"))
    layers = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(map(_is_linear, layers)):
        raise _refused(f"{what} lacks gate_proj, up_proj or down_proj, or they have biases")
    if not _is_silu(mlp.act_fn):
        raise _refused(f"{what} does not use silu")
    return layers  # type: ignore[return-value]


def _is_linear(layer: object) -> bool:
    return isinstance(layer, nn.Linear) and layer.bias is None


def _is_silu(activation: Any) -> bool:
    some = torch.linspace(-3, 3, 5)
    return bool(torch.allclose(activation(some), F.silu(some)))


def _eps(norm: Any) -> float:
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(eps, float):
        raise _refused(f"its norm is a {type(norm).__name__}")
    return eps


@torch.inference_mode()
def _refuse_norms(norms: list[Any], eps: float) -> None:
    """Refuses norms that are not RMS norms times their weight with the same eps."""
    seen = set()
    for norm in norms:
        if type(norm) in seen and _eps(norm) == eps:
            continue
        seen.add(type(norm))
        weight = getattr(norm, "weight", None)
        if weight is None or weight.dim() != 1 or len(list(norm.parameters())) != 1:
            raise _refused(f"its norm is a {type(norm).__name__}")
        some = torch.linspace(-1, 2, len(weight), dtype=weight.dtype, device=weight.device)[None]
        found, expected = norm(some), F.rms_norm(some, weight.shape, weight, eps)
        if not torch.allclose(found, expected, rtol=1e-2, atol=1e-4):
            raise _refused(f"its {type(norm).__name__} is another norm than RMSNorm with eps {eps:g}")


@torch.inference_mode()
def _routing(routed: list[Any]) -> tuple[int, bool]:
    """Experts for a token, and whether their weights are made to sum to 1; 1 and False without experts."""
    if not routed:
        return 1, False
    chosen = {(getattr(mlp.gate, "top_k", None), _normalises(mlp.gate)) for mlp in routed}
    if len(chosen) > 1:
        raise _refused("its blocks choose different numbers of experts")
    top_k, normalises = chosen.pop()
    if not isinstance(top_k, int):
        raise _refused("its routers have no top_k of their own")
    return top_k, normalises


def _normalises(router: Any) -> bool:
    """Whether the weights that a router gives to the experts of a few rows are softmax's made to sum to 1, or as they
    are.
    """
    weight = router.weight
    rows = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    found = router(rows)
    ids = next(each for each in found if not each.is_floating_point())
    weights = next(each for each in reversed(found) if each.is_floating_point() and each.shape == ids.shape)
    plain = torch.softmax(F.linear(rows, weight), dim=-1, dtype=torch.float32).gather(1, ids)
    summed = plain / plain.sum(dim=-1, keepdim=True)
    if torch.allclose(weights.float(), summed, rtol=1e-2):
        # Where all experts are chosen both are the same.
        return bool(getattr(router, "norm_topk_prob", True))
    if not torch.allclose(weights.float(), plain, rtol=1e-2):
        raise _refused("its router weighs experts by another rule than softmax")
    return False


def _windows(model: PreTrainedModel, num_blocks: int) -> list[int | None]:
    """The sliding window of each block, as the model's own cache has it."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    if len(layers) != num_blocks:
        raise _refused(f"its cache has {len(layers)} layers and its decoder {num_blocks} blocks")
    kinds = {type(layer).__name__ for layer in layers} - {"DynamicLayer", "DynamicSlidingWindowLayer"}
    if kinds:
        raise _refused(f"its cache has layers of another kind ({', '.join(sorted(kinds))})")
    return [layer.sliding_window if layer.is_sliding else None for layer in layers]


def _rotary(rotary: Any, head_width: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [D / 2] of the positions, and the factor of cosines and sines."""
    kind = getattr(rotary, "rope_type", None)
    if kind not in _ROPE_TYPES:
        raise _refused(f"its rotary positions are of the kind {kind}")
    frequencies = rotary.inv_freq.detach().float()
    if len(frequencies) != head_width // 2:
        raise _refused(f"its rotary positions turn {2 * len(frequencies)} of {head_width} values of a head")
    return frequencies, float(rotary.attention_scaling)


def _fused(block: Any, window: int | None) -> BlockWeights:
    attention, mlp, after = block.self_attn, block.mlp, hasattr(block, "post_feedforward_layernorm")
    layers = _qkv(attention)
    weights = BlockWeights(
        input_norm=None if after else block.input_layernorm.weight.detach(),
        qkv=fused_rows(layers),
        query_norm=attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
        output=attention.o_proj.weight.detach(),
        ffn_norm=None if after else block.post_attention_layernorm.weight.detach(),
        post_attention_norm=block.post_attention_layernorm.weight.detach() if after else None,
        post_ffn_norm=block.post_feedforward_layernorm.weight.detach() if after else None,
        qkv_bias=None if layers[0].bias is None else fused_rows(layers, "bias"),
        has_rope=bool(getattr(attention, "use_rope", True)),
        window=window,
        **_mlp_weights(mlp),
    )
    for name, weight in weights.tensors.items():
        if not weight.is_contiguous():
            raise _refused(f"its {name} weights are not contiguous")
    return weights


def _mlp_weights(mlp: Any) -> dict[str, Any]:
    if not hasattr(mlp, "experts"):
        gate_up = fused_rows([mlp.gate_proj, mlp.up_proj])
        return {"router": None, "gate_up": gate_up[None], "down": mlp.down_proj.weight.detach()[None]}
    weights: dict[str, Any] = {
        "router": mlp.gate.weight.detach(),
        "gate_up": mlp.experts.gate_up_proj.detach(),
        "down": mlp.experts.down_proj.detach(),
    }
    if hasattr(mlp, "shared_expert"):
        shared = mlp.shared_expert
        weights["shared_gate_up"] = fused_rows([shared.gate_proj, shared.up_proj])
        weights["shared_down"] = shared.down_proj.weight.detach()
        if hasattr(mlp, "shared_expert_gate"):
            weights["shared_gate"] = mlp.shared_expert_gate.weight.detach()
    return weights


@torch.inference_mode()
def _refuse_other_states(stack: Any, decoder: DecoderWeights) -> None:
    """Refuses a decoder whose modules give other states for a few tokens than plain torch on the weights."""
    ids = torch.arange(1, _TRIAL_TOKENS + 1, device=decoder.device).remainder(len(decoder.embedding))
    knobs = EngineKnobs(decoder.default_top_k, tuple(range(len(decoder.blocks))))
    cache = KVCache.allocate(decoder, _TRIAL_TOKENS)
    found = ReferencePrefill(decoder).last_state(F.embedding(ids, decoder.embedding), knobs, cache)
    try:
        exact = stack(input_ids=ids[None]).last_hidden_state[0, -1:]
    except HF_CODE_ERRORS as error:
        raise _refused(f"it cannot run a prompt by itself ({first_line(error)})") from error
    off = relative_distance(found, exact)
    if not off <= max(_MOST_OFF, _MOST_STEPS_OFF * torch.finfo(decoder.dtype).eps):
        raise _refused(f"its blocks compute something else than their parts say (relative difference {off:.2g})")
