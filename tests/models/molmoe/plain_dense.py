"""A dense Molmo in plain torch, straight from the published tensors by the formulas of Deitke et al. (2024)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

Tensors = Mapping[str, torch.Tensor]


def plain_logits(
    config: Mapping[str, Any],
    tensors: Tensors,
    ids: torch.Tensor,
    picture: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Logits [T, V] of ids [T]; `picture` is patches [K, 576, 588], masks [K, 576] and places [K, 144]."""
    text = {name.removeprefix("model.transformer."): tensor for name, tensor in tensors.items()}
    states = torch.cat([text["wte.embedding"], text["wte.new_embedding"]])[ids]
    if picture is not None:
        features, places = _features(config, tensors, *picture[:2]), picture[2]
        states[places[places >= 0]] += features[places >= 0]
    for block in range(config["num_hidden_layers"]):
        states = _block(config, text, f"blocks.{block}.", states)
    return _rms(states, text["ln_f.weight"], config["layer_norm_eps"]) @ text["ff_out.weight"].T


def _rms(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return states / (states.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _block(config: Mapping[str, Any], text: Tensors, at: str, states: torch.Tensor) -> torch.Tensor:
    def norm(name: str, values: torch.Tensor, is_here: bool) -> torch.Tensor:
        return _rms(values, text[f"{at}{name}.weight"], config["layer_norm_eps"]) if is_here else values

    after, heads = config["norm_after"], config["num_attention_heads"]
    given = norm("attn_norm", states, not after)
    joint = F.linear(given, text[at + "att_proj.weight"], text.get(at + "att_proj.bias"))
    width = states.shape[1]
    kv = (joint.shape[1] - width) // 2
    q, k, v = joint[:, :width], joint[:, width : width + kv], joint[:, width + kv :]
    q, k = (norm(name, each, config["attention_layer_norm"]) for name, each in (("q_norm", q), ("k_norm", k)))
    q, k, v = (each.unflatten(1, (-1, width // heads)).transpose(0, 1) for each in (q, k, v))
    q, k = (_turned(each, config["rope_theta"]) for each in (q, k))
    # Query head h uses key head h // (heads for a key head).
    k, v = (each.repeat_interleave(heads // len(each), dim=0) for each in (k, v))
    scores = q @ k.transpose(1, 2) / (width // heads) ** 0.5
    later = torch.ones_like(scores[0]).triu(1).bool()
    seen = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
    states = states + norm("attn_norm", seen.transpose(0, 1).flatten(1) @ text[at + "attn_out.weight"].T, after)
    up, gate = (norm("ff_norm", states, not after) @ text[at + "ff_proj.weight"].T).chunk(2, dim=-1)
    return states + norm("ff_norm", (F.silu(gate) * up) @ text[at + "ff_out.weight"].T, after)


def _turned(heads: torch.Tensor, theta: float) -> torch.Tensor:
    """Heads [N, T, D] by position: value i and i + D / 2 turn by t * theta ** (-2 i / D)."""
    half = heads.shape[2] // 2
    angles = torch.outer(torch.arange(heads.shape[1]).float(), theta ** (-torch.arange(half).float() / half))
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def _features(config: Mapping[str, Any], tensors: Tensors, patches: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    weights = {name.removeprefix("model.vision_backbone."): tensor for name, tensor in tensors.items()}
    vision = config["vision_backbone"]

    def product(name: str, values: torch.Tensor) -> torch.Tensor:
        return F.linear(values, weights[name + ".weight"], weights.get(name + ".bias"))

    def norm(name: str, values: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(values, values.shape[-1:], weights[name + ".weight"], weights[name + ".bias"], 1e-5)

    def attention(name: str, queries: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        heads = vision["image_num_heads"]
        q, k, v = (
            product(name + letter, given).unflatten(-1, (heads, -1)).transpose(-2, -3)
            for letter, given in (("wq", queries), ("wk", values), ("wv", values))
        )
        seen = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v
        return product(name + "wo", seen.transpose(-2, -3).flatten(-2))

    of_class = weights["image_vit.class_embedding"].expand(len(patches), 1, -1)
    states = torch.cat([of_class, product("image_vit.patch_embedding", patches)], dim=1)
    states, after = norm("image_vit.pre_ln", states + weights["image_vit.positional_embedding"]), []
    for block in range(vision["image_num_layers"]):
        at = f"image_vit.transformer.resblocks.{block}."
        given = norm(at + "attention_norm", states)
        states = states + attention(at + "attention.", given, given)
        inner = product(at + "feed_forward.w1", norm(at + "ffn_norm", states))
        states = states + product(at + "feed_forward.w2", inner * (1.702 * inner).sigmoid())
        after.append(states[:, 1:])
    found = torch.cat([after[layer] for layer in config["vit_layers"]], dim=-1)
    found = found + weights["pad_embed"][0] * (masks == 0)[..., None]
    found = found + weights["pad_embed"][1] * ((masks != 0) & (masks < 1))[..., None]
    windows = found.unflatten(1, (12, 2, 12, 2)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    pooled = attention("image_pooling_2d.", windows.mean(-2, keepdim=True), windows)[..., 0, :]
    inner = F.silu(product("image_projector.w1", pooled)) * product("image_projector.w3", pooled)
    return product("image_projector.w2", inner)
