"""A dense matrix product for few rows, which reads the weight once for up to 64 requests.

Sums are in float32; the rows are in the weights' dtype. Importing this module needs Triton.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from experiment_core_utils.models.molmoe.engines.gpu.triton.gemv import launch, wait_for_previous
from experiment_core_utils.models.molmoe.engines.gpu.triton.tuning import SmallBatchTile

# Requests of one program: a product on tensor cores takes 16 at least, and registers bound them.
FEWEST_REQUESTS, MOST_REQUESTS = 16, 64


@triton.jit
def small_batch_gemm_kernel(  # type: ignore[no-untyped-def]
    given,
    weight,
    output,
    best_values,
    best_rows,
    rows,
    requests,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    REQUESTS: tl.constexpr,
    FULL: tl.constexpr,
    ADDED: tl.constexpr,
    RANKED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute output [B, rows] = weight [rows, WIDTH] times `given` [B, WIDTH]; programs: (REQUESTS requests, block of
    rows).

    FULL: no program has fewer requests. ADDED: the products are added to `output`. RANKED: with each
    block's largest and its row, the first of equal ones, in `best_values` and `best_rows` [B, blocks].
    """
    request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inner = tl.arange(0, STEP)
    # Rows past the last read it and are not stored: cheaper than a mask on every load.
    left = weight + tl.minimum(row, rows - 1)[:, None].to(tl.int64) * WIDTH + inner[None, :]
    right = given + request[None, :] * WIDTH + inner[:, None]
    total = tl.zeros((BLOCK, REQUESTS), dtype=tl.float32)
    wait_for_previous(PDL)
    for start in range(0, WIDTH, STEP):
        if FULL:
            taken = tl.load(right + start)
        else:
            # All programs would wait for one row in place of the others.
            taken = tl.load(right + start, mask=(request < requests)[None, :], other=0.0)
        total = tl.dot(tl.load(left + start), taken, total, input_precision=PRECISION)
    inside = (row < rows)[:, None] & (request < requests)[None, :]
    place = output + request[None, :] * rows + row[:, None]
    if ADDED:
        total += tl.load(place, mask=inside, other=0.0)
    tl.store(place, total, mask=inside)
    if RANKED:
        total = tl.where((row < rows)[:, None], total, float("-inf"))
        best = tl.max(total, axis=0)
        first = tl.min(tl.where(total == best[None, :], row[:, None], rows - 1), axis=0)
        place = request * tl.num_programs(1) + tl.program_id(1)
        tl.store(best_values + place, best, mask=request < requests)
        tl.store(best_rows + place, first, mask=request < requests)


def small_batch_gemm(
    given: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    tile: SmallBatchTile,
    use_pdl: bool,
    best: tuple[torch.Tensor, torch.Tensor] | None = None,
    added: bool = False,
) -> None:
    """Rows [B, W] times the weight [N, W] -> `output` [B, N] float32, W a multiple of the tile's step.

    Args:
        best: [B, N / tile.rows] float32 and int32 for the largest of each block of rows, and which row that is.
        added: whether to add to what is in `output`.
    """
    requests, width = given.shape
    rows = weight.shape[0]
    taken = min(max(triton.next_power_of_2(requests), FEWEST_REQUESTS), MOST_REQUESTS)
    sizes: dict[str, Any] = {
        "WIDTH": width,
        "BLOCK": tile.rows,
        "STEP": tile.step,
        "REQUESTS": taken,
        "FULL": requests % taken == 0,
        "ADDED": added,
        "RANKED": best is not None,
        "PRECISION": "ieee" if weight.dtype == torch.float32 else "tf32",
    }
    launch(
        small_batch_gemm_kernel,
        (triton.cdiv(requests, taken), triton.cdiv(rows, tile.rows)),
        tile.warps,
        use_pdl,
        (given, weight, output, *((output, output) if best is None else best), rows, requests),
        tile.stages,
        **sizes,
    )
