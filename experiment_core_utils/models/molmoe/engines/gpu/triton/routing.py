"""Routing of a prompt: each token's experts with their weights, and block alignment of the tokens by expert.

Nothing here waits for the host: counts, order and the list of row blocks stay on the device. Importing this module
needs Triton.
"""

import torch
import triton
import triton.language as tl

from experiment_core_utils.models.molmoe.engines.gpu.triton.gemv import launch, wait_for_previous

# Rows of one program of the router; a product on tensor cores takes no fewer.
ROUTED_ROWS = 16


# Columns that it takes in one step, its warps, and its loads in flight.
ROUTED_STEP, ROUTED_WARPS, ROUTED_STAGES = 128, 4, 4


# Choices that one program of the planner looks at in one step, and its warps.
ALIGNED_ROWS, PLANNING_WARPS = 2048, 8


@triton.jit
def route_kernel(  # type: ignore[no-untyped-def]
    normed,
    router,
    length,
    topk_ids,
    topk_weights,
    rows,
    WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    NORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Route rows to experts; rows past `length` choose the expert EXPERTS, which does not exist."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, STEP)
    expert = tl.arange(0, BINS)
    logits = tl.zeros((ROWS, BINS), dtype=tl.float32)
    for start in range(0, WIDTH, STEP):
        in_width = start + inner < WIDTH
        inside = (row < rows)[:, None] & in_width[None, :]
        unit = tl.load(normed + row[:, None] * WIDTH + start + inner[None, :], mask=inside, other=0.0)
        columns = (expert < EXPERTS)[None, :] & in_width[:, None]
        gate = tl.load(router + expert[None, :] * WIDTH + start + inner[:, None], mask=columns, other=0.0)
        logits = tl.dot(unit, gate, logits, input_precision=PRECISION)
    logits = tl.where((expert < EXPERTS)[None, :], logits, float("-inf"))
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    left = powers / tl.sum(powers, axis=1)[:, None]
    choice = tl.arange(0, CHOICES)
    best = tl.zeros((ROWS, CHOICES), dtype=tl.int32)
    prob = tl.zeros((ROWS, CHOICES), dtype=tl.float32)
    for position in range(TOP_K):
        index = tl.argmax(left, axis=1)
        largest = tl.max(left, axis=1)
        here = (choice == position)[None, :]
        best = tl.where(here, index[:, None], best)
        prob = tl.where(here, largest[:, None], prob)
        left = tl.where(expert[None, :] == index[:, None], -1.0, left)
    if NORMALISE:
        prob = prob / tl.sum(prob, axis=1)[:, None]
    best = tl.where((row < tl.load(length))[:, None], best, EXPERTS)
    kept = (row < rows)[:, None] & (choice < TOP_K)[None, :]
    tl.store(topk_ids + row[:, None] * TOP_K + choice[None, :], best, mask=kept)
    tl.store(topk_weights + row[:, None] * TOP_K + choice[None, :], prob, mask=kept)


def route(
    normed: torch.Tensor, router: torch.Tensor, length: torch.Tensor, topk_ids: torch.Tensor, normalise: bool
) -> torch.Tensor:
    """Weights of each token's best k experts, by the router of [T, H] and a softmax in float32 over all experts.

    Args:
        topk_ids: [T, k] int32, is filled with the experts, in rows from `length` (one int64) on with E, which is none.

    Returns:
        the weights [T, k] float32, summing to 1 only where `normalise` says so.
    """
    rows, width = normed.shape
    experts, top_k = router.shape[0], topk_ids.shape[1]
    topk_weights = torch.empty((rows, top_k), dtype=torch.float32, device=normed.device)
    route_kernel[(triton.cdiv(rows, ROUTED_ROWS),)](
        normed,
        router,
        length,
        topk_ids,
        topk_weights,
        rows,
        WIDTH=width,
        EXPERTS=experts,
        BINS=max(triton.next_power_of_2(experts), 16),
        TOP_K=top_k,
        CHOICES=triton.next_power_of_2(top_k),
        NORMALISE=normalise,
        ROWS=ROUTED_ROWS,
        STEP=min(triton.next_power_of_2(width), ROUTED_STEP),
        PRECISION="ieee" if normed.dtype == torch.float32 else "tf32",
        num_warps=ROUTED_WARPS,
        num_stages=ROUTED_STAGES,
    )
    return topk_weights


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
        written past the last choice; chunks [1 + 3 * C] int32: their number, then expert, first place and rows of each.
    """
    slots = topk_ids.numel()
    most = min(slots, slots // row_block + experts)
    order = torch.empty(slots, dtype=torch.int32, device=topk_ids.device)
    row_blocks = torch.empty(1 + 3 * most, dtype=torch.int32, device=topk_ids.device)
    launch(
        align_blocks_kernel,
        (experts,),
        PLANNING_WARPS,
        use_pdl,
        (topk_ids, order, row_blocks, slots),
        EXPERTS=experts,
        BINS=triton.next_power_of_2(experts + 1),
        ROW_BLOCK=row_block,
        STEP=min(triton.next_power_of_2(slots), ALIGNED_ROWS),
    )
    return order, row_blocks
