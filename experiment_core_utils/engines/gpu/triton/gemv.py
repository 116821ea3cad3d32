"""Matrix-vector kernels of a decode step for one request or up to 64, the choice of the next token, and launches.

Sums are in float32. Importing this module needs Triton.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from experiment_core_utils.engines.gpu.triton.tuning import FEWEST_ROWS, SmallBatchTile, tuning_at
from experiment_core_utils.engines.kv_cache import KVCache

# Experts all pairs of which are compared at once: a quarter of a million pairs of 512 take longer than ten turns.
PAIRED = tl.constexpr(128)


@triton.jit
def weight_rows(weight, row, column, rows, WIDTH: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows [BLOCK, PADDED] of a weight [rows, WIDTH], zero outside; EXACT where nothing is outside."""
    place = weight + row[:, None].to(tl.int64) * WIDTH + column[None, :]
    if EXACT:
        tile = tl.load(place, eviction_policy="evict_first")
    else:
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        tile = tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def padded_values(places, WIDTH: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values at the first WIDTH of PADDED places, of a head or half of it, and zeros for the others."""
    return tl.load(places) if PADDED == WIDTH else tl.load(places, mask=tl.arange(0, PADDED) < WIDTH, other=0.0)


@triton.jit
def stream_row(stream, tokens, request, WIDTH: tl.constexpr, EMBED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The start of the request's residual stream: its own row, or at the start of a step its token's embedding."""
    row = request
    if EMBED:
        row = tl.load(tokens + request)
    return stream + row * WIDTH


@triton.jit
def normed(state, scale, WIDTH: tl.constexpr, eps):  # type: ignore[no-untyped-def]
    """Root-mean-square norm of one row of WIDTH values (zeros beyond them)."""
    return state * tl.rsqrt(tl.sum(state * state, axis=0) / WIDTH + eps) * scale.to(tl.float32)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def ask_for(weight, program, BYTES: tl.constexpr, THREADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ask for a program's BYTES of a weight, lines of 128 for each of its THREADS, in the second-level cache; nothing
    waits for them.
    """
    if BYTES:
        start = weight.to(tl.pointer_type(tl.int8)) + program.to(tl.int64) * BYTES
        for first in tl.static_range(0, BYTES, 128 * THREADS):
            line = start + first + tl.arange(0, THREADS).to(tl.int64) * 128
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line.to(tl.int64)], tl.int32, is_pure=False, pack=1
            )


@triton.jit
def is_last(counter, programs):  # type: ignore[no-untyped-def]
    """Whether all others of so many programs have finished their stores; the last one resets the counter to 0."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
    tl.store(counter, 0, mask=last)
    return last


@triton.jit
def ranked(logit, expert, top_k, E: tl.constexpr, NORMALISE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ranks of one token's E experts by their logit, the lower index first among equal ones, and their weights.

    For few tokens, a program each. All pairs of up to PAIRED experts are compared at once; of more the likeliest is
    taken top_k times, and the others are ranked E or above. A prompt's tokens take `route_kernel` of routing.py.
    """
    if E <= PAIRED:
        before = (logit[None, :] > logit[:, None]) | (
            (logit[None, :] == logit[:, None]) & (expert[None, :] < expert[:, None])
        )
        rank = tl.sum(before.to(tl.int32), axis=1)
    else:
        rank = tl.where(expert < E, E, E + 1)
        for place in range(top_k):
            best = tl.max(tl.where(rank == E, logit, float("-inf")), axis=0)
            first = tl.min(tl.where((rank == E) & (logit == best), expert, E), axis=0)
            rank = tl.where((rank == E) & (expert == first), place, rank)
    prob = tl.exp(logit - tl.max(logit, axis=0))
    among = expert < E
    if NORMALISE:
        among = rank < top_k
    prob = prob / tl.sum(tl.where(among, prob, 0.0), axis=0)
    return rank, prob


@triton.jit
def normed_product_kernel(  # type: ignore[no-untyped-def]
    stream,
    tokens,
    norm,
    weight,
    bias,
    output,
    rows,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    EXACT: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    EMBED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute output [B, rows] = weight [rows, WIDTH] times the stream, NORMED or as it is, with a bias [rows] where
    BIASED; programs: (request, STEPS row blocks).
    """
    request = tl.program_id(0)
    row = tl.program_id(1) * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    tile = weight_rows(weight, row, column, rows, WIDTH, EXACT)
    if NORMED:
        scale = tl.load(norm + column, mask=inside, other=0.0)
    wait_for_previous(PDL)
    state = tl.load(stream_row(stream, tokens, request, WIDTH, EMBED) + column, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        state = normed(state, scale, WIDTH, eps)
    for step in tl.static_range(STEPS):
        following = tile
        if step + 1 < STEPS:
            following = weight_rows(weight, row + BLOCK, column, rows, WIDTH, EXACT)
        total = tl.sum(tile.to(tl.float32) * state[None, :], axis=1)
        if BIASED:
            total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
        tl.store(output + request * rows + row, total, mask=row < rows)
        row += BLOCK
        tile = following


@triton.jit
def add_normed_kernel(  # type: ignore[no-untyped-def]
    part,
    norm,
    source,
    tokens,
    stream,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    EMBED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute stream [B, WIDTH] = source + the norm of a block's part [B, WIDTH]; programs: requests."""
    request = tl.program_id(0)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    scale = tl.load(norm + column, mask=inside, other=0.0)
    wait_for_previous(PDL)
    added = normed(tl.load(part + request * WIDTH + column, mask=inside, other=0.0), scale, WIDTH, eps)
    before = tl.load(stream_row(source, tokens, request, WIDTH, EMBED) + column, mask=inside, other=0.0)
    tl.store(stream + request * WIDTH + column, before.to(tl.float32) + added, mask=inside)


@triton.jit
def head_kernel(  # type: ignore[no-untyped-def]
    stream,
    norm,
    weight,
    logits,
    best_logits,
    best_rows,
    rows,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute logits [B, rows] = weight [rows, WIDTH] times the norm of the stream, with each block's largest and its
    row, the first of equal ones.
    """
    request = tl.program_id(0)
    block = tl.program_id(1)
    row = block * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    tile = weight_rows(weight, row, column, rows, WIDTH, EXACT)
    scale = tl.load(norm + column, mask=inside, other=0.0)
    wait_for_previous(PDL)
    state = tl.load(stream + request * WIDTH + column, mask=inside, other=0.0)
    state = normed(state, scale, WIDTH, eps)
    total = tl.sum(tile.to(tl.float32) * state[None, :], axis=1)
    tl.store(logits + request * rows + row, total, mask=row < rows)
    total = tl.where(row < rows, total, float("-inf"))
    best = tl.max(total, axis=0)
    first = tl.min(tl.where(total == best, row, rows - 1), axis=0)
    place = request * tl.num_programs(1) + block
    tl.store(best_logits + place, best)
    tl.store(best_rows + place, first)


@triton.jit
def next_token_kernel(  # type: ignore[no-untyped-def]
    best_logits, best_rows, tokens, checked, lengths, blocks, rows, PADDED: tl.constexpr, PDL: tl.constexpr
):
    """The likeliest row of each request becomes its token, the lowest of equal ones; its length grows by one.

    `checked` is the token, or `finite_logits.NOT_FINITE` where its logit is not finite.
    """
    request = tl.program_id(0)
    block = tl.arange(0, PADDED)
    inside = block < blocks
    wait_for_previous(PDL)
    logit = tl.load(best_logits + request * blocks + block, mask=inside, other=float("-inf"))
    row = tl.load(best_rows + request * blocks + block, mask=inside, other=0)
    best = tl.max(logit, axis=0)
    first = tl.min(tl.where(inside & (logit == best), row, rows - 1), axis=0)
    tl.store(tokens + request, first.to(tl.int64))
    # Not-a-number is not below infinity either; a maximum may ignore it, and is minus infinity where all are.
    tl.store(checked + request, tl.where(tl.abs(best) < float("inf"), first, -1).to(tl.int64))
    tl.store(lengths + request, tl.load(lengths + request) + 1)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    warps: int,
    use_pdl: bool,
    arguments: tuple[Any, ...],
    stages: int | None = None,
    **sizes: Any,
) -> None:
    """Launch a kernel; with `use_pdl` it may start, and read its weights, while the one before it ends (Hopper or
    newer).

    Args:
        stages: loads in flight; None is Triton's own number.
    """
    # The interpreter takes neither number.
    options: dict[str, Any] = {"launch_pdl": True} if use_pdl else {}
    if stages is not None:
        options["num_stages"] = stages
    kernel[grid](*arguments, **sizes, PDL=use_pdl, num_warps=warps, **options)


def launch_next_token(
    kv_cache: KVCache, best_logits: torch.Tensor, best_rows: torch.Tensor, rows: int, use_pdl: bool
) -> None:
    """Choose each request's token, the end of a step: the likeliest of the best rows of the head's `rows`, both [B,
    blocks].

    It becomes the request's token, checked as well, and the lengths beside the keys grow by one.
    """
    blocks = best_logits.shape[1]
    launch(
        next_token_kernel,
        (kv_cache.batch,),
        tuning_at(best_logits.device).next_token_warps,
        use_pdl,
        (best_logits, best_rows, kv_cache.next_tokens, kv_cache.checked_tokens, kv_cache.device_lengths, blocks),
        rows=rows,
        PADDED=triton.next_power_of_2(blocks),
    )


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
    taken = min(max(triton.next_power_of_2(requests), FEWEST_ROWS), tuning_at(given.device).most_requests)
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
