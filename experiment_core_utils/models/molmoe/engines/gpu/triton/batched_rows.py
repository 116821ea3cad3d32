"""Kernels on the residual streams of several requests: sums with RMS norm, and routing.

All sums are in float32. Importing this module needs Triton.
"""

import torch
import triton
import triton.language as tl

from experiment_core_utils.models.molmoe.engines.gpu.triton.gemv import (
    is_last,
    launch,
    normed,
    ranked,
    stream_row,
    wait_for_previous,
)

SUMMING_WARPS, ROUTING_WARPS = 4, 8


# Columns of the router that one program takes.
ROUTED_COLUMNS = 512


@triton.jit
def summed_norm_kernel(  # type: ignore[no-untyped-def]
    source,
    tokens,
    expert_rows,
    topk_weights,
    norm,
    stream,
    unit,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    EMBED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute stream = source + the weighted sum of its experts' rows, in their order, and unit = its norm. Programs:
    requests.
    """
    request = tl.program_id(0)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    scale = tl.load(norm + column, mask=inside, other=0.0)
    wait_for_previous(PDL)
    begin = stream_row(source, tokens, request, WIDTH, EMBED)
    state = tl.load(begin + column, mask=inside, other=0.0).to(tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = request * TOP_K + choice
        part = tl.load(expert_rows + slot * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        state += tl.load(topk_weights + slot) * part
    tl.store(stream + request * WIDTH + column, state, mask=inside)
    state = normed(state, scale, WIDTH, eps)
    tl.store(unit + request * WIDTH + column, state.to(unit.dtype.element_ty), mask=inside)


@triton.jit
def routed_norm_kernel(  # type: ignore[no-untyped-def]
    stream,
    norm,
    router,
    unit,
    parts,
    counters,
    topk_ids,
    topk_weights,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    E: tl.constexpr,
    PADDED_E: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORMALISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute unit = the norm of `stream`, and topk_ids [B, TOP_K], the experts with the largest logits, with their
    weights.

    Programs: (request, block of columns). Each gives its columns' `parts` [B, blocks, E] of the logits, and the last of
    a request to finish ranks its experts.
    """
    request = tl.program_id(0)
    own = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    expert = tl.arange(0, PADDED_E)
    there = (expert < E)[:, None] & (own < WIDTH)[None, :]
    gate = tl.load(router + expert[:, None] * WIDTH + own[None, :], mask=there, other=0.0)
    scale = tl.load(norm + own, mask=own < WIDTH, other=0.0).to(tl.float32)
    column = tl.arange(0, PADDED)
    stream += request * WIDTH
    wait_for_previous(PDL)
    state = tl.load(stream + column, mask=column < WIDTH, other=0.0)
    value = tl.load(stream + own, mask=own < WIDTH, other=0.0)
    value = value * tl.rsqrt(tl.sum(state * state, axis=0) / WIDTH + eps) * scale
    tl.store(unit + request * WIDTH + own, value.to(unit.dtype.element_ty), mask=own < WIDTH)
    blocks: tl.constexpr = PADDED // COLUMNS
    parts += request * blocks * E
    part = tl.sum(gate.to(tl.float32) * value[None, :], axis=1)
    tl.store(parts + tl.program_id(1) * E + expert, part, mask=expert < E)
    if is_last(counters + request, blocks):
        _rank(parts, topk_ids + request * TOP_K, topk_weights + request * TOP_K, blocks, E, PADDED_E, TOP_K, NORMALISE)


@triton.jit
def _rank(  # type: ignore[no-untyped-def]
    parts,
    topk_ids,
    topk_weights,
    BLOCKS: tl.constexpr,
    E: tl.constexpr,
    PADDED_E: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """One request's experts by their logit, the lower index first among equal ones, and their weights."""
    expert = tl.arange(0, PADDED_E)
    block = tl.arange(0, BLOCKS)
    # Other programs wrote these: past the first-level cache.
    place = parts + block[:, None] * E + expert[None, :]
    logit = tl.sum(tl.load(place, mask=(expert < E)[None, :], other=0.0, cache_modifier=".cg"), axis=0)
    # NaN has no order; then the first experts are chosen, which exist, and their weights are NaN.
    logit = tl.where((expert < E) & (logit == logit), logit, float("-inf"))
    rank, prob = ranked(logit, expert, TOP_K, E, NORMALISE)
    tl.store(topk_ids + rank, expert, mask=rank < TOP_K)
    tl.store(topk_weights + rank, prob, mask=rank < TOP_K)


def summed_norm(
    source: torch.Tensor,
    tokens: torch.Tensor | None,
    experts: tuple[torch.Tensor, torch.Tensor] | None,
    norm: torch.Tensor,
    stream: torch.Tensor,
    unit: torch.Tensor,
    eps: float,
    use_pdl: bool,
) -> None:
    """Add each request's experts' rows to its row of `source` -> `stream` [B, H] float32 and its RMS norm `unit`.

    Args:
        source: [B, H], or with `tokens` [B] the embeddings [V, H] of those.
        experts: their rows [B * k, H] and weights [B, k]; None adds nothing.
        unit: [B, H] in the weights' dtype.
    """
    batch, width = stream.shape
    rows, topk_weights = (stream, stream) if experts is None else experts
    launch(
        summed_norm_kernel,
        (batch,),
        SUMMING_WARPS,
        use_pdl,
        (source, stream if tokens is None else tokens, rows, topk_weights, norm, stream, unit, eps),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        TOP_K=0 if experts is None else topk_weights.shape[1],
        EMBED=tokens is not None,
    )


def routed_norm(
    stream: torch.Tensor,
    norm: torch.Tensor,
    router: torch.Tensor,
    unit: torch.Tensor,
    topk_ids: torch.Tensor,
    counters: torch.Tensor,
    eps: float,
    normalise: bool,
    use_pdl: bool,
) -> torch.Tensor:
    """The RMS norm of `stream` [B, H] -> `unit`, the best k experts -> `topk_ids` [B, k] int32, and their weights [B,
    k].

    The weights are those of a softmax in float32 over all experts, summing to 1 only where `normalise` says so.

    Args:
        counters: [B] int32, 0 before and after.
    """
    batch, width = stream.shape
    experts, top_k = router.shape[0], topk_ids.shape[1]
    padded = triton.next_power_of_2(width)
    columns = min(padded, ROUTED_COLUMNS)
    parts = torch.empty((batch, padded // columns, experts), dtype=torch.float32, device=stream.device)
    topk_weights = torch.empty((batch, top_k), dtype=torch.float32, device=stream.device)
    launch(
        routed_norm_kernel,
        (batch, padded // columns),
        ROUTING_WARPS,
        use_pdl,
        (stream, norm, router, unit, parts, counters, topk_ids, topk_weights, eps),
        WIDTH=width,
        PADDED=padded,
        E=experts,
        PADDED_E=triton.next_power_of_2(experts),
        TOP_K=top_k,
        COLUMNS=columns,
        NORMALISE=normalise,
    )
    return topk_weights
