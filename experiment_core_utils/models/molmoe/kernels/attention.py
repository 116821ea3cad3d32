"""In: queries, keys and values of one token and the store; out: the residual stream after a block's attention.

Positions are shared out over programs (`SPLITS`), whose partial sums the output projection's programs put together:
partial [B, SPLITS, Q, D] with the largest score `peaks` and the sum of weights `totals` [B, SPLITS, Q] of each part.
Importing this module needs Triton.
"""

import triton
import triton.language as tl

from experiment_core_utils.models.molmoe.kernels.dense_products import (
    fetch_ahead,
    stream_row,
    wait_for_previous,
    weight_rows,
)

# Below any score; finite, so that a part without positions has weights of 0 and not NaN.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _spread(values, WIDTH: tl.constexpr, eps):  # type: ignore[no-untyped-def]
    """Factor of the root-mean-square norm of WIDTH values (zeros beyond them)."""
    return tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + eps)


@triton.jit
def _rotated(own, other, cosine, sine, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """D values of one head turned to their position; `other` are the values half a head away."""
    return own * cosine + tl.where(tl.arange(0, D) < D // 2, -other, other) * sine


@triton.jit
def _with_positions(query, key, value, inside, peak, total, mixed):  # type: ignore[no-untyped-def]
    """The running softmax with [BLOCK, D] more keys and values."""
    score = tl.sum(key.to(tl.float32) * query[None, :], axis=1)
    score = tl.where(inside, score, LOWEST)
    higher = tl.maximum(peak, tl.max(score, axis=0))
    weight = tl.where(inside, tl.exp(score - higher), 0.0)
    shrink = tl.exp(peak - higher)
    mixed = mixed * shrink + tl.sum(value.to(tl.float32) * weight[:, None], axis=0)
    return higher, total * shrink + tl.sum(weight, axis=0), mixed


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
    partial,
    peaks,
    totals,
    ahead,
    ahead_lines,
    slots,
    eps,
    scale,
    Q: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    PADDED_Q: tl.constexpr,
    PADDED_KV: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs: (head, split, request). The first split also takes the new token, and stores its key and value.

    As little memory traffic is left to attention, its programs also fetch LINES each of the weight `ahead`.
    """
    head = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2)
    kv_head = head // (Q // KV)
    along = tl.arange(0, D)
    length = tl.load(lengths + request).to(tl.int32)
    cosine = tl.load(cosines + length * D + along)
    sine = tl.load(sines + length * D + along)
    taken = tl.cdiv(length, SPLITS)
    begin = split * taken
    end = tl.minimum(begin + taken, length)
    first = (request * KV + kv_head).to(tl.int64) * slots * D
    keys += first
    values += first
    slot = begin + tl.arange(0, BLOCK)
    place = slot[:, None] * D + along[None, :]
    key = tl.load(keys + place, mask=(slot < end)[:, None], other=0.0)
    value = tl.load(values + place, mask=(slot < end)[:, None], other=0.0)
    partner = (along + D // 2) % D
    query_scale = tl.load(query_norm + head * D + along).to(tl.float32) * scale
    query_scale_other = tl.load(query_norm + head * D + partner).to(tl.float32) * scale
    key_scale = tl.load(key_norm + kv_head * D + along).to(tl.float32)
    key_scale_other = tl.load(key_norm + kv_head * D + partner).to(tl.float32)
    wait_for_previous(PDL)
    # All loads before the first sum, which waits for the slowest.
    queries = qkv + request * (Q + 2 * KV) * D
    column = tl.arange(0, PADDED_Q)
    every_query = tl.load(queries + column, mask=column < Q * D, other=0.0)
    kv_column = tl.arange(0, PADDED_KV)
    every_key = tl.load(queries + Q * D + kv_column, mask=kv_column < KV * D, other=0.0)
    query = tl.load(queries + head * D + along) * query_scale
    query_other = tl.load(queries + head * D + partner) * query_scale_other
    new_key = tl.load(queries + (Q + kv_head) * D + along) * key_scale
    key_other = tl.load(queries + (Q + kv_head) * D + partner) * key_scale_other
    new_value = tl.load(queries + (Q + KV + kv_head) * D + along)
    if LINES > 0:
        fetch_ahead(ahead, ahead_lines, head + Q * (split + SPLITS * request), LINES)
    query = _rotated(query, query_other, cosine, sine, D) * _spread(every_query, Q * D, eps)
    new_key = _rotated(new_key, key_other, cosine, sine, D) * _spread(every_key, KV * D, eps)
    stores = (split == 0) & (head % (Q // KV) == 0)
    tl.store(keys + length * D + along, new_key.to(keys.dtype.element_ty), mask=stores & (along < D))
    tl.store(values + length * D + along, new_value.to(values.dtype.element_ty), mask=stores & (along < D))
    own = tl.where(split == 0, tl.sum(query * new_key, axis=0), LOWEST)
    share = tl.where(split == 0, 1.0, 0.0)
    peak, total, mixed = _with_positions(query, key, value, slot < end, own, share, new_value * share)
    begin += BLOCK
    while begin < end:
        slot = begin + tl.arange(0, BLOCK)
        place = slot[:, None] * D + along[None, :]
        key = tl.load(keys + place, mask=(slot < end)[:, None], other=0.0)
        value = tl.load(values + place, mask=(slot < end)[:, None], other=0.0)
        peak, total, mixed = _with_positions(query, key, value, slot < end, peak, total, mixed)
        begin += BLOCK
    part = (request * SPLITS + split) * Q + head
    tl.store(partial + part * D + along, mixed)
    tl.store(peaks + part, peak)
    tl.store(totals + part, total)


@triton.jit
def attention_output_kernel(  # type: ignore[no-untyped-def]
    partial,
    peaks,
    totals,
    weight,
    source,
    tokens,
    stream,
    rows,
    Q: tl.constexpr,
    D: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    EMBED: tl.constexpr,
    PDL: tl.constexpr,
):
    """stream [B, rows] = source + weight [rows, Q * D] times what the heads attended to."""
    request = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tile = weight_rows(weight, row, tl.arange(0, PADDED_HEADS * D), rows, Q * D, EXACT)
    wait_for_previous(PDL)
    head = tl.arange(0, PADDED_HEADS)
    along = tl.arange(0, D)
    there = head < Q
    first = request * SPLITS * Q
    highest = tl.full((PADDED_HEADS,), LOWEST, dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        highest = tl.maximum(highest, tl.load(peaks + first + split * Q + head, mask=there, other=LOWEST))
    total = tl.zeros((PADDED_HEADS,), dtype=tl.float32)
    mixed = tl.zeros((PADDED_HEADS, D), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        part = first + split * Q + head
        factor = tl.exp(tl.load(peaks + part, mask=there, other=LOWEST) - highest)
        total += factor * tl.load(totals + part, mask=there, other=1.0)
        summed = tl.load(partial + part[:, None] * D + along[None, :], mask=there[:, None], other=0.0)
        mixed += factor[:, None] * summed
    attended = tl.reshape(mixed / total[:, None], (PADDED_HEADS * D,))
    product = tl.sum(tile.to(tl.float32) * attended[None, :], axis=1)
    before = tl.load(stream_row(source, tokens, request, rows, EMBED) + row, mask=row < rows, other=0.0)
    tl.store(stream + request * rows + row, before.to(tl.float32) + product, mask=row < rows)
