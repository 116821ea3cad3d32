"""In: what a stage sees and its weights, on a GPU; out: its odds, by two or three kernels on the current stream.

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


@triton.jit
def mean_row_kernel(  # type: ignore[no-untyped-def]
    ids, count, table, mean, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    """mean [WIDTH] of the `count` first rows `ids` of the table, zeros of none; programs: blocks of columns."""
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
def inner_kernel(  # type: ignore[no-untyped-def]
    states, weight, known, known_row, inner, WIDTH: tl.constexpr, PADDED: tl.constexpr, STATES: tl.constexpr
):
    """inner [w] = gelu(weight [w, STATES, WIDTH] times the normalised states + known [rows, w]); a program a neuron."""
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
    tl.store(inner + neuron, 0.5 * total * (1.0 + tl.erf(total * 0.7071067811865476)))


@triton.jit
def odds_kernel(  # type: ignore[no-untyped-def]
    inner,
    weight,
    bias,
    odds,
    width,
    values,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
):
    """odds [values] = weight [values, width] times inner + bias; one program, padded to WIDTH and VALUES."""
    value, column = tl.arange(0, VALUES), tl.arange(0, WIDTH)
    there = (value < values)[:, None] & (column < width)[None, :]
    weights = tl.load(weight + value[:, None] * width + column[None, :], mask=there, other=0.0)
    given = tl.load(inner + column, mask=column < width, other=0.0)
    total = tl.sum(weights * given[None, :], axis=1) + tl.load(bias + value, mask=value < values, other=0.0)
    tl.store(odds + value, total, mask=value < values)


@dataclass(frozen=True)
class OddsLayers:
    """One stage's two layers, in float32 on the device.

    Attributes:
        weight: [w, S, H] of S states; the norms have no weights.
        known: [R, w], what stands in front of the inner layer without the states; one row is taken.
        out_weight, out_bias: [V, w], [V].
    """

    weight: torch.Tensor
    known: torch.Tensor
    out_weight: torch.Tensor
    out_bias: torch.Tensor


def launch_mean_row(ids: torch.Tensor, count: torch.Tensor, table: torch.Tensor, mean: torch.Tensor) -> None:
    """Mean [H] in float32 of the `count` [1] first rows `ids` [N] of a table [V, H]."""
    width = table.shape[1]
    grid = (triton.cdiv(width, COLUMNS),)
    mean_row_kernel[grid](ids, count, table, mean, WIDTH=width, COLUMNS=COLUMNS, ROWS=ROWS)


def launch_odds(
    layers: OddsLayers, states: torch.Tensor, known_row: torch.Tensor, inner: torch.Tensor, odds: torch.Tensor
) -> None:
    """Log odds [V], not normalised, of states [S, H] in float32; `known_row` [1]; `inner` [w] is working memory."""
    neurons, number, width = layers.weight.shape
    sizes: dict[str, Any] = {"WIDTH": width, "PADDED": triton.next_power_of_2(width), "STATES": number}
    inner_kernel[(neurons,)](states, layers.weight, layers.known, known_row, inner, **sizes)
    values = len(layers.out_bias)
    padded = {"WIDTH": triton.next_power_of_2(neurons), "VALUES": triton.next_power_of_2(values)}
    odds_kernel[(1,)](inner, layers.out_weight, layers.out_bias, odds, neurons, values, **padded)
