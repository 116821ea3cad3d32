"""Small random decoders whose blocks have every form that the kernels take, and what they compute, in float64."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from experiment_core_utils.engines.description import DecoderDescription, EngineKnobs
from experiment_core_utils.engines.weights import BlockWeights, DecoderWeights

# Widths that fill no tile, and two query heads for each of keys and values.
WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, EXPERTS, INNER, ROWS = 70, 6, 3, 32, 5, 37, 33
BIASED, SHARED, HEAD_NORMS = ["qkv_bias"], ["shared_gate_up", "shared_down"], ["query_norm", "key_norm"]
GATED, POST_NORMS = [*SHARED, "shared_gate"], ["post_attention_norm", "post_ffn_norm"]
# Of each: what all blocks have, what the first, second and third have beside it, and whether weights are renormalised.
FORMS: dict[str, tuple[list[str], tuple[list[str], list[str], list[str]], bool]] = {
    "no_norms_of_heads": ([], ([], [], []), False),
    "norms_of_each_head": (HEAD_NORMS, ([], [], []), False),
    "norms_of_all_heads": (["whole_norms"], ([], [], []), True),
    "bias": (BIASED, ([], [], []), True),
    "dense": ([], (["dense"], ["dense"], ["dense"]), False),
    "dense_first_then_shared": ([], (["dense"], SHARED, SHARED), True),
    "gated_shared": (BIASED, (GATED, GATED, ["dense"]), False),
    "no_rope_in_one": (["dense"], ([], ["no_rope"], []), False),
    "scaled_rotary_factors": (["dense", "scaled_rotary"], ([], [], []), False),
    "window_of_5_in_two": (["dense"], (["window_5"], [], ["window_5"]), False),
    "window_of_1": (HEAD_NORMS, (["window_1"], ["window_1"], []), False),
    "norms_behind": (["dense", "whole_norms", *POST_NORMS, "no_norms_before"], ([], [], []), False),
    "norms_before_and_behind": (POST_NORMS, ([], ["dense"], []), True),
}


def decoder_of_form(form: str) -> DecoderWeights:
    """Three blocks of that form, from the same random numbers each time."""
    torch.manual_seed(len(form))
    of_all, of_each, normalises = FORMS[form]
    sizes = DecoderDescription(
        *(WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, EXPERTS, INNER, ROWS),
        norm_eps=1e-5,
        default_top_k=3,
        normalise_top_k=normalises,
    )
    return DecoderWeights.of(
        sizes,
        blocks=tuple(_block({*of_all, *own}) for own in of_each),
        embedding=torch.randn(ROWS, WIDTH),
        final_norm=_norm(WIDTH),
        head=_matrix(ROWS, WIDTH),
        inverse_frequencies=10.0 ** -torch.linspace(0, 3, HEAD_WIDTH // 2),
        rotary_scale=1.3 if "scaled_rotary" in of_all else 1.0,
    )


def _norm(width: int) -> torch.Tensor:
    return 1 + 0.2 * torch.randn(width)


def _matrix(*size: int) -> torch.Tensor:
    """Products with it keep the size of what they are given."""
    return torch.randn(size) * size[-1] ** -0.5


def _block(parts: set[str]) -> BlockWeights:
    joined, attended = (HEADS + 2 * KV_HEADS) * HEAD_WIDTH, HEADS * HEAD_WIDTH
    # Another inner width than that of experts.
    experts, inner = (1, 45) if "dense" in parts else (EXPERTS, INNER)
    block = BlockWeights(
        input_norm=_norm(WIDTH),
        qkv=_matrix(joined, WIDTH),
        query_norm=None,
        key_norm=None,
        output=_matrix(WIDTH, attended),
        ffn_norm=_norm(WIDTH),
        router=None if "dense" in parts else 3 * _matrix(EXPERTS, WIDTH),
        gate_up=_matrix(experts, 2 * inner, WIDTH),
        down=_matrix(experts, WIDTH, inner),
        has_rope="no_rope" not in parts,
    )
    more: dict[str, Any] = {
        "qkv_bias": torch.randn(joined),
        "shared_gate_up": _matrix(2 * 21, WIDTH),
        "shared_down": _matrix(WIDTH, 21),
        "shared_gate": _matrix(1, WIDTH),
        "query_norm": _norm(HEAD_WIDTH),
        "key_norm": _norm(HEAD_WIDTH),
        "post_attention_norm": _norm(WIDTH),
        "post_ffn_norm": _norm(WIDTH),
    }
    block = replace(block, **{name: more[name] for name in sorted(parts & more.keys())})
    if "whole_norms" in parts:
        block = replace(block, query_norm=_norm(attended), key_norm=_norm(KV_HEADS * HEAD_WIDTH))
    if "no_norms_before" in parts:
        block = replace(block, input_norm=None, ffn_norm=None)
    windows = [int(part.removeprefix("window_")) for part in parts if part.startswith("window_")]
    return replace(block, window=windows[0]) if windows else block


class Expected(NamedTuple):
    """Of a sequence of T tokens."""

    states: torch.Tensor  #: [T, H] behind the blocks
    logits: torch.Tensor  #: [T, V]
    keys: torch.Tensor  #: [L, KV, T, D]
    values: torch.Tensor
    topk_ids: dict[int, torch.Tensor]  #: [T, k] of each block with experts that ran


def in_float64(decoder: DecoderWeights, embeddings: torch.Tensor, knobs: EngineKnobs) -> Expected:
    """Embeddings [T, H] through the blocks, by the formulas, a token's experts one after the other."""
    states, kept, chosen, eps = embeddings.double(), [], {}, decoder.norm_eps
    tokens = len(states)
    steps = torch.arange(tokens)
    angles = torch.outer(steps.double(), decoder.inverse_frequencies.double())
    turns = torch.polar(torch.full_like(angles, decoder.rotary_scale), angles)[:, None]

    def normed(rows: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return rows
        groups = rows.unflatten(-1, (-1, len(weight)))
        return (groups / (groups.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()).flatten(-2)

    def turned(heads: torch.Tensor) -> torch.Tensor:
        """The halves of a head [T, N, D] are the real and the imaginary part of a number that turns."""
        number = torch.complex(*heads.chunk(2, dim=-1)) * turns
        return torch.cat([number.real, number.imag], dim=-1)

    def expert(row: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = (gate_up.double() @ row).chunk(2)
        return down.double() @ (F.silu(gate) * up)

    for index in knobs.blocks:
        block = decoder.blocks[index]
        joint = normed(states, block.input_norm) @ block.qkv.double().t()
        if block.qkv_bias is not None:
            joint = joint + block.qkv_bias
        queries, keys, values = joint.split([each * HEAD_WIDTH for each in (HEADS, KV_HEADS, KV_HEADS)], dim=1)
        queries, keys = normed(queries, block.query_norm), normed(keys, block.key_norm)
        queries, keys, values = (each.unflatten(1, (-1, HEAD_WIDTH)) for each in (queries, keys, values))
        if block.has_rope:
            queries, keys = turned(queries), turned(keys)
        kept.append((keys.transpose(0, 1), values.transpose(0, 1)))
        many_keys, many_values = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (keys, values))
        before = steps[:, None] - steps
        unseen = (before < 0) | (before >= (block.window or tokens))
        scores = torch.einsum("qnd,knd->nqk", queries, many_keys) / HEAD_WIDTH**0.5
        weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1)
        attended = torch.einsum("nqk,knd->qnd", weights, many_values).flatten(1)
        states = states + normed(attended @ block.output.double().t(), block.post_attention_norm)
        given, sums = normed(states, block.ffn_norm), torch.zeros_like(states)
        if block.router is None:
            weights, ids = torch.ones(tokens, 1).double(), torch.zeros(tokens, 1, dtype=torch.int64)
        else:
            shares = (given @ block.router.double().t()).softmax(dim=1)
            weights, ids = shares.topk(decoder.experts_of(index, knobs.top_k))
            weights = weights / weights.sum(dim=1, keepdim=True) if decoder.normalise_top_k else weights
            chosen[index] = ids
        for token, row in enumerate(given):
            for weight, one in zip(weights[token], ids[token], strict=True):
                sums[token] += weight * expert(row, block.gate_up[one], block.down[one])
            if block.shared_gate_up is not None and block.shared_down is not None:
                shared = expert(row, block.shared_gate_up, block.shared_down)
                gate = block.shared_gate
                sums[token] += shared if gate is None else (gate.double() @ row).sigmoid() * shared
        states = states + normed(sums, block.post_ffn_norm)
    logits = normed(states, decoder.final_norm) @ decoder.head.double().t()
    all_keys, all_values = (torch.stack(each).float() for each in zip(*kept, strict=True))
    return Expected(states.float(), logits.float(), all_keys, all_values, chosen)
