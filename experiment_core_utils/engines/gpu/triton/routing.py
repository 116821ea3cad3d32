"""Routing of a prompt: each token's experts with their weights. Importing this module needs Triton."""

import torch
import triton
import triton.language as tl

from experiment_core_utils.engines.gpu.triton.tuning import step_of_router, tuning_at


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
    (rows, width), tile = normed.shape, tuning_at(normed.device).routing
    experts, top_k = router.shape[0], topk_ids.shape[1]
    bins = max(triton.next_power_of_2(experts), 16)
    topk_weights = torch.empty((rows, top_k), dtype=torch.float32, device=normed.device)
    route_kernel[(triton.cdiv(rows, tile.rows),)](
        normed,
        router,
        length,
        topk_ids,
        topk_weights,
        rows,
        WIDTH=width,
        EXPERTS=experts,
        BINS=bins,
        TOP_K=top_k,
        CHOICES=triton.next_power_of_2(top_k),
        NORMALISE=normalise,
        ROWS=tile.rows,
        STEP=min(triton.next_power_of_2(width), step_of_router(tile.step, bins)),
        PRECISION="ieee" if normed.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return topk_weights
