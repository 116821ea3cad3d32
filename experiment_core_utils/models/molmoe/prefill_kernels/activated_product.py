"""In: rows, weights and biases; out: their product behind a quick-GELU, so that the wide rows are written once.

Importing this module needs Triton.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

# Rows, columns and factor step of one program, and how many strips of rows go by together so that they share weights.
ROWS, COLUMNS, STEP, TOGETHER = 128, 256, 64, 8


@triton.jit
def activated_product_kernel(  # type: ignore[no-untyped-def]
    given,
    weight,
    bias,
    output,
    rows,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """`given` and `weight` are descriptors: rows past the end read zeros."""
    strips = tl.cdiv(rows, ROWS)
    across: tl.constexpr = OUTER // COLUMNS
    group = tl.program_id(0) // (TOGETHER * across)
    inside = tl.minimum(strips - group * TOGETHER, TOGETHER)
    place = tl.program_id(0) % (TOGETHER * across)
    first_row = (group * TOGETHER + place % inside) * ROWS
    first_column = place // inside * COLUMNS
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, INNER, STEP):
        left = given.load([first_row, start])
        right = weight.load([first_column, start])
        total = tl.dot(left, right.T, total)
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    total += tl.load(bias + column).to(tl.float32)[None, :]
    total = total * tl.sigmoid(1.702 * total)
    out = output + row.to(tl.int64)[:, None] * OUTER + column[None, :]
    tl.store(out, total.to(output.dtype.element_ty), mask=(row < rows)[:, None])


def activated_product(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """[M, K] and [N, K], K a multiple of 64 and N of 256, bfloat16 or float16 -> [M, N]."""
    rows, inner = given.shape
    outer = weight.shape[0]
    output = torch.empty((rows, outer), dtype=given.dtype, device=given.device)
    activated_product_kernel[(triton.cdiv(rows, ROWS) * (outer // COLUMNS),)](
        TensorDescriptor.from_tensor(given, [ROWS, STEP]),
        TensorDescriptor.from_tensor(weight, [COLUMNS, STEP]),
        bias,
        output,
        rows,
        INNER=inner,
        OUTER=outer,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        STEP=STEP,
        TOGETHER=TOGETHER,
        num_warps=8,
        num_stages=4,
    )
    return output
