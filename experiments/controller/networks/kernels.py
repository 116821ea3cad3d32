"""Triton kernels of the controller's networks: the logits of a stage in a few launches.

All sums are in float32. Importing this module needs Triton.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

# Columns of the embeddings that one program sums, and rows that it loads at once.
COLUMNS, ROWS = 128, 16
# As of `layer_norm`.
NORM_EPS = tl.constexpr(1e-5)
# As of the budget token.
RMS_EPS = tl.constexpr(1e-8)


@triton.jit
def mean_row_kernel(  # type: ignore[no-untyped-def]
    ids, count, table, mean, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    """Compute mean [WIDTH] of the `count` first rows `ids` of the table, zeros of none; programs: blocks of columns."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    number = tl.load(count)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(0, number, ROWS):
        place = start + tl.arange(0, ROWS)
        row = tl.load(ids + place, mask=place < number, other=0).to(tl.int64)
        there = (place < number)[:, None] & inside[None, :]
        values = tl.load(table + row[:, None] * WIDTH + column[None, :], mask=there, other=0.0)
        total += tl.sum(values.to(tl.float32), axis=0)
    tl.store(mean + column, total / tl.maximum(number, 1), mask=inside)


@triton.jit
def gelu(values):  # type: ignore[no-untyped-def]
    return 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))


@triton.jit
def rows_times(weight, row, rows, vector, WIDTH: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Products of the given rows of weight [rows, WIDTH] and the vector [PADDED], zeros outside either."""
    column = tl.arange(0, PADDED)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    weights = tl.load(weight + row[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
    return tl.sum(weights * vector[None, :], axis=1)


@triton.jit
def budget_kernel(  # type: ignore[no-untyped-def]
    features,
    encode,
    encode_bias,
    code_in,
    known_bias,
    known,
    embed,
    embed_bias,
    squares,
    token,
    width,
    embedding_rms,
    NEURONS: tl.constexpr,
    CODE: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    """Compute a budget's part of stage 1, known [width], and its token [HIDDEN], from its features [CODE].

    `squares` [CODE + 1, CODE + 1] has the products of the columns of [embed, embed_bias]: by it the token's length is
    known before the token. Programs: blocks of the token's columns.
    """
    place = tl.arange(0, PADDED)
    given = tl.load(features + place, mask=place < CODE, other=0.0)
    code = rows_times(encode, place, CODE, given, CODE, PADDED)
    code = gelu(code + tl.load(encode_bias + place, mask=place < CODE, other=0.0))
    neuron = tl.arange(0, NEURONS)
    inner = rows_times(code_in, neuron, width, code, CODE, PADDED)
    inner += tl.load(known_bias + neuron, mask=neuron < width, other=0.0)
    if tl.program_id(0) == 0:
        tl.store(known + neuron, inner, mask=neuron < width)
    # With a one after the code the bias is one of the columns.
    longer = tl.where(place == CODE, 1.0, code)
    length = tl.sum(longer * rows_times(squares, place, CODE + 1, longer, CODE + 1, PADDED), axis=0)
    scale = embedding_rms * tl.rsqrt(length / HIDDEN + RMS_EPS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    raw = rows_times(embed, column, HIDDEN, code, CODE, PADDED)
    raw += tl.load(embed_bias + column, mask=column < HIDDEN, other=0.0)
    tl.store(token + column, raw * scale, mask=column < HIDDEN)


@triton.jit
def inner_kernel(  # type: ignore[no-untyped-def]
    states, weight, known, known_row, inner, WIDTH: tl.constexpr, PADDED: tl.constexpr, STATES: tl.constexpr
):
    """Compute inner [w] = gelu(weight [w, STATES, WIDTH] x normalised states + known [rows, w]); a program a neuron."""
    neuron, width = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    total = tl.load(known + tl.load(known_row) * width + neuron)
    for state in tl.static_range(STATES):
        weights = tl.load(weight + (neuron * STATES + state) * WIDTH + column, mask=inside, other=0.0)
        values = tl.load(states + state * WIDTH + column, mask=inside, other=0.0)
        centred = tl.where(inside, values - tl.sum(values, axis=0) / WIDTH, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / WIDTH + NORM_EPS)
        total += tl.sum(weights * centred, axis=0) * scale
    tl.store(inner + neuron, gelu(total))


@triton.jit
def logits_kernel(  # type: ignore[no-untyped-def]
    inner, weight, bias, logits, width, values, WIDTH: tl.constexpr, VALUES: tl.constexpr
):
    """Compute logits [values] = weight [values, width] times inner + bias; one program, padded to WIDTH and VALUES."""
    value, column = tl.arange(0, VALUES), tl.arange(0, WIDTH)
    there = (value < values)[:, None] & (column < width)[None, :]
    weights = tl.load(weight + value[:, None] * width + column[None, :], mask=there, other=0.0)
    given = tl.load(inner + column, mask=column < width, other=0.0)
    total = tl.sum(weights * given[None, :], axis=1) + tl.load(bias + value, mask=value < values, other=0.0)
    tl.store(logits + value, total, mask=value < values)


@dataclass(frozen=True)
class LogitsLayers:
    """The two layers of one stage, in float32 on the device."""

    weight: torch.Tensor  #: [w, S, H] of S states; the norms have no weights
    known: torch.Tensor  #: [R, w], the inner layer's input without the states; one row is taken
    #: out_weight, out_bias: [V, w], [V]
    out_weight: torch.Tensor
    out_bias: torch.Tensor


@dataclass(frozen=True)
class BudgetLayers:
    """The budget token's two layers and its part of stage 1, in float32 on the device."""

    #: encode, encode_bias: features [C] -> code [C], before its gelu
    encode: torch.Tensor
    encode_bias: torch.Tensor
    #: code_in, known_bias: code -> known [w]
    code_in: torch.Tensor
    known_bias: torch.Tensor
    #: embed, embed_bias: code -> token [H], before it is scaled
    embed: torch.Tensor
    embed_bias: torch.Tensor
    squares: torch.Tensor  #: [C + 1, C + 1], products of the columns of embed and of its bias after them
    embedding_rms: float  #: that the token has


def launch_budget(layers: BudgetLayers, features: torch.Tensor, known: torch.Tensor, token: torch.Tensor) -> None:
    """Compute `known` [w] and `token` [H] of a budget's features [C]."""
    code, neurons, hidden = len(features), len(layers.known_bias), len(layers.embed_bias)
    budget_kernel[(triton.cdiv(hidden, COLUMNS),)](
        features,
        layers.encode,
        layers.encode_bias,
        layers.code_in,
        layers.known_bias,
        known,
        layers.embed,
        layers.embed_bias,
        layers.squares,
        token,
        neurons,
        layers.embedding_rms,
        NEURONS=triton.next_power_of_2(neurons),
        CODE=code,
        PADDED=triton.next_power_of_2(code + 1),
        COLUMNS=COLUMNS,
        HIDDEN=hidden,
    )


def launch_mean_row(ids: torch.Tensor, count: torch.Tensor, table: torch.Tensor, mean: torch.Tensor) -> None:
    """Compute the mean [H] in float32 of the `count` [1] first rows `ids` [N] of a table [V, H]."""
    width = table.shape[1]
    grid = (triton.cdiv(width, COLUMNS),)
    mean_row_kernel[grid](ids, count, table, mean, WIDTH=width, COLUMNS=COLUMNS, ROWS=ROWS)


def launch_logits(
    layers: LogitsLayers, states: torch.Tensor, known_row: torch.Tensor, inner: torch.Tensor, logits: torch.Tensor
) -> None:
    """Compute logits [V] of states [S, H] in float32; `known_row` [1]; `inner` [w] is workspace."""
    neurons, number, width = layers.weight.shape
    sizes: dict[str, Any] = {"WIDTH": width, "PADDED": triton.next_power_of_2(width), "STATES": number}
    inner_kernel[(neurons,)](states, layers.weight, layers.known, known_row, inner, **sizes)
    values = len(layers.out_bias)
    padded = {"WIDTH": triton.next_power_of_2(neurons), "VALUES": triton.next_power_of_2(values)}
    logits_kernel[(1,)](inner, layers.out_weight, layers.out_bias, logits, neurons, values, **padded)
