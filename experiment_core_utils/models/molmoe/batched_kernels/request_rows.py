"""In: each request's row of the residual stream and what is added to it; out: its norm, or its experts as well.

One program a request, all sums in float32. Importing this module needs Triton.
"""

import torch
import triton
import triton.language as tl

from experiment_core_utils.models.molmoe.kernels.dense_products import normed, stream_row, wait_for_previous
from experiment_core_utils.models.molmoe.kernels.launching import launch

SUMMING_WARPS, ROUTING_WARPS = 4, 16
# Columns of the router that a program reads at once.
ROUTED_STEP = 512


@triton.jit
def summed_norm_kernel(  # type: ignore[no-untyped-def]
    source,
    tokens,
    expert_rows,
    shares,
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
    """stream = source + the weighted sum of TOP_K experts' rows, in their order; unit = its norm."""
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
        state += tl.load(shares + slot) * part
    tl.store(stream + request * WIDTH + column, state, mask=inside)
    state = normed(state, scale, WIDTH, eps)
    tl.store(unit + request * WIDTH + column, state.to(unit.dtype.element_ty), mask=inside)


@triton.jit
def routed_norm_kernel(  # type: ignore[no-untyped-def]
    stream,
    norm,
    router,
    unit,
    chosen,
    shares,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    E: tl.constexpr,
    PADDED_E: tl.constexpr,
    TOP_K: tl.constexpr,
    STEP: tl.constexpr,
    NORMALISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """unit = the norm of `stream`; chosen [B, TOP_K], the experts with the largest logits, and their shares.

    Experts rank by their logit, the lower index first among equal ones, as in a single request's step.
    """
    request = tl.program_id(0)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    scale = tl.load(norm + column, mask=inside, other=0.0)
    stream += request * WIDTH
    expert = tl.arange(0, PADDED_E)
    step = tl.arange(0, STEP)
    there = (expert < E)[:, None] & (step < WIDTH)[None, :]
    place = router + expert[:, None] * WIDTH + step[None, :]
    gate = tl.load(place, mask=there, other=0.0)
    wait_for_previous(PDL)
    state = tl.load(stream + column, mask=inside, other=0.0)
    tl.store(unit + request * WIDTH + column, normed(state, scale, WIDTH, eps).to(unit.dtype.element_ty), mask=inside)
    factor = tl.rsqrt(tl.sum(state * state, axis=0) / WIDTH + eps)
    logit = tl.zeros((PADDED_E,), dtype=tl.float32)
    for start in tl.static_range(0, PADDED, STEP):
        following = gate
        if start + STEP < PADDED:
            there = (expert < E)[:, None] & (start + STEP + step < WIDTH)[None, :]
            following = tl.load(place + start + STEP, mask=there, other=0.0)
        within = start + step < WIDTH
        part = tl.load(stream + start + step, mask=within, other=0.0) * factor
        part *= tl.load(norm + start + step, mask=within, other=0.0).to(tl.float32)
        logit += tl.sum(gate.to(tl.float32) * part[None, :], axis=1)
        gate = following
    # Without an order, as NaN has none, the first experts are chosen: ids that exist, with shares that are NaN.
    logit = tl.where((expert < E) & (logit == logit), logit, float("-inf"))
    before = (logit[None, :] > logit[:, None]) | (
        (logit[None, :] == logit[:, None]) & (expert[None, :] < expert[:, None])
    )
    rank = tl.sum(before.to(tl.int32), axis=1)
    share = tl.exp(logit - tl.max(logit, axis=0))
    among = expert < E
    if NORMALISE:
        among = rank < TOP_K
    share = share / tl.sum(tl.where(among, share, 0.0), axis=0)
    tl.store(chosen + request * TOP_K + rank, expert, mask=rank < TOP_K)
    tl.store(shares + request * TOP_K + rank, share, mask=rank < TOP_K)


def summed_norm(
    source: torch.Tensor,
    tokens: torch.Tensor | None,
    experts: tuple[torch.Tensor, torch.Tensor] | None,
    norm: torch.Tensor,
    stream: torch.Tensor,
    unit: torch.Tensor,
    eps: float,
    overlap: bool,
) -> None:
    """Each request's row of `source`, and its experts' rows added, -> `stream` [B, H] float32 and its RMS norm `unit`.

    Args:
        source: [B, H], or with `tokens` [B] the embeddings [V, H] of those.
        experts: their rows [B * k, H] and shares [B, k]; None adds nothing.
        unit: [B, H] in the weights' dtype.
    """
    batch, width = stream.shape
    rows, shares = (stream, stream) if experts is None else experts
    launch(
        summed_norm_kernel,
        (batch,),
        SUMMING_WARPS,
        overlap,
        (source, stream if tokens is None else tokens, rows, shares, norm, stream, unit, eps),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        TOP_K=0 if experts is None else shares.shape[1],
        EMBED=tokens is not None,
    )


def routed_norm(
    stream: torch.Tensor,
    norm: torch.Tensor,
    router: torch.Tensor,
    unit: torch.Tensor,
    chosen: torch.Tensor,
    eps: float,
    normalise: bool,
    overlap: bool,
) -> torch.Tensor:
    """The RMS norm of `stream` [B, H] -> `unit`, the best k experts -> `chosen` [B, k] int32; their shares [B, k].

    The shares are those of a softmax in float32 over all experts, summing to 1 only where `normalise` says so.
    """
    batch, width = stream.shape
    experts, top_k = router.shape[0], chosen.shape[1]
    shares = torch.empty((batch, top_k), dtype=torch.float32, device=stream.device)
    padded = triton.next_power_of_2(width)
    launch(
        routed_norm_kernel,
        (batch,),
        ROUTING_WARPS,
        overlap,
        (stream, norm, router, unit, chosen, shares, eps),
        WIDTH=width,
        PADDED=padded,
        E=experts,
        PADDED_E=triton.next_power_of_2(experts),
        TOP_K=top_k,
        STEP=min(padded, ROUTED_STEP),
        NORMALISE=normalise,
    )
    return shares
