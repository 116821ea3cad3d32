"""In: the residual stream and a block's router and experts; out: the stream after the block's mixture of experts.

There is no kernel that routes: each program of the experts' products finds its own experts in the router's logits.
Experts rank by their logit, the lower index first among equal ones. Importing this module needs Triton.
"""

import triton
import triton.language as tl

from experiment_core_utils.models.molmoe.kernels.dense_products import normed, wait_for_previous, weight_rows


@triton.jit
def router_kernel(  # type: ignore[no-untyped-def]
    stream,
    norm,
    weight,
    logits,
    state_out,
    experts,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """logits [B, E] of the norm of the stream, and that norm [B, WIDTH]; programs: (request, block of experts)."""
    request = tl.program_id(0)
    expert = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    tile = weight_rows(weight, expert, column, experts, WIDTH, EXACT)
    scale = tl.load(norm + column, mask=inside, other=0.0)
    wait_for_previous(PDL)
    state = tl.load(stream + request * WIDTH + column, mask=inside, other=0.0)
    state = normed(state, scale, WIDTH, eps)
    total = tl.sum(tile.to(tl.float32) * state[None, :], axis=1)
    tl.store(logits + request * experts + expert, total, mask=expert < experts)
    tl.store(state_out + request * WIDTH + column, state, mask=inside & (tl.program_id(1) == 0))


@triton.jit
def _ranks(logits, E: tl.constexpr, PADDED_E: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many experts come before each; those beyond E come last."""
    expert = tl.arange(0, PADDED_E)
    logit = tl.load(logits + expert, mask=expert < E, other=float("-inf"))
    before = (logit[None, :] > logit[:, None]) | (
        (logit[None, :] == logit[:, None]) & (expert[None, :] < expert[:, None])
    )
    return tl.sum(before.to(tl.int32), axis=1)


@triton.jit
def gate_up_kernel(  # type: ignore[no-untyped-def]
    logits,
    state_in,
    gate_up,
    products,
    top_k,
    E: tl.constexpr,
    PADDED_E: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """products [B, top_k, INNER] = silu(gate) * up; programs: (request and slot, block of rows)."""
    pair = tl.program_id(0)
    request = pair // top_k
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED)
    wait_for_previous(PDL)
    rank = _ranks(logits + request * E, E, PADDED_E)
    expert = tl.sum(tl.where(rank == pair % top_k, tl.arange(0, PADDED_E), 0), axis=0)
    # NaN ranks nowhere: whatever comes out must still be a place in the weights.
    weight = gate_up + tl.minimum(expert, E - 1).to(tl.int64) * (2 * INNER * WIDTH)
    gate_tile = weight_rows(weight, row, column, INNER, WIDTH, EXACT)
    up_tile = weight_rows(weight + INNER * WIDTH, row, column, INNER, WIDTH, EXACT)
    state = tl.load(state_in + request * WIDTH + column, mask=column < WIDTH, other=0.0)
    gate = tl.sum(gate_tile.to(tl.float32) * state[None, :], axis=1)
    up = tl.sum(up_tile.to(tl.float32) * state[None, :], axis=1)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(products + pair * INNER + row, product.to(products.dtype.element_ty), mask=row < INNER)


@triton.jit
def down_kernel(  # type: ignore[no-untyped-def]
    logits,
    products,
    down,
    stream,
    rows,
    E: tl.constexpr,
    PADDED_E: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    INNER: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    NORMALISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """stream [B, rows] += the weighted sum over slots, in their order; programs: (request, block of rows).

    The logits are read before the wait: the router is the last kernel but one.
    """
    request = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED)
    slot = tl.arange(0, SLOTS)
    expert = tl.arange(0, PADDED_E)
    rank = _ranks(logits + request * E, E, PADDED_E)
    logit = tl.load(logits + request * E + expert, mask=expert < E, other=float("-inf"))
    share = tl.exp(logit - tl.max(logit, axis=0))
    among = expert < E
    if NORMALISE:
        among = rank < TOP_K
    share = share / tl.sum(tl.where(among, share, 0.0), axis=0)
    chosen = (rank[None, :] == slot[:, None]) & (slot < TOP_K)[:, None]
    shares = tl.sum(tl.where(chosen, share[None, :], 0.0), axis=1)
    experts = tl.minimum(tl.sum(tl.where(chosen, expert[None, :], 0), axis=1), E - 1)
    start = experts.to(tl.int64) * (rows * INNER)
    place = down + start[:, None, None] + (row[:, None] * INNER + column[None, :])[None, :, :]
    if EXACT:
        tile = tl.load(place, eviction_policy="evict_first")
    else:
        inside = (row < rows)[:, None] & (column < INNER)[None, :]
        inside = inside[None, :, :] & (slot < TOP_K)[:, None, None]
        tile = tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")
    wait_for_previous(PDL)
    there = (slot < TOP_K)[:, None] & (column < INNER)[None, :]
    product = tl.load(products + (request * TOP_K + slot)[:, None] * INNER + column[None, :], mask=there, other=0.0)
    weighted = product.to(tl.float32) * shares[:, None]
    total = tl.sum(tl.sum(tile.to(tl.float32) * weighted[:, None, :], axis=0), axis=1)
    before = tl.load(stream + request * rows + row, mask=row < rows, other=0.0)
    tl.store(stream + request * rows + row, before + total, mask=row < rows)
