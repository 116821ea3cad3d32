"""Attention of one new token over a KV cache (flash decoding), which also appends its key and value.

Positions are distributed over programs (`SPLITS`), and the last program of a head to finish combines the parts: partial
[B, Q, SPLITS, D] with the largest score `peaks` and the sum of weights `totals` [B, Q, SPLITS] of each part, always in
the order of the parts. Importing this module needs Triton.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from experiment_core_utils.engines.gpu.triton.gemv import ask_for, is_last, launch, padded_values, wait_for_previous
from experiment_core_utils.engines.gpu.triton.tuning import Tile, tuning_at
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import BlockWeights, DecoderWeights

# Below any score; finite, so that a part without positions has weights of 0 and not NaN.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _spread(values, WIDTH: tl.constexpr, eps):  # type: ignore[no-untyped-def]
    """Factor of the root-mean-square norm of WIDTH values (zeros beyond them)."""
    return tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + eps)


@triton.jit
def _store_head(places, values, D: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    if PADDED == D:
        tl.store(places, values)
    else:
        tl.store(places, values, mask=tl.arange(0, PADDED) < D)


@triton.jit
def _in_heads(inside, D: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of [BLOCK, PADDED] values are of rows that are `inside` [BLOCK], and of their first D."""
    there = inside[:, None]
    if PADDED > D:
        there = there & (tl.arange(0, PADDED) < D)[None, :]
    return there


@triton.jit
def _of_heads(  # type: ignore[no-untyped-def]
    norm, head, D: tl.constexpr, PADDED: tl.constexpr, NORMS: tl.constexpr, SHIFT: tl.constexpr = 0
):
    """Weights of the D values of one head, those SHIFT values further round; 1 without a norm."""
    along = (tl.arange(0, PADDED) + SHIFT) % D
    weight = tl.full((PADDED,), 1.0, dtype=tl.float32)
    if NORMS == 1:
        weight = tl.load(norm + head * D + along).to(tl.float32)
    elif NORMS == 2:
        weight = tl.load(norm + along).to(tl.float32)
    return weight


@triton.jit
def _rotated(own, other, cosine, sine, D: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """D values of one head with rotary positions applied; `other` are the values half a head away."""
    return own * cosine + tl.where(tl.arange(0, PADDED) < D // 2, -other, other) * sine


@triton.jit
def _with_positions(query, key, value, inside, peak, total, mixed):  # type: ignore[no-untyped-def]
    """The running softmax after [BLOCK, D] more keys and values."""
    score = tl.sum(key.to(tl.float32) * query[None, :], axis=1)
    score = tl.where(inside, score, LOWEST)
    higher = tl.maximum(peak, tl.max(score, axis=0))
    weight = tl.where(inside, tl.exp(score - higher), 0.0)
    shrink = tl.exp(peak - higher)
    mixed = mixed * shrink + tl.sum(value.to(tl.float32) * weight[:, None], axis=0)
    return higher, total * shrink + tl.sum(weight, axis=0), mixed


@triton.jit
def _together(  # type: ignore[no-untyped-def]
    partial,
    peaks,
    totals,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
):
    """D values of one head combined from its parts, which other programs wrote: read past the first-level cache."""
    part = tl.arange(0, PADDED_SPLITS)
    there = part < SPLITS
    peak = tl.load(peaks + part, mask=there, other=LOWEST, cache_modifier=".cg")
    total = tl.load(totals + part, mask=there, other=0.0, cache_modifier=".cg")
    place = partial + part[:, None] * D + tl.arange(0, PADDED)[None, :]
    mixed = tl.load(place, mask=_in_heads(there, D, PADDED), other=0.0, cache_modifier=".cg")
    weight = tl.exp(peak - tl.max(peak, axis=0))
    return tl.sum(mixed * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)


@triton.jit
def attention_kernel(  # type: ignore[no-untyped-def]
    qkv,
    query_norm,
    key_norm,
    cosines,
    sines,
    keys,
    values,
    lengths,
    rotary_offsets,
    partial,
    peaks,
    totals,
    counters,
    attended,
    following,
    max_seq_len,
    eps,
    scale,
    Q: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_Q: tl.constexpr,
    PADDED_KV: tl.constexpr,
    NORMS: tl.constexpr,
    ROPE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute attended [B, Q, D] of one token over the KV cache; programs: (head, split, request).

    The first split also takes the new token, and stores its key and value. Each program asks for AHEAD bytes of the
    weight `following`. NORMS of queries and of keys: 0 for none, 1 for one over all heads, 2 for one of each head.
    WINDOW: positions that the token sees, itself among them; 0 for all.
    """
    head = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2)
    kv_head = head // (Q // KV)
    along = tl.arange(0, PADDED)
    length = tl.load(lengths + request).to(tl.int32)
    seen_from = 0
    if WINDOW:
        seen_from = tl.maximum(length + 1 - WINDOW, 0)
    taken = tl.cdiv(length - seen_from, SPLITS)
    begin = seen_from + split * taken
    end = tl.minimum(begin + taken, length)
    first = (request * KV + kv_head).to(tl.int64) * max_seq_len * D
    keys += first
    values += first
    slot = begin + tl.arange(0, BLOCK)
    place = slot[:, None] * D + along[None, :]
    key = tl.load(keys + place, mask=_in_heads(slot < end, D, PADDED), other=0.0)
    value = tl.load(values + place, mask=_in_heads(slot < end, D, PADDED), other=0.0)
    partner = (along + D // 2) % D
    query_scale = _of_heads(query_norm, head, D, PADDED, NORMS) * scale
    key_scale = _of_heads(key_norm, kv_head, D, PADDED, NORMS)
    if ROPE:
        position = length + tl.load(rotary_offsets + request).to(tl.int32)
        cosine = padded_values(cosines + position * D + along, D, PADDED)
        sine = padded_values(sines + position * D + along, D, PADDED)
        query_scale_other = _of_heads(query_norm, head, D, PADDED, NORMS, D // 2) * scale
        key_scale_other = _of_heads(key_norm, kv_head, D, PADDED, NORMS, D // 2)
    wait_for_previous(PDL)
    # All loads before the first sum, which waits for the slowest.
    queries = qkv + request * (Q + 2 * KV) * D
    if NORMS == 1:
        column = tl.arange(0, PADDED_Q)
        normed_query = tl.load(queries + column, mask=column < Q * D, other=0.0)
        kv_column = tl.arange(0, PADDED_KV)
        normed_key = tl.load(queries + Q * D + kv_column, mask=kv_column < KV * D, other=0.0)
    elif NORMS == 2:
        normed_query = padded_values(queries + head * D + along, D, PADDED)
        normed_key = padded_values(queries + (Q + kv_head) * D + along, D, PADDED)
    query = padded_values(queries + head * D + along, D, PADDED) * query_scale
    new_key = padded_values(queries + (Q + kv_head) * D + along, D, PADDED) * key_scale
    new_value = padded_values(queries + (Q + KV + kv_head) * D + along, D, PADDED)
    ask_for(following, head * SPLITS + split, AHEAD, THREADS)
    if ROPE:
        query_other = tl.load(queries + head * D + partner) * query_scale_other
        key_other = tl.load(queries + (Q + kv_head) * D + partner) * key_scale_other
        query = _rotated(query, query_other, cosine, sine, D, PADDED)
        new_key = _rotated(new_key, key_other, cosine, sine, D, PADDED)
    if NORMS == 1:
        query *= _spread(normed_query, Q * D, eps)
        new_key *= _spread(normed_key, KV * D, eps)
    elif NORMS == 2:
        query *= _spread(normed_query, D, eps)
        new_key *= _spread(normed_key, D, eps)
    if (split == 0) & (head % (Q // KV) == 0):
        _store_head(keys + length * D + along, new_key.to(keys.dtype.element_ty), D, PADDED)
        _store_head(values + length * D + along, new_value.to(values.dtype.element_ty), D, PADDED)
    own = tl.where(split == 0, tl.sum(query * new_key, axis=0), LOWEST)
    share = tl.where(split == 0, 1.0, 0.0)
    peak, total, mixed = _with_positions(query, key, value, slot < end, own, share, new_value * share)
    begin += BLOCK
    while begin < end:
        slot = begin + tl.arange(0, BLOCK)
        place = slot[:, None] * D + along[None, :]
        key = tl.load(keys + place, mask=_in_heads(slot < end, D, PADDED), other=0.0)
        value = tl.load(values + place, mask=_in_heads(slot < end, D, PADDED), other=0.0)
        peak, total, mixed = _with_positions(query, key, value, slot < end, peak, total, mixed)
        begin += BLOCK
    first = (request * Q + head) * SPLITS
    part = first + split
    _store_head(partial + part * D + along, mixed, D, PADDED)
    tl.store(peaks + part, peak)
    tl.store(totals + part, total)
    if is_last(counters + request * Q + head, SPLITS):
        whole = _together(partial + first * D, peaks + first, totals + first, D, PADDED, SPLITS, PADDED_SPLITS)
        _store_head(attended + (request * Q + head) * D + along, whole, D, PADDED)


@dataclass(frozen=True)
class AttentionBuffers:
    """Buffers between the kernels around attention: B requests, S splits, T positions; float32 unless noted."""

    qkv: torch.Tensor  # [B, (Q + 2 * KV) * D]
    partial: torch.Tensor  # [B, Q, S, D]
    peaks: torch.Tensor  # [B, Q, S]
    totals: torch.Tensor  # [B, Q, S]
    counters: torch.Tensor  # [B * Q] int32, 0 between kernels
    attended: torch.Tensor  # [B, Q * D] in the dtype that was requested
    cosines: torch.Tensor  # [T, D]
    sines: torch.Tensor  # [T, D]

    @classmethod
    @torch.inference_mode(False)
    def allocate(
        cls, decoder: DecoderWeights, batch: int, max_seq_len: int, splits: int, attended: torch.dtype
    ) -> "AttentionBuffers":
        """The buffers, beside the decoder's weights, for every block."""
        heads, width = decoder.num_heads, decoder.head_width

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=decoder.device)

        positions = torch.arange(max_seq_len, dtype=torch.float32, device=decoder.device)
        angles = torch.outer(positions, decoder.inverse_frequencies).repeat(1, 2)
        cosines, sines = decoder.rotary_scale * angles.cos(), decoder.rotary_scale * angles.sin()
        return cls(
            qkv=floats(batch, decoder.blocks[0].qkv.shape[0]),
            partial=floats(batch, heads, splits, width),
            peaks=floats(batch, heads, splits),
            totals=floats(batch, heads, splits),
            counters=torch.zeros(batch * heads, dtype=torch.int32, device=decoder.device),
            attended=floats(batch, heads * width).to(attended),
            cosines=cosines,
            sines=sines,
        )


def launch_attention(
    decoder: DecoderWeights,
    block: BlockWeights,
    kv_cache: KVCache,
    row: int,
    buffers: AttentionBuffers,
    tile: Tile,
    splits: int,
    use_pdl: bool,
    following: torch.Tensor | None = None,
) -> None:
    """`buffers.qkv` -> `buffers.attended`; the token's keys and values go into the block's row of the KV cache.

    Args:
        following: a weight that is read later, whose first bytes are asked for; None for none.
    """
    width, norms = decoder.head_width, decoder.norms_of_heads(block)
    programs, threads, ahead = decoder.num_heads * splits, 32 * tile.warps, 0
    if following is not None:
        ahead = min(1024 * tuning_at(decoder.device).ahead, following.nbytes) // (programs * 128 * threads)
    launch(
        attention_kernel,
        (decoder.num_heads, splits, kv_cache.batch),
        tile.warps,
        use_pdl,
        (
            buffers.qkv,
            # What a block has not is not read.
            block.query_norm if norms else block.qkv,
            block.key_norm if norms else block.qkv,
            buffers.cosines,
            buffers.sines,
            kv_cache.keys[row],
            kv_cache.values[row],
            kv_cache.device_lengths,
            kv_cache.device_rotary_offsets,
            buffers.partial,
            buffers.peaks,
            buffers.totals,
            buffers.counters,
            buffers.attended,
            block.qkv if following is None else following,
            kv_cache.max_seq_len,
            decoder.norm_eps,
            width**-0.5,
        ),
        Q=decoder.num_heads,
        KV=decoder.num_kv_heads,
        D=width,
        PADDED=triton.next_power_of_2(width),
        PADDED_Q=triton.next_power_of_2(decoder.num_heads * width),
        PADDED_KV=triton.next_power_of_2(decoder.num_kv_heads * width),
        NORMS=norms,
        ROPE=block.has_rope,
        WINDOW=0 if block.window is None else block.window,
        SPLITS=splits,
        BLOCK=tile.rows,
        PADDED_SPLITS=triton.next_power_of_2(splits),
        AHEAD=ahead * 128 * threads,
        THREADS=threads,
    )
