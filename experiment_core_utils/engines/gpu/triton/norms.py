"""Small kernels of a prefill: norms, gated units, rotary positions, writing to the KV cache, sums of expert rows.

Everything is computed in float32 and rounded where it is stored. Importing this module needs Triton.
"""

import torch
import triton
import triton.language as tl

from experiment_core_utils.engines.gpu.triton.gemv import padded_values
from experiment_core_utils.engines.gpu.triton.tuning import tuning_at


@triton.jit
def combine_norm_kernel(  # type: ignore[no-untyped-def]
    hidden,
    expert_rows,
    topk_weights,
    length,
    norm_weight,
    summed,
    normed,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    LAST: tl.constexpr,
):
    """Sum with expert rows and RMS norm. TOP_K 0: nothing is added. LAST: the last real row alone, to row 0 of
    `normed`.
    """
    real = tl.load(length)
    row = tl.program_id(0).to(tl.int64)
    out = row
    if LAST:
        row = real - 1
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = tl.load(hidden + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if TOP_K > 0:
        # No expert wrote the rows of padding.
        if row < real:
            for choice in tl.static_range(TOP_K):
                slot = row * TOP_K + choice
                part = tl.load(expert_rows + slot * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
                value += tl.load(topk_weights + slot) * part if WEIGHTED else part
        value = value.to(hidden.dtype.element_ty).to(tl.float32)
        if not LAST:
            tl.store(summed + row * WIDTH + column, value.to(hidden.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    weight = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + out * WIDTH + column, (value * scale * weight).to(hidden.dtype.element_ty), mask=inside)


def norm(
    hidden: torch.Tensor, norm_weight: torch.Tensor, length: torch.Tensor, eps: float, last: bool = False
) -> torch.Tensor:
    """RMS norm of [T, H]; with `last` [1, H], of row `length` - 1 alone."""
    normed = torch.empty_like(hidden[:1] if last else hidden)
    _launch(hidden, hidden, None, length, norm_weight, hidden, normed, eps, top_k=0, last=last)
    return normed


def combine_norm(
    hidden: torch.Tensor,
    expert_rows: torch.Tensor,
    topk_weights: torch.Tensor | None,
    length: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of `hidden` [T, H] and each token's expert rows [T * k, H], weighted by `topk_weights` [T, k], and its
    RMS norm.

    The sum over the k choices is in their order, so it does not change from run to run.

    Args:
        topk_weights: None for 1 each.
    """
    summed, normed, top_k = torch.empty_like(hidden), torch.empty_like(hidden), len(expert_rows) // len(hidden)
    _launch(hidden, expert_rows, topk_weights, length, norm_weight, summed, normed, eps, top_k, last=False)
    return summed, normed


def _launch(
    hidden: torch.Tensor,
    expert_rows: torch.Tensor,
    topk_weights: torch.Tensor | None,
    length: torch.Tensor,
    norm_weight: torch.Tensor,
    summed: torch.Tensor,
    normed: torch.Tensor,
    eps: float,
    top_k: int,
    last: bool,
) -> None:
    width = hidden.shape[1]
    combine_norm_kernel[(normed.shape[0],)](
        hidden,
        expert_rows,
        # Not read where there are none.
        hidden if topk_weights is None else topk_weights,
        length,
        norm_weight,
        summed,
        normed,
        eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        TOP_K=top_k,
        WEIGHTED=topk_weights is not None,
        LAST=last,
        num_warps=tuning_at(hidden.device).row_warps,
    )


@triton.jit
def gated_kernel(gate_up, output, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(output + row * WIDTH + column, value.to(output.dtype.element_ty), mask=inside)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """Gated units silu(gate) * up [T, I] of the gate's and the up-projection's outputs beside each other [T, 2 * I],
    contiguous.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    tile = tuning_at(gate_up.device).elementwise
    block = min(triton.next_power_of_2(width), tile.rows)
    # As many elements a thread for narrow rows too.
    warps = max(1, tile.warps * block // tile.rows)
    gated_kernel[(rows, triton.cdiv(width, block))](gate_up, output, WIDTH=width, BLOCK=block, num_warps=warps)
    return output


@triton.jit
def _apply_rope(  # type: ignore[no-untyped-def]
    given,
    norm_weight,
    output,
    head_stride,
    cosine,
    sine,
    eps,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    NORMS: tl.constexpr,
    ROPE: tl.constexpr,
):
    """One row of heads: RMS norm (NORMS 1: over the whole row, 2: of each head), then with ROPE rotary positions on the
    halves of each head.
    """
    head = tl.arange(0, PADDED)
    half = tl.arange(0, PADDED_HALF)
    inside = (head < HEADS)[:, None] & (half < HALF)[None, :]
    low_place = head[:, None] * (2 * HALF) + half[None, :]
    low = tl.load(given + low_place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(given + low_place + HALF, mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(low * low + high * high, axis=1)
    if NORMS == 1:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / (HEADS * 2 * HALF) + eps)
        low *= scale * tl.load(norm_weight + low_place, mask=inside, other=0.0).to(tl.float32)
        high *= scale * tl.load(norm_weight + low_place + HALF, mask=inside, other=0.0).to(tl.float32)
    elif NORMS == 2:
        scales = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        low *= scales * padded_values(norm_weight + half, HALF, PADDED_HALF).to(tl.float32)[None, :]
        high *= scales * padded_values(norm_weight + HALF + half, HALF, PADDED_HALF).to(tl.float32)[None, :]
    turned_low, turned_high = low, high
    if ROPE:
        turned_low = low * cosine[None, :] - high * sine[None, :]
        turned_high = high * cosine[None, :] + low * sine[None, :]
    out = output + head[:, None] * head_stride + half[None, :]
    kind: tl.constexpr = output.dtype.element_ty
    tl.store(out, turned_low.to(kind), mask=inside)
    tl.store(out + HALF, turned_high.to(kind), mask=inside)


@triton.jit
def apply_rope_and_store_kernel(  # type: ignore[no-untyped-def]
    qkv_states,
    query_norm,
    key_norm,
    cosines,
    sines,
    queries,
    keys,
    values,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    NORMS: tl.constexpr,
    ROPE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    width: tl.constexpr = 2 * HALF
    half = tl.arange(0, PADDED_HALF)
    cosine = padded_values(cosines + row * HALF + half, HALF, PADDED_HALF)
    sine = padded_values(sines + row * HALF + half, HALF, PADDED_HALF)
    given = qkv_states + row * ((HEADS + 2 * KEY_HEADS) * width)
    out = queries + row * (HEADS * width)
    # fmt: off
    _apply_rope(given, query_norm, out, width, cosine, sine, eps,
                HEADS, PADDED, HALF, PADDED_HALF, NORMS, ROPE)
    given += HEADS * width
    out = keys + row * width
    _apply_rope(given, key_norm, out, head_stride, cosine, sine, eps,
                KEY_HEADS, KEY_PADDED, HALF, PADDED_HALF, NORMS, ROPE)
    # fmt: on
    given += KEY_HEADS * width
    head = tl.arange(0, KEY_PADDED)
    channel = tl.arange(0, 2 * PADDED_HALF)
    inside = (head < KEY_HEADS)[:, None] & (channel < width)[None, :]
    value = tl.load(given + head[:, None] * width + channel[None, :], mask=inside)
    tl.store(values + row * width + head[:, None] * head_stride + channel[None, :], value, mask=inside)


def apply_rope_and_store(
    qkv_states: torch.Tensor,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: int,
    eps: float,
    norms: int = 1,
    has_rope: bool = True,
) -> torch.Tensor:
    """Apply norm and rotary positions to queries and keys of [T, (Q + 2 * KV) * D]; keys and values go to the first T
    positions.

    Args:
        cosines, sines: [>= T, D / 2] float32, by position.
        keys, values: [KV, slots, D], contiguous, slots >= T.
        norms: as `DecoderWeights.norms_of_heads`.
        has_rope: whether positions are applied at all.

    Returns:
        queries [T, Q, D].
    """
    key_heads, max_seq_len, width = keys.shape
    queries = torch.empty((qkv_states.shape[0], heads, width), dtype=qkv_states.dtype, device=qkv_states.device)
    apply_rope_and_store_kernel[(qkv_states.shape[0],)](
        qkv_states,
        # What a block has not is not read.
        qkv_states if query_norm is None else query_norm,
        qkv_states if key_norm is None else key_norm,
        cosines,
        sines,
        queries,
        keys,
        values,
        max_seq_len * width,
        eps,
        HEADS=heads,
        KEY_HEADS=key_heads,
        PADDED=triton.next_power_of_2(heads),
        KEY_PADDED=triton.next_power_of_2(key_heads),
        HALF=width // 2,
        PADDED_HALF=triton.next_power_of_2(width // 2),
        NORMS=norms,
        ROPE=has_rope,
        num_warps=tuning_at(qkv_states.device).row_warps,
    )
    return queries
