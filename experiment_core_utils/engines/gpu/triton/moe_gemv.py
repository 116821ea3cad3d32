"""Matrix-vector kernels of a decode step after attention: output projection with router, and experts.

Each program of the output projection computes its rows' part of the router's logits, and the last one to finish ranks
the experts by their logit, the lower index first among equal ones. Importing this module needs Triton.
"""

import triton
import triton.language as tl

from experiment_core_utils.engines.gpu.triton.gemv import (
    PAIRED,
    is_last,
    ranked,
    stream_row,
    wait_for_previous,
    weight_rows,
)


@triton.jit
def _route(  # type: ignore[no-untyped-def]
    parts,
    squares,
    spread,
    topk_ids,
    topk_weights,
    programs,
    top_k,
    width,
    eps,
    E: tl.constexpr,
    PADDED_E: tl.constexpr,
    PADDED_P: tl.constexpr,
    AT_ONCE: tl.constexpr,
    NORMALISE: tl.constexpr,
    DENSE: tl.constexpr,
):
    """One request's experts in the order of their rank, their weights, and the factor of the norm before them; the
    factor alone of a DENSE block.
    """
    expert = tl.arange(0, PADDED_E)
    square = tl.zeros((), dtype=tl.float32)
    logit = tl.zeros((PADDED_E,), dtype=tl.float32)
    for first in tl.static_range(0, PADDED_P, AT_ONCE):
        program = first + tl.arange(0, AT_ONCE)
        inside = program < programs
        there = inside[:, None] & (expert < E)[None, :]
        place = parts + program[:, None] * E + expert[None, :]
        # Other programs wrote these: past the first-level cache.
        square += tl.sum(tl.load(squares + program, mask=inside, other=0.0, cache_modifier=".cg"), axis=0)
        if not DENSE:
            logit += tl.sum(tl.load(place, mask=there, other=0.0, cache_modifier=".cg"), axis=0)
    factor = tl.rsqrt(square / width + eps)
    tl.store(spread, factor)
    if not DENSE:
        logit = tl.where(expert < E, logit * factor, float("-inf"))
        rank, prob = ranked(logit, expert, top_k, E, NORMALISE)
        ranked_expert = expert < E
        if E > PAIRED:
            ranked_expert = rank < E
        tl.store(topk_ids + rank, expert, mask=ranked_expert)
        tl.store(topk_weights + rank, prob, mask=ranked_expert)


@triton.jit
def output_kernel(  # type: ignore[no-untyped-def]
    attended,
    weight,
    source,
    tokens,
    stream,
    norm,
    router,
    parts,
    squares,
    counters,
    spread,
    topk_ids,
    topk_weights,
    rows,
    top_k,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    E: tl.constexpr,
    PADDED_E: tl.constexpr,
    PADDED_P: tl.constexpr,
    AT_ONCE: tl.constexpr,
    NORMALISE: tl.constexpr,
    DENSE: tl.constexpr,
    EMBED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute stream [B, rows] = source + weight [rows, WIDTH] times `attended`; programs: (request, block of rows).

    With it the experts' order `topk_ids` [B, E], their weights `topk_weights` [B, E] (right for the first top_k), and
    `spread` [B], the factor of the norm before them; of a DENSE block `spread` alone.
    """
    request = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    column = tl.arange(0, PADDED)
    expert = tl.arange(0, PADDED_E)
    tile = weight_rows(weight, row, column, rows, WIDTH, EXACT)
    if not DENSE:
        there = (expert < E)[:, None] & inside[None, :]
        routing = tl.load(router + expert[:, None] * rows + row[None, :], mask=there, other=0.0).to(tl.float32)
        routing = routing * tl.load(norm + row, mask=inside, other=0.0).to(tl.float32)[None, :]
    wait_for_previous(PDL)
    state = tl.load(attended + request * WIDTH + column, mask=column < WIDTH, other=0.0)
    before = tl.load(stream_row(source, tokens, request, rows, EMBED) + row, mask=inside, other=0.0)
    after = before.to(tl.float32) + tl.sum(tile.to(tl.float32) * state[None, :], axis=1)
    tl.store(stream + request * rows + row, after, mask=inside)
    programs = tl.num_programs(1)
    place = request * programs + tl.program_id(1)
    if not DENSE:
        tl.store(parts + place * E + expert, tl.sum(routing * after[None, :], axis=1), mask=expert < E)
    tl.store(squares + place, tl.sum(after * after, axis=0))
    if is_last(counters + request, programs):
        _route(
            parts + request * programs * E,
            squares + request * programs,
            spread + request,
            topk_ids + request * E,
            topk_weights + request * E,
            programs,
            top_k,
            rows,
            eps,
            E,
            PADDED_E,
            PADDED_P,
            AT_ONCE,
            NORMALISE,
            DENSE,
        )


@triton.jit
def gate_up_kernel(  # type: ignore[no-untyped-def]
    stream,
    norm,
    spread,
    topk_ids,
    gate_up,
    products,
    used,
    gate,
    opened,
    top_k,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    EXACT: tl.constexpr,
    DENSE: tl.constexpr,
    GATED: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute products [B, top_k, INNER] = silu(gate) * up; programs: (request and choice, STEPS blocks of rows).

    The first program of each choice notes in `used` [B, top_k] whose weights it took. DENSE layers are one choice;
    where they are GATED, the first program computes `opened` [B], the sigmoid of the product with `gate` [WIDTH].
    """
    pair = tl.program_id(0)
    request = pair // top_k
    row = tl.program_id(1) * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    if NORMED:
        scale = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    weight = gate_up
    if not DENSE:
        wait_for_previous(PDL)
        expert = tl.load(topk_ids + request * E + pair % top_k).to(tl.int64)
        tl.store(used + pair, expert.to(tl.int32), mask=tl.program_id(1) == 0)
        weight += expert * (2 * INNER * WIDTH)
    gate_tile = weight_rows(weight, row, column, INNER, WIDTH, EXACT)
    up_tile = weight_rows(weight + INNER * WIDTH, row, column, INNER, WIDTH, EXACT)
    if DENSE:
        wait_for_previous(PDL)
    state = tl.load(stream + request * WIDTH + column, mask=inside, other=0.0)
    if NORMED:
        state = state * tl.load(spread + request) * scale
    if GATED:  # noqa: SIM102 (known when the kernel is built, the other condition is not)
        if tl.program_id(1) == 0:
            logit = tl.sum(tl.load(gate + column, mask=inside, other=0.0).to(tl.float32) * state, axis=0)
            tl.store(opened + request, 1.0 / (1.0 + tl.exp(-logit)))
    for step in tl.static_range(STEPS):
        next_gate, next_up = gate_tile, up_tile
        if step + 1 < STEPS:
            next_gate = weight_rows(weight, row + BLOCK, column, INNER, WIDTH, EXACT)
            next_up = weight_rows(weight + INNER * WIDTH, row + BLOCK, column, INNER, WIDTH, EXACT)
        opening = tl.sum(gate_tile.to(tl.float32) * state[None, :], axis=1)
        up = tl.sum(up_tile.to(tl.float32) * state[None, :], axis=1)
        product = opening / (1.0 + tl.exp(-opening)) * up
        tl.store(products + pair * INNER + row, product.to(products.dtype.element_ty), mask=row < INNER)
        row += BLOCK
        gate_tile, up_tile = next_gate, next_up


@triton.jit
def down_kernel(  # type: ignore[no-untyped-def]
    topk_ids,
    topk_weights,
    products,
    down,
    opened,
    stream,
    rows,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    INNER: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    DENSE: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute stream [B, rows] += the weighted sum over choices, in their order; programs: (request, block of rows).

    A choice's columns are cut into PARTS of PADDED. The first AT_ONCE parts' weights are read before the wait: the last
    kernel but one chose the experts. DENSE layers are one choice of weight 1, or where they are GATED of weight
    `opened` [B]. ADDED: to what is in the stream; else the sum takes its place.
    """
    request = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED)
    total = tl.zeros((BLOCK, PADDED), dtype=tl.float32)
    for first in tl.static_range(0, TOP_K * PARTS, AT_ONCE):
        tiles = ()
        for slot in tl.static_range(first, min(first + AT_ONCE, TOP_K * PARTS)):
            weight = down
            if not DENSE:
                expert = tl.load(topk_ids + request * E + slot // PARTS).to(tl.int64)
                weight += expert * (rows * INNER)
            tile = weight_rows(weight, row, slot % PARTS * PADDED + column, rows, INNER, EXACT)
            tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no unpacking)
        if first == 0:
            wait_for_previous(PDL)
        for slot in tl.static_range(first, min(first + AT_ONCE, TOP_K * PARTS)):
            inner = slot % PARTS * PADDED + column
            place = products + (request * TOP_K + slot // PARTS) * INNER + inner
            product = tl.load(place, mask=inner < INNER, other=0.0).to(tl.float32)
            if not DENSE:
                product = product * tl.load(topk_weights + request * E + slot // PARTS)
            total += tiles[slot - first].to(tl.float32) * product[None, :]
    added = tl.sum(total, axis=1)
    if GATED:
        added *= tl.load(opened + request)
    if ADDED:
        added += tl.load(stream + request * rows + row, mask=row < rows, other=0.0)
    tl.store(stream + request * rows + row, added, mask=row < rows)
