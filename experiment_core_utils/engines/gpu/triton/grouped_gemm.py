"""The grouped GEMM of a mixture of experts: rows sorted by expert times their expert's weights, in one launch.

`align_blocks` sorts the rows without waiting for the host: counts, order and the list of row blocks stay on the device.
A program multiplies a strip of one expert's weights by up to `head + tail` of that expert's rows. Weights are the left
factor: rows then come in steps of 32 instead of the 64 of a Hopper product's left factor, and each weight is read once
for nearly every expert. Importing this module needs Triton.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from experiment_core_utils.engines.gpu.triton.gemv import launch, wait_for_previous
from experiment_core_utils.engines.gpu.triton.tuning import (
    Card,
    ProductTile,
    prefill_tiles_for,
    tuning_at,
)


@triton.jit
def align_blocks_kernel(  # type: ignore[no-untyped-def]
    topk_ids,
    order,
    row_blocks,
    slots,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sort choices by expert, one program an expert; each counts all choices for itself, which costs less than a second
    launch.
    """
    wait_for_previous(PDL)
    expert = tl.program_id(0)
    offset = tl.arange(0, STEP)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, slots, STEP):
        choice = tl.load(topk_ids + start + offset, mask=start + offset < slots, other=EXPERTS)
        counts += tl.histogram(choice, BINS)
    pieces = tl.where(bins < EXPERTS, (counts + ROW_BLOCK - 1) // ROW_BLOCK, 0)
    first = tl.sum(tl.where(bins < expert, counts, 0))
    piece = tl.sum(tl.where(bins < expert, pieces, 0))
    count = tl.sum(tl.where(bins == expert, counts, 0))
    if expert == 0:
        tl.store(row_blocks, tl.sum(pieces))
    for done in range(0, count, ROW_BLOCK):
        entry = row_blocks + 1 + 3 * (piece + done // ROW_BLOCK)
        tl.store(entry, expert)
        tl.store(entry + 1, first + done)
        tl.store(entry + 2, tl.minimum(count - done, ROW_BLOCK))
    for start in range(0, slots, STEP):
        choice = tl.load(topk_ids + start + offset, mask=start + offset < slots, other=EXPERTS)
        mine = (choice == expert).to(tl.int32)
        rank = tl.cumsum(mine, 0) - mine
        tl.store(order + first + rank, start + offset, mask=mine > 0)
        first += tl.sum(mine)


def align_blocks(
    topk_ids: torch.Tensor, experts: int, row_block: int, use_pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the choices by expert, without the host.

    Args:
        topk_ids: [T, k] int32; `experts` itself means none, its choices are ignored.
        row_block: rows of one expert that a program of the product takes.
        use_pdl: see `launch`.

    Returns:
        order [T * k] int32: the choice (token * k + rank) at each sorted place, tokens ascending within an expert, not
        written past the last choice; row blocks [1 + 3 * C] int32: their number, then expert, first place and rows
        of each.
    """
    slots, tile = topk_ids.numel(), tuning_at(topk_ids.device).alignment
    most = min(slots, slots // row_block + experts)
    order = torch.empty(slots, dtype=torch.int32, device=topk_ids.device)
    row_blocks = torch.empty(1 + 3 * most, dtype=torch.int32, device=topk_ids.device)
    launch(
        align_blocks_kernel,
        (experts,),
        tile.warps,
        use_pdl,
        (topk_ids, order, row_blocks, slots),
        EXPERTS=experts,
        BINS=triton.next_power_of_2(experts + 1),
        ROW_BLOCK=row_block,
        STEP=min(triton.next_power_of_2(slots), tile.rows),
    )
    return order, row_blocks


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    given,
    weight,
    output,
    order,
    expert,
    first,
    count,
    strip_index,
    top_k,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    GATED: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    STRIP: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    BULK: tl.constexpr,
):
    """Multiply `count` rows from `first` on, at most HEAD + TAIL; with TAIL 0 there is no second part."""
    strip = strip_index * STRIP + tl.arange(0, STRIP)
    inner = tl.arange(0, STEP)
    first_row = expert * (OUTER * (1 + GATED)) + strip_index * STRIP
    if not BULK:
        left = weight + first_row.to(tl.int64) * INNER + tl.arange(0, STRIP)[:, None] * INNER + inner[None, :]
    head = tl.arange(0, HEAD)
    head_slot = tl.load(order + first + head, mask=head < count, other=0)
    # Rows past the count read row 0 and are not stored: cheaper than a mask on every load.
    head_source = head_slot // top_k if GATED else tl.where(head < count, first + head, 0)
    right = given + head_source[None, :] * INNER + inner[:, None]
    total = tl.zeros((STRIP, HEAD), dtype=tl.float32)
    if GATED:
        total_up = tl.zeros((STRIP, HEAD), dtype=tl.float32)
    if TAIL > 0:
        tail = HEAD + tl.arange(0, TAIL)
        tail_slot = tl.load(order + first + tail, mask=tail < count, other=0)
        tail_source = tail_slot // top_k if GATED else tl.where(tail < count, first + tail, 0)
        right_tail = given + tail_source[None, :] * INNER + inner[:, None]
        rest = tl.zeros((STRIP, TAIL), dtype=tl.float32)
        if GATED:
            rest_up = tl.zeros((STRIP, TAIL), dtype=tl.float32)
    for start in range(0, INNER, STEP):
        weights = weight.load([first_row, start]) if BULK else tl.load(left + start)
        rows = tl.load(right)
        if GATED:
            weights_up = weight.load([first_row + OUTER, start]) if BULK else tl.load(left + OUTER * INNER + start)
        if TAIL > 0:
            rows_tail = tl.load(right_tail)
        total = tl.dot(weights, rows, total, input_precision=PRECISION)
        if GATED:
            total_up = tl.dot(weights_up, rows, total_up, input_precision=PRECISION)
        if TAIL > 0:
            rest = tl.dot(weights, rows_tail, rest, input_precision=PRECISION)
            if GATED:
                rest_up = tl.dot(weights_up, rows_tail, rest_up, input_precision=PRECISION)
            right_tail += STEP
        right += STEP
    if GATED:
        total = total * tl.sigmoid(total) * total_up
    head_target = first + head if GATED else head_slot
    out = output + head_target[None, :] * OUTER + strip[:, None]
    tl.store(out, total.to(output.dtype.element_ty), mask=(head < count)[None, :])
    if TAIL > 0:
        if GATED:
            rest = rest * tl.sigmoid(rest) * rest_up
        tail_target = first + tail if GATED else tail_slot
        out = output + tail_target[None, :] * OUTER + strip[:, None]
        tl.store(out, rest.to(output.dtype.element_ty), mask=(tail < count)[None, :])


@triton.jit(do_not_specialize=["top_k"])
def grouped_gemm_kernel(  # type: ignore[no-untyped-def]
    given,
    weight,
    output,
    order,
    row_blocks,
    top_k,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    GATED: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    STRIP: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    BULK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply the row blocks of `row_blocks` [1 + 3 * C]: how many there are, then expert, first row and row count of
    each.
    """
    strips: tl.constexpr = OUTER // STRIP
    row_block = tl.program_id(0) // strips
    strip = tl.program_id(0) % strips
    wait_for_previous(PDL)
    if row_block >= tl.load(row_blocks):
        return
    expert = tl.load(row_blocks + 1 + 3 * row_block)
    first = tl.load(row_blocks + 2 + 3 * row_block)
    count = tl.load(row_blocks + 3 + 3 * row_block)
    # fmt: off
    if TAIL == 0:
        _products(given, weight, output, order, expert, first, count, strip, top_k,
                  INNER, OUTER, GATED, HEAD, 0, STRIP, STEP, PRECISION, BULK)
    elif count > HEAD:
        _products(given, weight, output, order, expert, first, count, strip, top_k,
                  INNER, OUTER, GATED, HEAD, TAIL, STRIP, STEP, PRECISION, BULK)
    elif count > TAIL:
        _products(given, weight, output, order, expert, first, count, strip, top_k,
                  INNER, OUTER, GATED, HEAD, 0, STRIP, STEP, PRECISION, BULK)
    else:
        _products(given, weight, output, order, expert, first, count, strip, top_k,
                  INNER, OUTER, GATED, TAIL, 0, STRIP, STEP, PRECISION, BULK)


    # fmt: on


def grouped_gemm(
    given: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    order: torch.Tensor,
    row_blocks: torch.Tensor,
    top_k: int,
    gated: bool,
    tile: ProductTile,
    use_pdl: bool = False,
) -> None:
    """Fill `output` with the rows of `given` times their experts' weights; rows that no expert takes stay as they are.

    Args:
        given: gated: [T, inner], one row a token. Else [S, inner], sorted by expert.
        weight: [E, outer, inner], gated: [E, 2 * outer, inner], rows: gate, up.
        output: gated: [S, outer], silu(gate) * up, sorted by expert. Else [S, outer] in the order of the choices.
        order: [S] int32, the choice (token * top_k + rank) at each sorted place.
        row_blocks: as `align_blocks` makes them for this tile.
        use_pdl: see `launch`.
    """
    outer, inner = output.shape[1], given.shape[1]
    strips = outer // tile.strip
    precision = dot_precision(given)
    factor = TensorDescriptor.from_tensor(weight.flatten(0, 1), [tile.strip, tile.step]) if tile.bulk else weight
    launch(
        grouped_gemm_kernel,
        ((len(row_blocks) - 1) // 3 * strips,),
        tile.warps,
        use_pdl,
        (given, factor, output, order, row_blocks, top_k),
        tile.stages,
        INNER=inner,
        OUTER=outer,
        GATED=gated,
        HEAD=tile.head,
        TAIL=tile.tail,
        STRIP=tile.strip,
        STEP=tile.step,
        PRECISION=precision,
        BULK=tile.bulk,
    )


def dot_precision(like: torch.Tensor) -> str:
    """Triton's precision of products of numbers like these, for weights and rows in the dtype and on the device of
    `like`.

    float32 is multiplied as three products of its tf32 parts where tensor cores take tf32: on an H200 that is three
    times as fast as float32's own units, and at MolmoE-1B's widths nearer to float64 (4e-7; cuBLAS in float32 6e-7).
    """
    if like.dtype != torch.float32:
        return "tf32"
    return "tf32x3" if Card.of(like.device).has_tf32 else "ieee"


def expert_rows(
    normed: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_ids: torch.Tensor,
    tiles: tuple[ProductTile, ProductTile] | None = None,
    use_pdl: bool = False,
) -> torch.Tensor:
    """The experts' rows [T * k, H] of [T, H] and choices [T, k], one for each choice; rows without an expert are
    undefined.

    Args:
        gate_up, down: a `BlockWeights`'s, [E, 2 * I, H] and [E, H, I].
        tiles: of the two products, with the same `row_block`; None takes `prefill_tiles_for`.
        use_pdl: see `launch`.
    """
    experts, width, inner = down.shape
    top_k = topk_ids.shape[1]
    if tiles is None:
        tiles = prefill_tiles_for(width, inner, normed)
    order, row_blocks = align_blocks(topk_ids, experts, tiles[0].row_block, use_pdl)
    activated = torch.empty((topk_ids.numel(), inner), dtype=normed.dtype, device=normed.device)
    grouped_gemm(normed, gate_up, activated, order, row_blocks, top_k, True, tiles[0], use_pdl)
    rows = torch.empty((topk_ids.numel(), width), dtype=normed.dtype, device=normed.device)
    grouped_gemm(activated, down, rows, order, row_blocks, top_k, False, tiles[1], use_pdl)
    return rows
