"""In: the residual stream and a block's router and experts; out: the stream after the block's mixture of experts.

There is no kernel that routes: each program of the first product finds its own expert in the router's logits.
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
    chosen,
    shares,
    top_k,
    E: tl.constexpr,
    PADDED_E: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    EXACT: tl.constexpr,
    NORMALISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """products [B, top_k, INNER] = silu(gate) * up; programs: (request and slot, STEPS blocks of rows).

    The first of a slot's programs writes the slot's expert and its weight, both [B, top_k].
    """
    pair = tl.program_id(0)
    request = pair // top_k
    row = tl.program_id(1) * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED)
    wait_for_previous(PDL)
    state = tl.load(state_in + request * WIDTH + column, mask=column < WIDTH, other=0.0)
    rank = _ranks(logits + request * E, E, PADDED_E)
    index = tl.arange(0, PADDED_E)
    # NaN ranks nowhere: whatever comes out must still be a place in the weights.
    expert = tl.minimum(tl.sum(tl.where(rank == pair % top_k, index, 0), axis=0), E - 1)
    weight = gate_up + expert.to(tl.int64) * (2 * INNER * WIDTH)
    gate_tile = weight_rows(weight, row, column, INNER, WIDTH, EXACT)
    up_tile = weight_rows(weight + INNER * WIDTH, row, column, INNER, WIDTH, EXACT)
    if tl.program_id(1) == 0:
        logit = tl.load(logits + request * E + index, mask=index < E, other=float("-inf"))
        share = tl.exp(logit - tl.max(logit, axis=0))
        among = index < E
        if NORMALISE:
            among = rank < top_k
        own = tl.sum(tl.where(rank == pair % top_k, share, 0.0), axis=0)
        tl.store(chosen + pair, expert)
        tl.store(shares + pair, own / tl.sum(tl.where(among, share, 0.0), axis=0))
    for step in tl.static_range(STEPS):
        next_gate, next_up = gate_tile, up_tile
        if step + 1 < STEPS:
            next_gate = weight_rows(weight, row + BLOCK, column, INNER, WIDTH, EXACT)
            next_up = weight_rows(weight + INNER * WIDTH, row + BLOCK, column, INNER, WIDTH, EXACT)
        gate = tl.sum(gate_tile.to(tl.float32) * state[None, :], axis=1)
        up = tl.sum(up_tile.to(tl.float32) * state[None, :], axis=1)
        product = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(products + pair * INNER + row, product.to(products.dtype.element_ty), mask=row < INNER)
        row += BLOCK
        gate_tile, up_tile = next_gate, next_up


@triton.jit
def down_kernel(  # type: ignore[no-untyped-def]
    chosen,
    shares,
    products,
    down,
    stream,
    rows,
    TOP_K: tl.constexpr,
    INNER: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """stream [B, rows] += the weighted sum over slots, in their order; programs: (request, block of rows)."""
    request = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED)
    wait_for_previous(PDL)
    total = tl.zeros((BLOCK, PADDED), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = request * TOP_K + slot
        expert = tl.load(chosen + pair).to(tl.int64)
        tile = weight_rows(down + expert * (rows * INNER), row, column, rows, INNER, EXACT)
        product = tl.load(products + pair * INNER + column, mask=column < INNER, other=0.0).to(tl.float32)
        total += tile.to(tl.float32) * (product * tl.load(shares + pair))[None, :]
    before = tl.load(stream + request * rows + row, mask=row < rows, other=0.0)
    tl.store(stream + request * rows + row, before + tl.sum(total, axis=1), mask=row < rows)
